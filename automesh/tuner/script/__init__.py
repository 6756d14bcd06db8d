"""A script without `build`: what its one run tells, and whether its step may be carried."""
