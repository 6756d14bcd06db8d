"""The user's step as a program. The data classes do not import jax; modules that do say so."""
