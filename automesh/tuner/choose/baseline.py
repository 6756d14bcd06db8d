"""Reads the baseline, the script's own mesh, which every "1.3x faster" refers to."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import MeshAxis, Plan, Scalar, parse_mesh
from automesh.mesh.mapping import (
    LogicalAxes,
    MappedAxes,
    check_mapped_axes,
    parse_axes,
    read_mapped,
)
from automesh.space.knob_types import type_name

_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*:")
_OPEN_SIZE = re.compile(r":\s*-1(?![0-9])")
_WORDS: dict[str, bool] = {"true": True, "false": False}


def parse_plan(
    text: str,
    *,
    names: Sequence[str],
    num_devices: int,
    num_granules: int,
    knobs: Mapping[str, Scalar],
    varied: Sequence[str],
    mapping: LogicalAxes = (),
    owner: str = "`build`",
) -> Plan:
    """Reads a mesh that logical axes and knobs may follow: `dp:8`, `fsdp:-1 remat=full`,
    `fsdp:4,tp:2 mlp:tp embed:none`.

    Args:
      names: all mesh axes in order.
      mapping: mapping of logical axes that the text does not set; empty if none is searched.
      knobs: every knob with its default.
      varied: knobs of the search space, in its order; the plan always states them.
      owner: the function that takes the knobs, for errors.

    Raises:
      UsageError: no mesh, an unknown axis, logical axis or knob, sizes that do not fit the devices,
        a value of another type.
    """
    mesh, *settings = text.split() or [""]
    axes = _parse_axes(text, mesh, names, num_devices=num_devices, num_granules=num_granules)
    values: dict[str, Scalar] = {name: knobs[name] for name in varied if name in knobs}
    logical = dict(mapping)
    for setting in settings:
        if ":" in setting.partition("=")[0]:
            logical |= _parse_logical(text, setting, logical, names)
            continue
        name, equals, value = setting.partition("=")
        if not equals and name in knobs:
            raise UsageError(
                f"the baseline `{text}` gives the knob `{name}` no value",
                hint=f"write for example `{name}={knobs[name]}`",
            )
        if not equals or name not in knobs:
            raise UsageError(
                f"`{setting}` in the baseline `{text}` does not set a knob of {owner}"
                f"{did_you_mean(name, knobs)}",
                hint="write `knob=value`; the knobs are: " + (", ".join(knobs) or "none"),
            )
        values[name] = _parse_value(name, value, knobs[name])
    return Plan(axes=axes, mapping=tuple(logical.items()), knobs=tuple(values.items()))


def baseline_text(given: str, *, own: str) -> str:
    """Returns the user's baseline, completed by knobs that only the workload's own baseline sets.

    Args:
      given: text of the user; empty to use the workload's own.
      own: text of the workload; empty for none.

    >>> baseline_text("fsdp:8 remat=full", own="dp:8 remat=none accumulation=2")
    'fsdp:8 remat=full accumulation=2'
    >>> baseline_text("", own="dp:8 remat=none")
    'dp:8 remat=none'
    """
    words = given.split()
    if not words:
        return own.strip()
    named = {word.partition("=")[0] for word in words}
    knobs = [word for word in own.split()[1:] if "=" in word and ":" not in word.partition("=")[0]]
    return " ".join([*words, *(word for word in knobs if word.partition("=")[0] not in named)])


def check_baseline(
    text: str, *, names: Sequence[str] = (), devices: tuple[int, int] = (0, 0)
) -> None:
    """Checks the mesh of a baseline as far as possible before the script runs.

    Args:
      text: as for `parse_plan`; empty for none.
      names: names of all mesh axes; empty while unknown.
      devices: number of devices and of granules; zeros while unknown.

    Raises:
      UsageError: no mesh, an unknown axis, or sizes that do not fit the devices.
    """
    words = text.split()
    if not words:
        return
    mesh = words[0]
    num_devices, num_granules = devices
    if not num_devices:
        mesh = _closed(mesh)
    _parse_axes(
        text,
        mesh,
        names or dict.fromkeys(_AXIS.findall(mesh)),
        num_devices=num_devices or None,
        num_granules=num_granules or 1,
    )


def _closed(mesh: str) -> str:
    """Returns a mesh whose sizes that cannot be inferred yet are 1, inside granules and between
    them."""
    parts = mesh.split(",")
    is_open = [_OPEN_SIZE.search(part) is not None for part in parts]
    networks = [part.strip().startswith("dcn.") for part in parts]
    of_each = Counter(network for network, one in zip(networks, is_open) if one)
    if max(of_each.values(), default=0) > 1:
        return mesh
    return ",".join(_OPEN_SIZE.sub(":1", part) for part in parts)


def _parse_logical(
    text: str, setting: str, known: Mapping[str, MappedAxes], names: Sequence[str]
) -> dict[str, MappedAxes]:
    name, _, said = setting.partition(":")
    if name not in known:
        raise UsageError(
            f"`{setting}` in the baseline `{text}` maps no logical axis of the search"
            f"{did_you_mean(name, known)}",
            hint=f"the logical axes are: {', '.join(known)}"
            if known
            else "list them under [mapping] of the search space; commas alone part mesh axes",
        )
    axes = read_mapped(name, parse_axes(said))
    check_mapped_axes([(name, axes)], names)
    return {name: axes}


def _parse_axes(
    text: str, mesh: str, names: Iterable[str], *, num_devices: int | None, num_granules: int
) -> tuple[MeshAxis, ...]:
    if ":" not in mesh:
        raise UsageError(
            f"the baseline `{text}` does not begin with a mesh",
            hint="write for example `dp:8`, or `dp:8 remat=full` with a knob",
        )
    try:
        return parse_mesh(mesh, tuple(names), num_devices=num_devices, num_granules=num_granules)
    except UsageError as error:
        hint = error.hint or "give the mesh that the script uses today, for example `dp:-1`"
        raise UsageError(f"the baseline does not fit: {error.message}", hint=hint) from None


def _parse_value(name: str, text: str, default: Scalar) -> Scalar:
    try:
        if isinstance(default, bool):
            return _WORDS[text.lower()]
        value = type(default)(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(text)
        return value
    except (KeyError, ValueError):
        examples = ("false", "true") if isinstance(default, bool) else (str(default),)
        listed = " or ".join(f"`{name}={example}`" for example in examples)
        raise UsageError(
            f"the baseline sets `{name}` to `{text}`, but `build` takes {type_name(default)} "
            f"(its default is `{default}`)",
            hint=f"write for example {listed}",
        ) from None
