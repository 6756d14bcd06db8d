"""From classes to what is searched, and the step on a mesh by a mapping of them."""
