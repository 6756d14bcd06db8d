"""Does `automesh lint` name what is broken, and nothing else? See `command`."""
