"""The user's step as a program. The nouns here are free of jax; the modules that say so are not."""
