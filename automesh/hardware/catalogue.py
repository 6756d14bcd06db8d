"""Lists all targets on record that a search can use without having the devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from automesh.errors import UsageError
from automesh.hardware.absent import Absent
from automesh.hardware.chips import chip_sources, known_chips, sources_of
from automesh.hardware.clusters import Clusters, UserCluster
from automesh.hardware.machines import Machine, machine_sources, machines
from automesh.hardware.slices import (
    Generation,
    counted,
    generation_called,
    generations,
    read_slice,
    slice_sources,
    slices_of,
)
from automesh.hardware.targets import parse_target
from automesh.limits import TARGET_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One target on record.

    Attributes:
      name: of the target, and of its rules.
      kind: the common form of such names, as `tpu-v5p-N`; for a cluster its own name.
      counts: what N counts; empty if the name has none.
      is_usual: False for one of several machines that the same chip is sold in.
      dcn_bytes_per_s: of one device, one way, to other granules, even if the target has only one
        granule.
      also: other words that a pattern may match.
      sources: figure -> names of its sources (see `citations`), or words.
    """

    name: str
    kind: str
    counts: str
    is_usual: bool = True
    absent: Absent
    dcn_bytes_per_s: float
    also: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]


def list_targets(clusters: Clusters | None = None) -> tuple[Listed, ...]:
    """Lists the user's clusters, all TPU slices, and one full GPU machine of each kind."""
    return tuple(_all_targets(clusters))


def find_targets(pattern: str, clusters: Clusters | None = None) -> tuple[Listed, ...]:
    """Finds the targets that match a pattern.

    Args:
      pattern: the name of a target, listed or not; else a part of a name, or a whole name with the
        wildcards `*` and `?`; empty: all.

    Raises:
      UsageError: it matches nothing.
    """
    small = pattern.strip().lower()
    if not small:
        return list_targets(clusters)
    if len(small) > TARGET_CHARS:
        raise UsageError(
            f"`{pattern}` is longer than the name of any target",
            hint="`automesh targets` lists what there is",
        )
    if exact := _named_target(small, clusters):
        return (exact,)
    wild = any(char in small for char in "*?[")
    found = tuple(
        target
        for target in list_targets(clusters)
        if any(
            fnmatchcase(name, small) if wild else small in name
            for name in (target.name, *target.also)
        )
    )
    if not found:
        raise UsageError(
            f"no target is called `{pattern}`, nor has that in its name",
            hint="`automesh targets` lists what there is",
        )
    return found


def citations() -> dict[str, str]:
    """Returns the full text of each source, by its name."""
    return {**chip_sources(), **slice_sources(), **machine_sources()}


def _all_targets(clusters: Clusters | None) -> Iterator[Listed]:
    for cluster in clusters.all if clusters else ():
        if absent := cluster.devices(cluster.name):
            yield _of_cluster(cluster, absent)
    for generation in generations():
        for name in slices_of(generation):
            if absent := read_slice(name):
                yield _of_slice(generation, absent)
    for machine in machines().values():
        if absent := parse_target(f"gpu-{machine.name}-{machine.devices}", {}).absent:
            yield _of_machine(machine, absent)


def _named_target(text: str, clusters: Clusters | None) -> Listed | None:
    """Returns the target of this name; None if there is none."""
    try:
        own = clusters.find(text) if clusters else None
        if own:
            return _of_cluster(own[1], own[0])
        absent = parse_target(text, {}).absent
    except UsageError:
        return None
    if absent is None:
        return None
    if generation := generation_called(absent.fabric.chip.slug):
        return _of_slice(generation, absent)
    machine = absent.selector.removeprefix("gpu-").rpartition("-")[0]
    return _of_machine(machines()[machine], absent)


def _of_slice(generation: Generation, absent: Absent) -> Listed:
    shape = "x".join(map(str, absent.fabric.torus))
    count = absent.fabric.granule_devices * absent.fabric.chip.counted_per_device
    return Listed(
        name=absent.selector,
        kind=f"tpu-{generation.slug}-N",
        counts=counted(generation),
        absent=absent,
        dcn_bytes_per_s=absent.fabric.chip.dcn_bytes_per_s,
        also=tuple(
            name
            for alias in generation.aliases
            for name in (f"tpu-{alias}-{count}", f"{alias}:{shape}")
        ),
        sources=(*generation.sources.items(), *sources_of(generation.slug).items()),
    )


def _of_machine(machine: Machine, absent: Absent) -> Listed:
    chip = absent.fabric.chip
    return Listed(
        name=absent.selector,
        kind=f"gpu-{machine.name}-N",
        counts=f"GPUs, {machine.devices} per machine",
        is_usual=machine.name == machine.chip,
        absent=absent,
        dcn_bytes_per_s=machine.network_bytes_per_s / machine.devices
        if absent.num_hosts == 1
        else chip.dcn_bytes_per_s,
        also=(chip.slug, chip.name.lower()),
        sources=(
            ("machine", machine.source),
            *([("memory", f"hardware/data/gpus/{absent.gpu}.txtpb")] if absent.gpu else []),
            *sources_of(machine.chip).items(),
        ),
    )


def _of_cluster(cluster: UserCluster, absent: Absent) -> Listed:
    chip = absent.fabric.chip
    known = known_chips().get(chip.slug)
    is_own = known is None or known.name != chip.name
    figures = {"chip": chip.source} if is_own else sources_of(chip.slug)
    return Listed(
        name=absent.selector,
        kind=cluster.name,
        counts="",
        absent=absent,
        dcn_bytes_per_s=chip.dcn_bytes_per_s,
        also=(chip.slug, chip.name.lower()),
        sources=(("cluster", cluster.source or "no source given"), *figures.items()),
    )
