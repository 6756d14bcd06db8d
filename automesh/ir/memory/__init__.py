"""Finds the buffers that live at each point of a step."""
