"""Makes a search space from classes, and puts the step on a mesh by a mapping of them."""
