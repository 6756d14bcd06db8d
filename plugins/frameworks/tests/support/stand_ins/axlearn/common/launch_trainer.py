"""Where AXLearn defines the flags of its trainer; they are the same object."""

from axlearn.common.launch import FLAGS

__all__ = ["FLAGS"]
