"""`automesh lint`: finds costly things that the compiler adds to a step, and what cures save."""
