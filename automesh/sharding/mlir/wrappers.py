"""Finds functions of the user's code that do nothing but constrain what they are given (no jax).

    def split(mesh, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

All constraints of such a script have this one line. The line that calls it says more: which array
is constrained, and to what.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache

_CONSTRAINTS = frozenset(("with_sharding_constraint", "reshard"))


def is_in_a_wrapper(path: str, line: int) -> bool:
    """Whether a line is the constraint of a function that returns a parameter of its own,
    constrained and not otherwise changed."""
    return any(first <= line <= last for first, last in _wrappers(path))


@lru_cache(maxsize=256)
def _wrappers(path: str) -> tuple[tuple[int, int], ...]:
    """Lists first and last lines of the constraints that wrappers return."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        (call.lineno, call.end_lineno or call.lineno)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.Lambda))
        for call in _returned_constraints(function)
    )


def _returned_constraints(function: ast.FunctionDef | ast.Lambda) -> Iterator[ast.Call]:
    given = {one.arg for one in (*function.args.posonlyargs, *function.args.args)}
    if isinstance(function, ast.Lambda):
        returned: list[ast.expr] = [function.body]
    else:
        own = list(_own_nodes(function))
        given -= {one.id for one in own if isinstance(one, ast.Name) and _is_assigned(one)}
        returned = [one.value for one in own if isinstance(one, ast.Return) and one.value]
    for value in returned:
        if isinstance(value, ast.Call) and _is_constraint(value, given):
            yield value


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Lists the nodes of a function without those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))


def _is_assigned(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_constraint(call: ast.Call, given: set[str]) -> bool:
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    first = call.args[0] if call.args else None
    return name in _CONSTRAINTS and isinstance(first, ast.Name) and first.id in given
