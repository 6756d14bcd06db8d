"""Removes from a step the calls to Python that give it no value: those that only show something
(`jax.debug.print`, `callback`, `inspect_array_sharding`), and those that stop the program if a
check fails (jax).

They belong to the process of the script, and would keep the step from being carried to other
processes and devices. The step is estimated, compiled and measured without them, which a notice
says.

A check is a `jax.pure_callback` in a branch of `jax.lax.cond` whose function can only raise, as
`equinox.error_if` makes it: the branch is taken if the check fails. What it would give, and what
other callbacks make of that, is nan instead, so that a step in which it is taken has other numbers.

Private in jax: the classes of a jaxpr (`jax._src.core`). Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import dis
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from automesh.package import is_users_file
from automesh.program.capture.world.told import tell

_CORE: Any = importlib.import_module("jax._src.core")
_SOURCE: Any = importlib.import_module("jax._src.source_info_util")
_CLOSED: Any = getattr(_CORE, "ClosedJaxpr", None)
_SHOWS = frozenset({"debug_callback", "debug_print", "inspect_sharding"})
_CHECKS = "pure_callback"
_BRANCHES = "cond"
_RETURNS = ("RETURN", "YIELD")  # what the operations of Python begin with that end a call
_EFFECTS = frozenset({"DebugEffect", "OrderedDebugEffect"})


def without_shown(closed: Any) -> Any:
    """Returns a program without these calls; the same object if it has none."""
    if not _has_any(closed, set()):
        return closed
    taken = _Taken()
    made = taken.value(closed)
    if taken.shows:
        places = _listed(taken.shows)
        tell(
            "calls from the step to the host that only show something (jax.debug.print, "
            f"callback, inspect_array_sharding{f', at {places}' if places else ''}) are left out"
        )
    if taken.checks:
        places = _listed(taken.checks)
        tell(
            "checks that stop the step from Python if they fail "
            f"({f'{_CHECKS} in a branch, at {places}' if places else _CHECKS}) are left out: the "
            "step gives nan where one would fail"
        )
    return made


def _listed(places: list[str]) -> str:
    return ", ".join(list(dict.fromkeys(place for place in places if place))[:4])


def line_of(equation: Any) -> str:
    """Returns the line where the user's code asks for an operation, such as `train.py:12`; empty if
    it is not known. A line of a library that does so counts only if there is none of the user."""
    frames = list(_SOURCE.user_frames(equation.source_info.traceback))
    own = [frame for frame in frames if is_users_file(frame.file_name)] or frames
    return f"{own[0].file_name.rpartition('/')[2]}:{own[0].start_line}" if own else ""


def _is_program(value: Any) -> bool:
    return isinstance(value, _CORE.Jaxpr) or (_CLOSED is not None and isinstance(value, _CLOSED))


def _has_any(value: Any, seen: set[tuple[int, bool]], *, in_branch: bool = False) -> bool:
    if _is_program(value):
        if (id(value), in_branch) in seen:
            return False
        seen.add((id(value), in_branch))
        return any(
            one.primitive.name in _SHOWS
            or (in_branch and _only_raises(one))
            or any(
                _has_any(part, seen, in_branch=in_branch or one.primitive.name == _BRANCHES)
                for part in one.params.values()
            )
            for one in getattr(value, "jaxpr", value).eqns
        )
    if isinstance(value, (tuple, list)):
        parts: Any = value
        return any(_has_any(part, seen, in_branch=in_branch) for part in parts)
    return False


def _only_raises(equation: Any) -> bool:
    """Whether an operation calls a function of Python that never returns."""
    if equation.primitive.name != _CHECKS or not _has_numbers(equation):
        return False
    function: Any = equation.params.get("callback")
    for name in ("callback_func", "func", "__wrapped__"):
        function = getattr(function, name, function)
    code = getattr(function, "__code__", None)
    return code is not None and not any(
        one.opname.startswith(_RETURNS) for one in dis.get_instructions(code)
    )


def _has_numbers(equation: Any) -> bool:
    return all(
        jnp.issubdtype(one.aval.dtype, jnp.number) or one.aval.dtype == jnp.bool_
        for one in equation.outvars
    )


class _Taken:
    """Rewrites programs, each once.

    Attributes:
      shows, checks: lines of the calls that were taken out.
    """

    def __init__(self) -> None:
        self.shows: list[str] = []
        self.checks: list[str] = []
        # The program itself is kept, too, so that no `id` is used twice.
        self._made: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def value(self, value: Any, *, in_branch: bool = False) -> Any:
        if _is_program(value):
            key = (id(value), in_branch)
            if key not in self._made:
                self._made[key] = (value, self._program(value, in_branch=in_branch))
            return self._made[key][1]
        if type(value) in (tuple, list):
            return type(value)(self.value(one, in_branch=in_branch) for one in value)
        return value

    def _program(self, program: Any, *, in_branch: bool) -> Any:
        if _CLOSED is not None and isinstance(program, _CLOSED):
            return program.replace(jaxpr=self.value(program.jaxpr, in_branch=in_branch))
        equations: list[Any] = []
        never: set[int] = set()  # Variables that no run of the branch gets to.
        for one in program.eqns:
            if one.primitive.name in _SHOWS:
                self.shows.append(line_of(one))
                continue
            if in_branch and (_only_raises(one) or _comes_after(one, never)):
                self.checks.append(line_of(one))
                never.update(map(id, one.outvars))
                equations += [made for out in one.outvars for made in _nan(out)]
                continue
            within = in_branch or one.primitive.name == _BRANCHES
            params = {
                name: self.value(value, in_branch=within) for name, value in one.params.items()
            }
            equations.append(one.replace(params=params, effects=_quiet(one.effects)))
        return program.replace(eqns=equations, effects=_quiet(program.effects))


def _comes_after(equation: Any, never: set[int]) -> bool:
    is_callback = equation.primitive.name == _CHECKS and _has_numbers(equation)
    return is_callback and any(id(one) in never for one in equation.invars)


def _nan(variable: Any) -> list[Any]:
    """Returns equations that give a variable nan everywhere, or zero if its type has no nan."""
    shape, dtype = variable.aval.shape, variable.aval.dtype
    value = math.nan if jnp.issubdtype(dtype, jnp.inexact) else 0

    def made() -> Any:
        flat = jax.lax.full((math.prod(shape),), value, dtype)
        # A second equation, as a number alone has none; a reshape to the same shape is none, too.
        return flat[0] if shape == () else jax.lax.reshape(flat[None], shape)

    equations = list(jax.make_jaxpr(made)().jaxpr.eqns)
    return [*equations[:-1], equations[-1].replace(outvars=[variable])]


def _quiet(effects: Any) -> Any:
    return {effect for effect in effects if type(effect).__name__ not in _EFFECTS}
