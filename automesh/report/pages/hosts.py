"""The hosts of a search as a table, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from automesh.launch.asking import Hosts
from automesh.units import format_bytes

_SILENT_S = 6.0  # An agent speaks every two seconds.


def render_hosts(hosts: Hosts, *, width: int = 80) -> str:
    """A row for each host, and how many are missing."""
    from rich.table import Table

    from automesh.report.drawing import draw

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("host", overflow="fold")
    for heading in ("cores", "memory", "load", "processes"):
        table.add_column(heading, justify="right")
    table.add_column("does", overflow="fold")
    for one in hosts.present:
        silent = f"silent for {one.silent_s:.0f} s" if one.silent_s > _SILENT_S else ""
        table.add_row(
            one.name,
            str(one.cores),
            format_bytes(one.memory_bytes),
            f"{one.load:.2f}" if one.load >= 0 else "",
            str(one.processes),
            silent or "\n".join(one.does) or "waits",
        )
    missing = hosts.wanted - len(hosts.present)
    parts: list[Any] = [table] if hosts.present else []
    said = f"{len(hosts.present)} of {hosts.wanted} agents are there"
    return draw([*parts, *([said] if missing or not parts else [])], width=width, colour=False)


def hosts_to_json(hosts: Hosts) -> dict[str, Any]:
    """As plain JSON values."""
    return asdict(hosts)
