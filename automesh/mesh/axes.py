"""The two central nouns, `MeshAxis` and `Plan`, and the text form of a mesh."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.mesh.mapping import LogicalAxes, format_axes

Scalar = bool | int | float | str
Knobs = tuple[tuple[str, Scalar], ...]
Call = tuple[LogicalAxes, Knobs]
"""The arguments of `build` other than the mesh."""
MAPPING = "mapping."
DEFAULT_AXES = ("dp", "fsdp", "ep", "tp", "sp")
_BATCH_AXES = ("dp", "fsdp", "data")
_MODEL_AXES = frozenset(
    ("tp", "tensor", "model", "mp", "sp", "seq", "sequence", "cp", "context", "ep", "expert", "pp")
)
PIPELINE = "pp"
"""The axis along which pipelines run; the first axis where pipelines are searched."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PART = re.compile(r"(dcn\.)?([A-Za-z_][A-Za-z0-9_]*)\s*:\s*(-?[0-9]{1,12})")


def spelled(value: Scalar) -> str:
    """Returns a knob's value as a word: as in TOML, booleans in lower case.

    >>> spelled(True), spelled(0.5), spelled("full")
    ('true', '0.5', 'full')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One named axis of a mesh, split into the part inside a granule and the part between granules.

    Attributes:
      name: an identifier.
      ici: devices along the axis inside one granule (slice or node), at least 1.
      dcn: granules along the axis, at least 1.
    """

    name: str
    ici: int = 1
    dcn: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"`{self.name}` is not a mesh axis name",
                hint="use letters, digits and underscores, starting with a letter",
            )
        if self.ici < 1 or self.dcn < 1:
            raise UsageError(
                f"axis `{self.name}` has size ici={self.ici}, dcn={self.dcn}; "
                "both must be at least 1"
            )

    @property
    def size(self) -> int:
        """Devices along the axis: `ici * dcn`."""
        return self.ici * self.dcn


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One candidate: the sizes of all mesh axes, the arguments of `build`, the compiler's options.

    Attributes:
      axes: all axes of the space in its order, including those of size 1.
      mapping: every logical axis with its mesh axes, for `build`'s keyword `mapping`; empty:
        `build` uses its own default.
      knobs: keyword arguments for `build`, in the order of the space.
      compiler_options: options for `compile`, in the order of the space; those left at the
        compiler's default are absent.
    """

    axes: tuple[MeshAxis, ...]
    mapping: LogicalAxes = ()
    knobs: Knobs = ()
    compiler_options: Knobs = ()

    @property
    def num_devices(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def num_granules(self) -> int:
        return math.prod(axis.dcn for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> `ici * dcn`."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def mesh(self) -> str:
        """Returns the canonical text of the axes alone, as `format_mesh` prints it."""
        return format_mesh(self.axes)

    @property
    def call(self) -> Call:
        """Returns the arguments of `build` other than the mesh; equal ones share a program."""
        return self.mapping, self.knobs

    @property
    def settings(self) -> Knobs:
        """Returns everything but the axes, by name; a logical axis is `mapping.NAME`, with text."""
        mapping = ((f"{MAPPING}{name}", format_axes(axes)) for name, axes in self.mapping)
        return (*mapping, *self.knobs, *self.compiler_options)

    def __str__(self) -> str:
        return " ".join([self.mesh, *(format_setting(*setting) for setting in self.settings)])


def usual_batch_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Guesses by their names which axes split the rows of a batch.

    >>> usual_batch_axes(("data", "model"))
    ('data',)
    """
    return tuple(name for name in names if name in _BATCH_AXES)


def is_usual_model_axis(name: str) -> bool:
    """Guesses by its name whether an axis splits the work on one row of a batch, as tensor,
    sequence and expert parallelism do. Its collectives move activations in every layer, so people
    keep it inside a slice or node.

    >>> [name for name in ("fsdp", "tp", "envs", "model") if is_usual_model_axis(name)]
    ['tp', 'model']
    """
    return name in _MODEL_AXES


def format_setting(name: str, value: Scalar) -> str:
    """Formats a setting of a plan: `remat=full`, and `embed:fsdp` for a logical axis.

    >>> format_setting("remat", "full"), format_setting("mapping.mlp", "tp+sp")
    ('remat=full', 'mlp:tp+sp')
    """
    if name.startswith(MAPPING):
        return f"{name.removeprefix(MAPPING)}:{value}"
    return f"{name}={value}"


def format_mesh(axes: Sequence[MeshAxis]) -> str:
    """Prints axes canonically: `dcn.` parts first, axes in their order, without sizes of 1.

    >>> format_mesh([MeshAxis(name="dp", dcn=2), MeshAxis(name="tp", ici=4)])
    'dcn.dp:2,tp:4'
    >>> format_mesh([MeshAxis(name="dp"), MeshAxis(name="tp")])
    'dp:1'
    """
    dcn = [f"dcn.{axis.name}:{axis.dcn}" for axis in axes if axis.dcn > 1]
    ici = [f"{axis.name}:{axis.ici}" for axis in axes if axis.ici > 1]
    return ",".join(dcn + ici) or f"{axes[0].name}:1"


def parse_mesh(
    text: str,
    names: Sequence[str] = DEFAULT_AXES,
    *,
    num_devices: int | None = None,
    num_granules: int = 1,
) -> tuple[MeshAxis, ...]:
    """Reads the text form of a mesh, in any order of its parts.

    Args:
      text: for example `dp:2,tp:4`, `dcn.dp:2,fsdp:-1`.
      names: all axes of the mesh, in order; those not in `text` get size 1.
      num_devices: number of devices, from which each `-1` is inferred (one inside granules and one
        between them), and against which the sizes are checked; None checks nothing.
      num_granules: granules among the devices: the product that the `dcn.` parts must have.

    Raises:
      UsageError: malformed text, an unknown or repeated axis, two `-1` of one network, or sizes
        that do not give `num_devices`.

    >>> format_mesh(parse_mesh("tp:4,dp:-1", num_devices=8))
    'dp:2,tp:4'
    >>> format_mesh(parse_mesh("dcn.dp:-1,tp:-1", num_devices=8, num_granules=2))
    'dcn.dp:2,tp:4'
    """
    parts = {"ici": dict.fromkeys(names, 1), "dcn": dict.fromkeys(names, 1)}
    seen: set[tuple[str, str]] = set()
    for piece in text.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise UsageError(
                f"`{piece.strip()}` in mesh `{text}` is not of the form `axis:size` "
                "or `dcn.axis:size`",
                hint="write for example `dp:2,tp:4` or `dcn.dp:2,fsdp:8`",
            )
        network, name, size = "dcn" if match[1] else "ici", match[2], int(match[3])
        if name not in parts[network]:
            raise UsageError(
                f"mesh `{text}` names the axis `{name}`, which is none of: {', '.join(names)}",
                hint="rename the axis, or list it under [axes] of the search space",
            )
        if (network, name) in seen:
            axis = piece.split(":")[0].strip()
            raise UsageError(
                f"mesh `{text}` gives the size of `{axis}` twice", hint="leave one of them out"
            )
        if size < 1 and size != -1:
            raise UsageError(
                f"mesh `{text}` gives `{name}` the size {size}; sizes are at least 1, or -1",
                hint="an axis that is not used has the size 1",
            )
        seen.add((network, name))
        parts[network][name] = size
    return _infer(text, parts, num_devices=num_devices, num_granules=num_granules)


def _infer(
    text: str, parts: Mapping[str, dict[str, int]], *, num_devices: int | None, num_granules: int
) -> tuple[MeshAxis, ...]:
    unknown = [
        (network, name)
        for network, sizes in parts.items()
        for name, size in sizes.items()
        if size == -1
    ]
    of_one_network = max(Counter(network for network, _ in unknown).values(), default=0)
    if of_one_network > 1:
        raise UsageError(
            f"mesh `{text}` leaves {of_one_network} sizes to be inferred; at most one may be -1",
            hint="give all sizes but one",
        )
    if unknown and num_devices is None:
        raise UsageError(
            f"mesh `{text}` has a -1, but the number of devices is not known here",
            hint="give all sizes",
        )
    if num_devices is not None:
        wanted = {"ici": num_devices // num_granules, "dcn": num_granules}
        for network, name in unknown:
            others = -math.prod(parts[network].values())
            if wanted[network] % others:
                raise UsageError(
                    f"the -1 of `{name}` in mesh `{text}` cannot be inferred: "
                    f"{wanted[network]} is not a multiple of {others}"
                )
            parts[network][name] = wanted[network] // others
        for network in ("dcn", "ici"):
            got = math.prod(parts[network].values())
            if got != wanted[network]:
                what = "devices in each granule" if num_granules > 1 else "devices"
                what = "granules (slices or nodes)" if network == "dcn" else what
                raise UsageError(
                    f"the sizes of mesh `{text}` multiply to {got}, "
                    f"but there are {wanted[network]} {what}",
                    hint="let one size be -1 to have it inferred",
                )
    return tuple(
        MeshAxis(name=name, ici=parts["ici"][name], dcn=parts["dcn"][name]) for name in parts["ici"]
    )
