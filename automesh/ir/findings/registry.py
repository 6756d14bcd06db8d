"""All rules: those in `RULES` of the modules of this folder, which are found by looking there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import automesh.ir.findings
from automesh.cost.terms import Finding
from automesh.ir.findings.nouns import PartitionedProgram
from automesh.ir.findings.rule import OperationCheck, Rule, StateCheck, WholeProgramCheck


def _discovered() -> Iterator[Rule]:
    """Yields the rules of all modules of this folder, by the names of the modules."""
    folder = automesh.ir.findings
    for name in sorted(module.name for module in pkgutil.iter_modules(folder.__path__)):
        path = f"{folder.__name__}.{name}"
        if path != __name__:
            yield from getattr(importlib.import_module(path), "RULES", ())


RULES: tuple[Rule, ...] = tuple(_discovered())
_OF_STATE = tuple(rule.check for rule in RULES if isinstance(rule.check, StateCheck))
_OF_OPERATIONS = tuple(rule.check for rule in RULES if isinstance(rule.check, OperationCheck))
_OF_PROGRAMS = tuple(rule.check for rule in RULES if isinstance(rule.check, WholeProgramCheck))


def state_findings(program: PartitionedProgram) -> Iterator[Finding]:
    """Applies the rules of arguments and results to a step's first program."""
    for check in _OF_STATE:
        yield from check.find(program)


def program_findings(program: PartitionedProgram) -> Iterator[Finding]:
    """Applies the rules of operations to a program after the rewrites of a platform's compiler."""
    for seen in program.operations():
        for check in _OF_OPERATIONS:
            yield from check.find(program, seen)
    for of_all in _OF_PROGRAMS:
        yield from of_all.find(program)
