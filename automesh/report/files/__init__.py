"""A search's result as files: rules, CSV, JSON."""
