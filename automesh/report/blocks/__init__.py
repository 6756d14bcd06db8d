"""What a command has to tell, as sections of blocks, and what shows them: terminal, HTML, JSON."""
