"""Compiled XLA programs as values: read, counted, told apart. No jax."""

from automesh.hlo.count import count
from automesh.hlo.fingerprint import module_fingerprint
from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.read import read_module
from automesh.hlo.schedule.read import read_schedule

__all__ = [
    "Computation",
    "Instruction",
    "Module",
    "Shape",
    "count",
    "module_fingerprint",
    "read_module",
    "read_schedule",
]
