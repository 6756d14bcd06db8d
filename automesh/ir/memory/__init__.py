"""Which buffers live at which point of a step."""
