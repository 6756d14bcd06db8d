"""How long it takes to rank every legal mesh: the command itself, timed, and pricing on its own."""
