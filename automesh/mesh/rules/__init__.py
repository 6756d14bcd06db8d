"""Rules files: from a selector to the mesh of a device kind."""
