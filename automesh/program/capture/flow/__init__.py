"""How parameters and optimizer state flow through the functions that a script calls, and which of
them are its training step."""
