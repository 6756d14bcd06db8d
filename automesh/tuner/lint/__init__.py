"""`automesh lint`: what a compiler does to a step that nobody asked for, and what cures save."""
