"""The user's script: loaded, built, and checked."""
