"""Libraries that a script imports: seen at their import, with files led to the private layer."""
