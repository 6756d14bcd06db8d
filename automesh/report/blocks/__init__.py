"""The output of a command as sections of blocks, and what shows it: terminal, HTML, JSON."""
