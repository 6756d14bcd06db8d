"""Reads the parameters of a build function: the mesh, then knobs (no jax)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from automesh.errors import UsageError
from automesh.mesh.axes import Knobs, Scalar
from automesh.mesh.mapping import LogicalAxes, LogicalMapping
from automesh.space.knob_types import as_type_of, type_name

MAPPING = "mapping"
"""The keyword parameter of `build` that takes logical axes."""

_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The knobs of a build function: parameters after the mesh with a scalar default that can be
    given by keyword.

    Attributes:
      mapping: the default of the keyword `mapping`; None if it is missing or no mapping.
    """

    knobs: Knobs
    takes_any_knob: bool
    mapping: LogicalAxes | None = None


def read_signature(build: Callable[..., Any]) -> Signature:
    """Reads the knobs of `build`.

    Raises:
      UsageError: it has no parameter for the mesh, or needs more than the mesh.
    """
    name = getattr(build, "__name__", "build")
    form = f'write `def {name}(mesh, remat="full"): ...`'
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the parameters of `{name}` cannot be read: {error}", hint=form
        ) from error
    if not parameters or parameters[0].kind not in _BY_POSITION:
        raise UsageError(f"`{name}` has no parameter for the mesh", hint=form)
    knobs: list[tuple[str, Scalar]] = []
    takes_any_knob = False
    mapping: LogicalAxes | None = None
    for parameter in parameters[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any_knob = True
            mapping = mapping or ()
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        elif parameter.default is inspect.Parameter.empty:
            raise UsageError(
                f"`{name}` needs `{parameter.name}` besides the mesh, and it has no default",
                hint="give it a default: parameters after the mesh are knobs of the search",
            )
        elif parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and isinstance(
            parameter.default, (bool, int, float, str)
        ):
            knobs.append((parameter.name, parameter.default))
        elif parameter.name == MAPPING and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            mapping = _mapping(parameter.default, name)
    return Signature(knobs=tuple(knobs), takes_any_knob=takes_any_knob, mapping=mapping)


def _mapping(default: Any, name: str) -> LogicalAxes | None:
    if default is None:
        return ()
    if not isinstance(default, Mapping):
        return None
    try:
        return LogicalMapping(cast("Mapping[str, Any]", default)).axes
    except (UsageError, TypeError) as error:
        raise UsageError(
            f"the default of `{name}`'s keyword `mapping` maps logical axes to something else: "
            f"{error.message if isinstance(error, UsageError) else error}",
            hint="map names to a mesh axis, a list of mesh axes, or None",
        ) from None


def check_mapping(signature: Signature, mapping: LogicalAxes, *, name: str) -> None:
    """Checks that the build function takes a mapping of logical axes.

    Raises:
      UsageError: it has no keyword `mapping` with a dict or None as its default.
    """
    if mapping and signature.mapping is None:
        raise UsageError(
            f"`{name}` takes no mapping of logical axes",
            hint="give it a keyword `mapping={}`, or remove [mapping] from the search space",
        )


def check_knobs(signature: Signature, knobs: Knobs, *, name: str) -> None:
    """Checks that the build function takes these knobs, with values of the types of its defaults.

    Raises:
      UsageError: names the wrong knob and the existing ones, or the type that it takes.
    """
    known = dict(signature.knobs)
    for knob, value in knobs:
        if knob in known and as_type_of(known[knob], value) is None:
            raise UsageError(
                f"`{name}` takes {type_name(known[knob])} as the knob `{knob}` (its default is "
                f"{known[knob]!r}), not {value!r}",
                hint="a knob takes values of the type of its default",
            )
        if knob not in known and not signature.takes_any_knob:
            there_are = ", ".join(f"`{other}`" for other in known) or "none"
            raise UsageError(
                f"`{name}` takes no knob `{knob}`; its knobs are: {there_are}",
                hint="add it as a keyword with a default, or remove it from the search space",
            )
