"""Classes of dimensions of a step that nobody has annotated: which dimensions must be split alike."""
