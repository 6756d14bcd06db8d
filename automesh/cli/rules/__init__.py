"""Commands about rules that are there already."""
