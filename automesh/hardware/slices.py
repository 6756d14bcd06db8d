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
from automesh.hardware.fabric import Fabric
from automesh.mesh.strict import check_tree, parse_tree, read_text

_TABLE = Path(__file__).parent / "data" / "topologies.json"
_NAME = re.compile(r"(?P<tpu>tpu-?)?(?P<kind>[a-z0-9]+)-(?P<count>[0-9]+)(-(?P<slices>[0-9]+))?")
_SHAPE = re.compile(
    r"(?P<tpu>tpu-?)?(?P<kind>[a-z0-9]+)[:-](?P<dims>[0-9]+(x[0-9]+)+)([*-](?P<slices>[0-9]+))?"
)
MAX_SLICES = 1024
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPUs, as `data/topologies.json` has it.

    Attributes:
      slug: the name that selectors use.
      aliases: other names; the first one stands before a shape.
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
        """Number in a name -> chips along each dimension."""
        return {int(count): _dims(dims) for count, dims in self.slices.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    meta: dict[str, dict[str, str]]
    sources: dict[str, str]
    generations: tuple[Generation, ...]


@cache
def generations() -> tuple[Generation, ...]:
    """All generations whose slices are on record."""
    return check_tree(
        parse_tree(read_text(_TABLE), source=_TABLE), _Table, source=_TABLE
    ).generations


def known_slices() -> Iterator[str]:
    """The selectors of all single slices on record."""
    for generation in generations():
        for count in generation.slices:
            yield f"tpu-{generation.slug}-{count}"


def read_slice(text: str) -> Absent | None:
    """The slices that a name means; None if the name is not of the form of a TPU's.

    Args:
      text: in small letters.

    Raises:
      UsageError: a generation or a topology that does not exist.
    """
    shaped, named = _SHAPE.fullmatch(text), _NAME.fullmatch(text)
    match = shaped or named
    if match is None:
        return None
    generation = _generation(match["kind"])
    if generation is None:
        if match["tpu"] or re.fullmatch(r"v[0-9]+[a-z]*", match["kind"]):
            raise _unknown(text, match["kind"])
        return None
    slices = int(match["slices"] or 1)
    if not 1 <= slices <= MAX_SLICES:
        raise UsageError(
            f"target `{text}` has {slices} slices; 1 to {MAX_SLICES} are possible",
            hint=f"write for example `tpu-{generation.slug}-{next(iter(generation.slices))}-2`",
        )
    if shaped:
        dims = _possible(generation, _dims(match["dims"]), text)
        name = f"{generation.aliases[0]}-{match['dims']}"
    else:
        dims = _named(generation, int(match["count"]), text)
        name = f"tpu-{generation.slug}-{int(match['count'])}"
    return _absent(generation, dims, slices, f"{name}-{slices}" if slices > 1 else name)


def wraps_of(device_kind: str, torus: Dims) -> tuple[bool, ...]:
    """Which dimensions of a slice have their ends linked.

    Args:
      device_kind: as jax reports it; of v2 and v3 only whole pods (16x16, 32x32) wrap, of other
        kinds that are not on record nothing does.
    """
    for generation in generations():
        if generation.device_kind == device_kind or device_kind in _kinds(generation):
            if generation.wraps == "an axis of 16":
                return tuple(size == 16 for size in torus)
            return (all(size % 4 == 0 for size in torus),) * len(torus)
    pod = {"TPU v2": 16, "TPU v3": 32}.get(device_kind, 0)
    return tuple(size == pod for size in torus)


def is_flat(device_kind: str) -> bool:
    """True if chips of this kind are wired in two dimensions."""
    flat = {"TPU v2", "TPU v3"}
    for generation in generations():
        if generation.dimensions == 2:
            flat.update(_kinds(generation))
    return device_kind in flat


def _kinds(generation: Generation) -> tuple[str, ...]:
    return chip_for(generation.device_kind, "tpu").device_kinds


def _dims(text: str) -> Dims:
    return tuple(int(size) for size in text.split("x"))


def _generation(kind: str) -> Generation | None:
    for generation in generations():
        if kind == generation.slug or kind in generation.aliases:
            return generation
    return None


def _unknown(text: str, kind: str) -> UsageError:
    names = [alias for generation in generations() for alias in generation.aliases]
    return UsageError(
        f"target `{text}` names the TPU `{kind}`, whose slices are not on record"
        f"{did_you_mean(kind, names)}",
        hint=f"use one of {', '.join(g.aliases[0] for g in generations())}; "
        "attached devices are searched with `--target local`",
    )


def _named(generation: Generation, count: int, text: str) -> Dims:
    shapes = generation.shapes()
    if count in shapes:
        return shapes[count]
    near = sorted(sorted(shapes, key=lambda known: abs(math.log(known / max(count, 1))))[:3])
    raise UsageError(
        f"there is no TPU slice `{text}`: nearest are "
        + ", ".join(f"tpu-{generation.slug}-{known}" for known in near),
        hint=f"the number counts {_counted(generation)}; or give the shape, "
        f"for example `{generation.aliases[0]}:{generation.slices[str(near[0])]}`",
    )


def _counted(generation: Generation) -> str:
    chip = chip_for(generation.device_kind, "tpu")
    if chip.counted_per_device == 2:
        return "TensorCores, two per chip"
    return "chips" if chip.devices_per_chip == 1 else "devices, two per chip"


def _possible(generation: Generation, dims: Dims, text: str) -> Dims:
    """The dimensions, if a slice can have them: those on record, or cubes of 4x4x4 joined."""
    known = list(generation.shapes().values())
    cubes = (
        generation.dimensions == len(dims) == 3
        and all(size and size % 4 == 0 for size in dims)
        and math.prod(dims) <= max(math.prod(one) for one in known)
    )
    if cubes or tuple(sorted(dims)) in {tuple(sorted(one)) for one in known}:
        return dims
    if len(dims) != generation.dimensions:
        reason = f"slices of TPU {generation.aliases[0]} have {generation.dimensions} dimensions"
    elif generation.dimensions == 3:
        reason = "larger slices are made of cubes of 4x4x4 chips"
    else:
        reason = f"its slices are {', '.join(generation.slices.values())}"
    example = generation.slices[max(generation.slices, key=int)]
    raise UsageError(
        f"there is no TPU slice `{text}`: {reason}",
        hint=f"write for example `{generation.aliases[0]}:{example}`",
    )


def _absent(generation: Generation, dims: Dims, slices: int, selector: str) -> Absent:
    chip = chip_for(generation.device_kind, "tpu")
    chips = math.prod(dims)
    host = (*generation.host, 1)[:3]
    if chips == 1:
        host = (1, 1, 1)
    elif dims in generation.whole_hosts:
        host = (*dims, 1)[:3]
    return Absent(
        selector=selector,
        fabric=Fabric(
            kind="torus",
            chip=chip,
            num_granules=slices,
            granule_devices=chips * chip.devices_per_chip,
            torus=dims,
            wraps=wraps_of(generation.device_kind, dims),
            devices_per_chip=chip.devices_per_chip,
        ),
        device_kind=generation.device_kind,
        device_memory_bytes=generation.usable_bytes,
        num_hosts=slices * chips // math.prod(host),
        topology=f"{generation.compiler_name}:{'x'.join(map(str, dims))}",
        chip_config=generation.chip_config,
        host=host,
    )
