"""A script without `build`: what its first run shows, and whether its step can be carried."""
