"""The report of `automesh check-script`: data, table and JSON."""
