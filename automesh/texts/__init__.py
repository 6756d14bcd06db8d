"""Texts that people and others give: what is refused, what is secret, what a terminal may show."""
