"""TPU slices by name: `tpu-v5p-512`, `tpu-v5litepod-256-4`, `v5e:4x8`, `v5e:16x16*2`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.absent import Absent
from automesh.hardware.chips import chip_for
from automesh.hardware.fabric.fabric import torus_of
from automesh.mesh.strict_files import read_table

_TABLE = Path(__file__).parent / "data" / "topologies.json"
_NAME = re.compile(r"(?P<tpu>tpu-?)?(?P<kind>[a-z0-9]+)-(?P<count>[0-9]+)([*-](?P<slices>[0-9]+))?")
_SHAPE = re.compile(
    r"(?P<tpu>tpu-?)?(?P<kind>[a-z0-9]+)[:-](?P<dims>[0-9]+(x[0-9]+)+)(?P<twist>_(un)?twisted)?"
    r"([*-](?P<slices>[0-9]+))?"
)
MAX_SLICES = 1024
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPUs, as `data/topologies.json` has it.

    Attributes:
      slug: the name that selectors use.
      aliases: other names; the first one is used in front of a shape.
      shape_aliases: names that may be used in front of a shape, but not of a number.
      machine_types: names of the machines that slices are made of.
      gke_accelerator: how GKE labels the nodes of slices.
      device_kind: as jax reports it.
      compiler_name, chip_config: for compile-only clients.
      wraps: `an axis of 16`, or `all axes if all are multiples of 4`.
      usable_bytes: what the compiler lets one device use.
      host: chips of one host of a slice.
      whole_hosts: slices that are one host although larger than `host`.
      slices: number in a name -> chips along each dimension, as text.
    """

    slug: str
    aliases: tuple[str, ...]
    shape_aliases: tuple[str, ...]
    machine_types: tuple[str, ...]
    gke_accelerator: str
    device_kind: str
    compiler_name: str
    chip_config: str
    wraps: str
    usable_bytes: int
    host: Dims
    whole_hosts: tuple[Dims, ...]
    slices: dict[str, str]
    sources: dict[str, str]

    @property
    def dimensions(self) -> int:
        return len(_dims(next(iter(self.slices.values()))))

    def shapes(self) -> dict[int, Dims]:
        """Maps the number in a slice's name to the chips along each dimension of the slice."""
        return {int(count): _dims(dims) for count, dims in self.slices.items()}

    def host_of(self, torus: Dims) -> Dims:
        """Returns how many chips one host of a slice has along each of three dimensions."""
        if math.prod(torus) == 1:
            return (1, 1, 1)
        return (*(torus if torus in self.whole_hosts else self.host), 1)[:3]

    def topology(self, torus: Dims) -> str:
        """Returns the name of a slice for a compile-only client."""
        return f"{self.compiler_name}:{_text(torus)}"

    def why_not(self, torus: Dims) -> str:
        """Says why no slice has this shape; empty for shapes on record and joined cubes."""
        known = list(self.shapes().values())
        cubes = (
            self.dimensions == len(torus) == 3
            and all(size and size % 4 == 0 for size in torus)
            and math.prod(torus) <= max(math.prod(one) for one in known)
        )
        if cubes or tuple(sorted(torus)) in {tuple(sorted(one)) for one in known}:
            return ""
        if len(torus) != self.dimensions:
            return f"slices of TPU {self.aliases[0]} have {self.dimensions} dimensions"
        if self.dimensions == 3:
            return "larger slices are made of cubes of 4x4x4 chips"
        return f"its slices are {', '.join(self.slices.values())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceTable:
    meta: dict[str, dict[str, str]]
    sources: dict[str, str]
    generations: tuple[Generation, ...]


def generations() -> tuple[Generation, ...]:
    """Returns all generations whose slices are on record."""
    return _table().generations


def generation_called(name: str) -> Generation | None:
    """Returns the generation with this slug or alias; None if none is on record."""
    return next(
        (
            generation
            for generation in generations()
            if name in (generation.slug, *generation.aliases)
        ),
        None,
    )


def slice_sources() -> dict[str, str]:
    """Returns the full text of each source of the table of slices, by its name."""
    return _table().sources


def slices_of(generation: Generation) -> Iterator[str]:
    """Lists the selectors of the single slices of a generation."""
    return (f"tpu-{generation.slug}-{count}" for count in generation.slices)


@cache
def _table() -> _SliceTable:
    return read_table(_TABLE, _SliceTable)


def read_slice(text: str) -> Absent | None:
    """Reads the name of TPU slices; None if the name does not have that form.

    Args:
      text: in small letters.

    Raises:
      UsageError: a generation or a topology that does not exist.
    """
    _refuse_machine_type(text)
    shaped, named = _SHAPE.fullmatch(text), _NAME.fullmatch(text)
    match = shaped or named
    if match is None:
        return None
    generation = _generation(match["kind"], shaped=shaped is not None)
    if generation is None:
        if match["tpu"] or re.fullmatch(r"v[0-9]+[a-z]*", match["kind"]):
            raise _unknown(text, match["kind"])
        return None
    slices = int(match["slices"] or 1)
    if not 1 <= slices <= MAX_SLICES:
        raise UsageError(
            f"target `{text}` has {slices} slices; 1 to {MAX_SLICES} are possible",
            hint=f"write for example `{text[: match.start('slices')]}2`",
        )
    if shaped and shaped["twist"] == "_twisted":
        raise UsageError(
            f"target `{text}` is a twisted torus, whose links are not on record",
            hint=f"leave out `_twisted`: `{text.replace('_twisted', '')}` is the plain one",
        )
    if shaped:
        dims = _checked_dims(generation, _dims(match["dims"]), text)
        name = f"{generation.aliases[0]}-{match['dims']}"
    else:
        dims = _named(generation, int(match["count"]), text)
        name = f"tpu-{generation.slug}-{int(match['count'])}"
    return _absent(generation, dims, slices, f"{name}-{slices}" if slices > 1 else name)


def wraps_of(device_kind: str, torus: Dims) -> tuple[bool, ...]:
    """Says which dimensions of a slice have their ends linked.

    Args:
      device_kind: as jax reports it. Only whole pods (16x16, 32x32) of v2 and v3 wrap; other kinds
        that are not on record do not wrap.
    """
    for generation in generations():
        if generation.device_kind == device_kind or device_kind in _kinds(generation):
            if generation.wraps == "an axis of 16":
                return tuple(size == 16 for size in torus)
            return (all(size % 4 == 0 for size in torus),) * len(torus)
    pod = {"TPU v2": 16, "TPU v3": 32}.get(device_kind, 0)
    return tuple(size == pod for size in torus)


def is_flat(device_kind: str) -> bool:
    """Whether chips of this kind are wired in two dimensions."""
    flat = {"TPU v2", "TPU v3"}
    for generation in generations():
        if generation.dimensions == 2:
            flat.update(_kinds(generation))
    return device_kind in flat


def _kinds(generation: Generation) -> tuple[str, ...]:
    return chip_for(generation.device_kind, "tpu").device_kinds


def _dims(text: str) -> Dims:
    return tuple(int(size) for size in text.split("x"))


def _text(dims: Dims) -> str:
    return "x".join(map(str, dims))


def _generation(kind: str, *, shaped: bool) -> Generation | None:
    for generation in generations():
        if kind == generation.slug or kind in generation.aliases:
            return generation
        if shaped and kind in generation.shape_aliases:
            return generation
    return None


def _refuse_machine_type(text: str) -> None:
    for generation in generations():
        for machine in generation.machine_types:
            if text.removeprefix("tpu-").startswith(machine):
                raise UsageError(
                    f"target `{text}` names a machine of which slices of TPU "
                    f"{generation.aliases[0]} are made, not a slice",
                    hint="name the slice by its size or its shape, for example "
                    f"`{list(slices_of(generation))[-1]}` or "
                    f"`{generation.aliases[0]}:{list(generation.slices.values())[-1]}`",
                )


def _unknown(text: str, kind: str) -> UsageError:
    names = [alias for generation in generations() for alias in generation.aliases]
    return UsageError(
        f"target `{text}` names the TPU `{kind}`, whose slices are not on record"
        f"{did_you_mean(kind, names)}",
        hint=f"use one of {', '.join(g.aliases[0] for g in generations())}, or describe it in a "
        "file for --hardware; attached devices are searched with `--target local`",
    )


def _named(generation: Generation, count: int, text: str) -> Dims:
    shapes = generation.shapes()
    if count in shapes:
        return shapes[count]
    near = sorted(sorted(shapes, key=lambda known: abs(math.log(known / max(count, 1))))[:3])
    raise UsageError(
        f"there is no TPU slice `{text}`: nearest are "
        + ", ".join(f"tpu-{generation.slug}-{known}" for known in near),
        hint=f"the number counts {counted(generation)}; or give the shape, "
        f"for example `{generation.aliases[0]}:{generation.slices[str(near[0])]}`",
    )


def counted(generation: Generation) -> str:
    """Says in words what the number in a name counts."""
    chip = chip_for(generation.device_kind, "tpu")
    if chip.counted_per_device == 2:
        return "TensorCores, two per chip"
    return "chips" if chip.devices_per_chip == 1 else "devices, two per chip"


def _checked_dims(generation: Generation, dims: Dims, text: str) -> Dims:
    """Returns the dimensions if a slice can have them, else raises an error."""
    if reason := generation.why_not(dims):
        near = _nearest(list(generation.shapes().values()), math.prod(dims))
        raise UsageError(
            f"there is no TPU slice `{text}`: {reason}",
            hint="write for example "
            + " or ".join(f"`{generation.aliases[0]}:{_text(one)}`" for one in near),
        )
    return dims


def _nearest(known: list[Dims], chips: int) -> list[Dims]:
    """Finds the two shapes whose number of chips is nearest, the smaller one first."""
    near = sorted(known, key=lambda one: abs(math.log(math.prod(one) / max(chips, 1))))
    return sorted(near[:2], key=math.prod)


def _absent(generation: Generation, dims: Dims, slices: int, selector: str) -> Absent:
    chip = chip_for(generation.device_kind, "tpu")
    host = generation.host_of(dims)
    return Absent(
        selector=selector,
        fabric=torus_of(chip, dims, wraps=wraps_of(generation.device_kind, dims), granules=slices),
        device_kind=generation.device_kind,
        device_memory_bytes=generation.usable_bytes,
        num_hosts=slices * math.prod(dims) // math.prod(host),
        topology=generation.topology(dims),
        chip_config=generation.chip_config,
        host=host,
    )
