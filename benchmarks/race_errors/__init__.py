"""How often a race is wrong: identical finalists called different, a slower one not found."""
