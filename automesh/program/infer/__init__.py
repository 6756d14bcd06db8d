"""Which dimensions of a step that nobody has annotated must be split alike."""
