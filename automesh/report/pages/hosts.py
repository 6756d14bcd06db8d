"""The hosts of a search: a row for each, and how many are missing."""

from __future__ import annotations

from dataclasses import asdict

from automesh.launch.asking import Hosts, HostStatus
from automesh.report.blocks.columns import figures_column, text_column
from automesh.report.blocks.nouns import Report, Section, Sentence, Table
from automesh.texts.terminal import clean
from automesh.units import format_bytes

_SILENT_S = 6.0  # An agent speaks every two seconds.


def report_of(hosts: Hosts) -> Report:
    """Makes a table of what each host does; the facts have all that its agent reports."""
    present = hosts.present
    table = Table(
        columns=(
            text_column("host", [clean(one.name) for one in present], most=12),
            figures_column("cores", [str(one.cores) for one in present]),
            figures_column("memory", [format_bytes(one.memory_bytes) for one in present]),
            figures_column("load", [f"{one.load:.2f}" if one.load >= 0 else "" for one in present]),
            figures_column("processes", [str(one.processes) for one in present]),
            text_column("does", map(_does, present), most=12),
        ),
        dropped=("processes", "load", "memory", "cores"),
        is_ruled=False,
    )
    there = Sentence(text=f"{len(present)} of {hosts.wanted} agents are there")
    is_whole = present and len(present) == hosts.wanted
    section = Section(blocks=(table,) if is_whole else (table, there))
    return Report(sections=(section,), facts=lambda: asdict(hosts))


def _does(one: HostStatus) -> str:
    silent = f"silent for {one.silent_s:.0f} s" if one.silent_s > _SILENT_S else ""
    return silent or "\n".join(map(clean, one.does)) or "waits"
