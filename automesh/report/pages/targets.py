"""`automesh targets`: what can be searched for without having it, as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from automesh.hardware.absent import Absent
from automesh.hardware.catalogue import Listed, citations
from automesh.hardware.compilers import Compiler, has_compiler
from automesh.report.blocks.columns import Column, figures_column
from automesh.report.blocks.nouns import Line, Note, Report, Section, Table, lines_of
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_count

# What a narrow terminal does without, in this order.
_DROPPED = ("names", "DCN", "links", "chips", "wraps")
_ALONE = "by estimate alone: no compiler knows these devices"


def report_of(found: Sequence[Listed], *, pattern: str, compilers: Sequence[Compiler]) -> Report:
    """Reports the targets that a pattern means; without one, all of them, a line per kind.

    Args:
      compilers: for the platforms that there are, installed or not.
    """

    def facts() -> dict[str, Any]:
        return _facts(found, compilers)

    if not pattern.strip():
        usual = _overview([one for one in found if one.is_usual])
        sections = (
            Section(blocks=(usual,)),
            Section(blocks=(lines_of(*_guide(found, compilers)),)),
        )
        return Report(sections=sections, facts=facts)
    if len(found) == 1:
        return Report(title=found[0].name, sections=_single(found[0], compilers), facts=facts)
    return Report(sections=_several(found, compilers), facts=facts)


def torus_words(absent: Absent) -> str:
    """Returns `4x4x8`; empty for GPUs."""
    return "x".join(map(str, absent.fabric.torus))


def wraps_words(absent: Absent) -> str:
    """Returns `all`, `none`, or which dimensions have their ends linked: `2nd`."""
    wraps = absent.fabric.wraps
    if not any(wraps):
        return "none" if wraps else ""
    if all(wraps):
        return "all"
    names = ("1st", "2nd", "3rd")
    return " and ".join(name for name, wrap in zip(names, wraps) if wrap)


def links_words(absent: Absent) -> str:
    """Returns `6 x 90 GB/s` for a chip's links, `450 GB/s` for those of a GPU to its switch."""
    fabric = absent.fabric
    speed = _rate(fabric.chip.link_bytes_per_s * fabric.devices_per_chip)
    return f"{2 * len(fabric.torus)} x {speed}" if fabric.torus else speed


def compile_words(absent: Absent, compilers: Sequence[Compiler]) -> str:
    """Says whether a program for the devices can be compiled here, and what to do if not."""
    if not has_compiler(absent):
        return _ALONE
    compiler = next(one for one in compilers if one.platform == absent.platform)
    return _here(compiler)


def _here(compiler: Compiler) -> str:
    if compiler.version:
        return f"compiled for here, by {compiler.name} {compiler.version}"
    return f"not compiled for here, as {compiler.name} is not installed: {compiler.install}"


def _rate(bytes_per_s: float) -> str:
    return f"{format_count(bytes_per_s)}B/s"


def _overview(found: Sequence[Listed]) -> Table:
    """Makes a line per kind."""
    kinds = [list(group) for _, group in groupby(found, key=lambda one: one.kind)]
    firsts = [group[0].absent for group in kinds]
    names = [group[0].kind + (" *" * (not has_compiler(group[0].absent))) for group in kinds]
    columns = [
        figures_column("target", names, justify="left"),
        figures_column(
            "names", [str(len(group)) if group[0].absent.fabric.torus else "" for group in kinds]
        ),
        figures_column("devices", [_sizes(group) for group in kinds]),
        figures_column("memory", [format_bytes(first.device_memory_bytes) for first in firsts]),
        figures_column(
            "bf16", [f"{format_count(first.fabric.chip.flops_per_s)}FLOP/s" for first in firsts]
        ),
        figures_column("links", [links_words(first) for first in firsts]),
        figures_column("DCN", [_rate(group[0].dcn_bytes_per_s) for group in kinds]),
    ]
    alone = any(name.endswith(" *") for name in names)
    return _table(columns, notes=(Note(mark="*", text=_ALONE),) * alone)


def _sizes(group: Sequence[Listed]) -> str:
    sizes = [one.absent.num_devices for one in group]
    if not group[0].counts:
        return str(sizes[0])
    if not group[0].absent.fabric.torus:
        return f"{sizes[0]} each"
    return f"{min(sizes)} to {max(sizes)}" if len(sizes) > 1 else str(sizes[0])


def _table(columns: Sequence[Column], notes: tuple[Note, ...] = ()) -> Table:
    """Makes a table of the columns that have something to say."""
    telling = tuple(column for column in columns if any(column.cells))
    return Table(columns=telling, dropped=_DROPPED, notes=notes)


def _guide(found: Sequence[Listed], compilers: Sequence[Compiler]) -> list[tuple[str, str]]:
    machines = [one.kind.removeprefix("gpu-").removesuffix("-N") for one in found
                if not one.is_usual]  # fmt: skip
    return [
        ("N", "the size of a slice, as its maker counts it, or all GPUs; `automesh targets v5p` "
         "lists the sizes of a kind, with shapes and sources"),
        ("slices", "-S at the end of a TPU's name for S slices: tpu-v5litepod-256-4; or a shape: "
         "v5e:4x8, v5e:16x16*2"),
        ("machines", "gpu-NAME-N for GPUs with the network of a machine on the market: "
         + ", ".join(machines)),
        ("figures", "of one device: memory that a program can have, dense FLOP/s; links and DCN "
         "one way, the links of a TPU those of its chip, at the speed that they reach"),
        ("beside", "local (the attached devices), cpu:N (N virtual ones), and clusters of your own "
         "with --hardware FILE"),
        *((f"{compiler.platform.upper()}s", _here(compiler)) for compiler in compilers),
    ]  # fmt: skip


def _single(one: Listed, compilers: Sequence[Compiler]) -> tuple[Section, ...]:
    """Reports all that is known of one target."""
    absent = one.absent
    lines = [*_extent(absent), *_chip_lines(one), ("compile", compile_words(absent, compilers))]
    if absent.num_devices > 1:
        lines.append(("search", f"automesh search train.py --target {one.name}"))
    return _with_sources(lines, [one])


def _extent(absent: Absent) -> list[tuple[str, str]]:
    fabric = absent.fabric
    each = fabric.granule_devices
    if not fabric.torus:
        hosts = count(absent.num_hosts, "machine")
        return [("devices", f"{absent.num_devices} in {hosts} of {each}")]
    chips = math.prod(fabric.torus)
    return [
        ("devices", f"{absent.num_devices} in {count(fabric.num_granules, 'slice')} of {each}"),
        ("chips", f"{fabric.num_granules * chips}"
         + (f", {fabric.devices_per_chip} devices each" if fabric.devices_per_chip > 1 else "")),
        ("torus", f"{torus_words(absent)}, {_wraps_sentence(absent)}"),
        ("hosts", f"{absent.num_hosts} of {count(math.prod(absent.host), 'chip')}"),
    ]  # fmt: skip


def _wraps_sentence(absent: Absent) -> str:
    words = wraps_words(absent)
    if words == "none":
        return "no dimension with its ends linked"
    if words == "all":
        return "all dimensions with their ends linked"
    return f"the {words} dimension with its ends linked"


def _chip_lines(one: Listed) -> list[tuple[str, str]]:
    """Describes the figures of one device."""
    absent, fabric = one.absent, one.absent.fabric
    chip = fabric.chip
    peaks = [f"{format_count(speed)}FLOP/s {kind}" for kind, speed in chip.peak_flops_per_s]
    links = f"{links_words(absent)} one way"
    if fabric.torus:
        links += " each" if fabric.devices_per_chip == 1 else " each, for a chip"
    return [
        ("device", chip.name + (", half a chip" if fabric.devices_per_chip == 2 else "")),
        ("memory", f"{format_bytes(absent.device_memory_bytes)} for programs, "
         f"{_rate(chip.hbm_bytes_per_s)}"),
        ("peak", ", ".join(peaks)),
        ("links", links),
        ("DCN", f"{_rate(one.dcn_bytes_per_s)} one way"),
    ]  # fmt: skip


def _several(found: Sequence[Listed], compilers: Sequence[Compiler]) -> tuple[Section, ...]:
    """Makes a line for a kind of slices; for several kinds, or GPUs, a line per kind first."""
    kinds = {one.kind for one in found}
    slices = [one for one in found if one.absent.fabric.torus]
    platforms = {one.absent.platform for one in found}
    here = [
        ("compile", _here(compiler)) for compiler in compilers if compiler.platform in platforms
    ]
    if len(kinds) == 1 and slices:
        one = slices[0]
        lines = [("N", f"counts {one.counts}"), *_chip_lines(one)]
        lines.append(("compile", compile_words(one.absent, compilers)))
        return (Section(blocks=(_names(slices),)), *_with_sources(lines, [one]))
    overview = Section(blocks=(_overview(found),))
    if slices:
        where = f"`automesh targets {found[0].name}` says where the figures of one come from"
        lines = lines_of(*here, ("sources", where))
        return (overview, Section(blocks=(_names(slices),)), Section(blocks=(lines,)))
    return (overview, *_with_sources(here, found))


def _names(rows: Sequence[Listed]) -> Table:
    """Makes a line per slice."""
    absents = [row.absent for row in rows]

    def right(name: str, value: Callable[[Absent], object]) -> Column:
        return figures_column(name, [str(value(absent)) for absent in absents])

    columns = [
        figures_column("target", [row.name for row in rows], justify="left"),
        right("devices", lambda one: one.num_devices),
        right("chips", lambda one: one.num_devices // one.fabric.devices_per_chip),
        right("torus", torus_words),
        figures_column("wraps", map(wraps_words, absents), justify="left"),
        right("hosts", lambda one: one.num_hosts),
    ]
    return _table(columns)


def _with_sources(lines: Sequence[Line], rows: Sequence[Listed]) -> tuple[Section, ...]:
    """Adds to lines where the figures come from, and what the names of the sources mean."""
    said: dict[str, None] = {}
    for row in rows:
        for what, source in row.sources:
            shared = all((what, source) in other.sources for other in rows)
            whose = what.replace("_", " ") if shared else f"{row.kind}, {what}"
            said[clean(f"{whose}: {source}")] = None
    text = " ".join(said)
    cited = [
        (name, clean(words))
        for name, words in citations().items()
        if re.search(rf"\b{name}\b", text)
    ]
    sources = [("" if place else "sources", line) for place, line in enumerate(said)]
    return (
        Section(blocks=(lines_of(*lines), lines_of(*sources))),
        Section(blocks=(lines_of(*cited, labels="marks"),)),
    )


# `automesh targets --json`.


def _facts(found: Sequence[Listed], compilers: Sequence[Compiler]) -> dict[str, Any]:
    """Returns targets as plain JSON values: bytes, bytes and operations per second."""
    installed = {compiler.platform: compiler.version for compiler in compilers}
    return {
        "compilers": [
            {
                "platform": compiler.platform,
                "name": compiler.name,
                "version": compiler.version,
                "install": "" if compiler.version else compiler.install,
            }
            for compiler in compilers
        ],
        "targets": [_target(one, installed) for one in found],
        "sources": citations(),
    }


def _target(one: Listed, installed: dict[str, str]) -> dict[str, Any]:
    absent = one.absent
    fabric = absent.fabric
    chip = fabric.chip
    slices = fabric.num_granules if fabric.torus else 0
    return {
        "name": one.name,
        "kind": one.kind,
        "platform": absent.platform,
        "chip": chip.name,
        "device_kind": absent.device_kind,
        "devices": absent.num_devices,
        "chips": absent.num_devices // fabric.devices_per_chip,
        "devices_per_chip": fabric.devices_per_chip,
        "slices": slices,
        "torus": list(fabric.torus),
        "wraps": list(fabric.wraps),
        "hosts": absent.num_hosts,
        "granules": fabric.num_granules,
        "chips_per_host": math.prod(absent.host) if absent.host else fabric.granule_devices,
        "device_memory_bytes": absent.device_memory_bytes,
        "device_memory_bytes_per_s": chip.hbm_bytes_per_s,
        "device_flops_per_s": dict(chip.peak_flops_per_s),
        "links_per_chip": 2 * len(fabric.torus) or 1,
        "link_bytes_per_s": chip.link_bytes_per_s * fabric.devices_per_chip,
        "device_dcn_bytes_per_s": chip.dcn_bytes_per_s,
        "topology": absent.topology,
        "can_be_compiled_for": has_compiler(absent),
        "can_be_compiled_for_here": has_compiler(absent) and bool(installed[absent.platform]),
        "sources": dict(one.sources),
    }
