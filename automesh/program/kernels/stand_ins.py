"""Lets a program with kernels for accelerators be compiled on the CPU for the shardings of its
results (jax).

A Pallas kernel for TPUs, or an operation that jax knows on one platform alone (attention by cuDNN),
cannot be compiled here. While such a program is compiled to be examined, zeros replace what these
operations return: the compiler sees an operation without a rule for its sharding in both cases.

Private in jax: the tables of lowering rules (`jax._src.interpreters.mlir`). Checked with jax 0.10.1
to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

_RULES, _RULES_OF_PLATFORMS = "_lowerings", "_platform_specific_lowerings"
_KERNEL = "pallas_call"


def is_for_accelerators(equation: Any) -> bool:
    """Whether the CPU cannot run an operation of a program."""
    primitive, (rules, rules_of_cpu) = equation.primitive, _tables()
    if primitive.name == _KERNEL:
        return not equation.params.get("interpret")
    return rules is not None and primitive not in rules and primitive not in rules_of_cpu


@contextmanager
def standing_in(programs: Iterable[Any]) -> Generator[None]:
    """Lowers the operations of programs that the CPU cannot run as zeros while the body runs.

    Args:
      programs: jaxprs.
    """
    rules, rules_of_cpu = _tables()
    missing = {
        equation.primitive
        for program in programs
        for equation in _equations(program)
        if is_for_accelerators(equation)
    }
    if rules is None:
        missing = set[Any]()
    before = {one: rules_of_cpu.get(one) for one in missing}
    try:
        for primitive in before:
            usual: Any = rules.get(primitive) if rules is not None else None
            rule = _zeros_or(None if usual is None else usual.rule)
            mlir.register_lowering(primitive, rule, platform="cpu")
        yield
    finally:
        for primitive, rule in before.items():
            if rule is None:
                rules_of_cpu.pop(primitive, None)
            else:
                rules_of_cpu[primitive] = rule


def _tables() -> tuple[Any, Any]:
    """Returns the rules of all platforms and those of the CPU; None in a jax that has no such
    tables."""
    internals = importlib.import_module("jax._src.interpreters.mlir")
    rules: Any = getattr(internals, _RULES, None)
    of_platforms: Any = getattr(internals, _RULES_OF_PLATFORMS, None)
    return (None, {}) if rules is None or of_platforms is None else (rules, of_platforms["cpu"])


def _zeros_or(usual: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a rule that makes zeros; a kernel that is interpreted has its usual rule."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        if usual is not None and params.get("interpret"):
            return usual(ctx, *args, **params)

        def zeros(*_: Any) -> list[Any]:
            return [jax.numpy.zeros(one.shape, one.dtype) for one in ctx.avals_out]

        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *args)

    return lower


def _equations(program: Any) -> Iterator[Any]:
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)
