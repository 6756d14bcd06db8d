"""`automesh lint`."""
