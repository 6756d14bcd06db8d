"""What a Pallas kernel for TPUs does, counted in its own program where it states no cost."""
