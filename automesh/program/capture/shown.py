"""Removes from a step the calls that only show something on the host: `jax.debug.print` and
`jax.debug.callback` (jax).

They give the step no value, belong to the process of the script, and would keep the step from being
carried to other processes and devices. The step is estimated, compiled and measured without them,
which a notice says.

Private in jax: the classes of a jaxpr (`jax._src.core`). Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from typing import Any

from automesh.package import is_users_file
from automesh.program.capture.world.told import tell

_CORE: Any = importlib.import_module("jax._src.core")
_SOURCE: Any = importlib.import_module("jax._src.source_info_util")
_CLOSED: Any = getattr(_CORE, "ClosedJaxpr", None)
_SHOWS = frozenset({"debug_callback", "debug_print"})
_EFFECTS = frozenset({"DebugEffect", "OrderedDebugEffect"})


def without_shown(closed: Any) -> Any:
    """Returns a program without these calls; the same object if it has none."""
    if not _has_any(closed, set()):
        return closed
    taken = _Taken()
    made = taken.value(closed)
    places = ", ".join(dict.fromkeys(place for place in taken.places if place))
    tell(
        "calls from the step to the host that only show something (jax.debug.print, "
        f"jax.debug.callback{f', at {places}' if places else ''}) are left out"
    )
    return made


def line_of(equation: Any) -> str:
    """Returns the line where the user's code asks for an operation, such as `train.py:12`; empty if
    it is not known. A line of a library that does so counts only if there is none of the user."""
    frames = list(_SOURCE.user_frames(equation.source_info.traceback))
    own = [frame for frame in frames if is_users_file(frame.file_name)] or frames
    return f"{own[0].file_name.rpartition('/')[2]}:{own[0].start_line}" if own else ""


def _is_program(value: Any) -> bool:
    return isinstance(value, _CORE.Jaxpr) or (_CLOSED is not None and isinstance(value, _CLOSED))


def _has_any(value: Any, seen: set[int]) -> bool:
    if _is_program(value):
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(
            one.primitive.name in _SHOWS
            or any(_has_any(part, seen) for part in one.params.values())
            for one in getattr(value, "jaxpr", value).eqns
        )
    if isinstance(value, (tuple, list)):
        return any(_has_any(part, seen) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return False


class _Taken:
    """Rewrites programs, each once."""

    def __init__(self) -> None:
        self.places: list[str] = []
        # The program itself is kept, too, so that no `id` is used twice.
        self._made: dict[int, tuple[Any, Any]] = {}

    def value(self, value: Any) -> Any:
        if _is_program(value):
            if id(value) not in self._made:
                self._made[id(value)] = (value, self._program(value))
            return self._made[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        return value

    def _program(self, program: Any) -> Any:
        if _CLOSED is not None and isinstance(program, _CLOSED):
            return program.replace(jaxpr=self.value(program.jaxpr))
        equations: list[Any] = []
        for one in program.eqns:
            if one.primitive.name in _SHOWS:
                self.places.append(line_of(one))
                continue
            params = {name: self.value(value) for name, value in one.params.items()}
            equations.append(one.replace(params=params, effects=_quiet(one.effects)))
        return program.replace(eqns=equations, effects=_quiet(program.effects))


def _quiet(effects: Any) -> Any:
    return {effect for effect in effects if type(effect).__name__ not in _EFFECTS}
