"""Compiled XLA programs as values: reads, counts and compares them. No jax."""

from automesh.hlo.count import count as count
from automesh.hlo.fingerprint import module_fingerprint as module_fingerprint
from automesh.hlo.nouns import Computation as Computation
from automesh.hlo.nouns import Instruction as Instruction
from automesh.hlo.nouns import Module as Module
from automesh.hlo.nouns import Shape as Shape
from automesh.hlo.read import read_module as read_module
from automesh.hlo.schedule.read import read_schedule as read_schedule
