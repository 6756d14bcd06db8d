"""The store of compiled programs as a table, for people and as JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from automesh.hlo.store import LIMIT_VARIABLE, Entry, ModuleStore
from automesh.units import format_bytes, format_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFor:
    """What is kept for one target.

    Attributes:
      programs: outcomes of compiles.
      out_of_memory: how many of them are refusals for want of memory.
      compile_s: that compiling them took, together.
      used_s: when one of them was last needed, seconds since the epoch.
    """

    target: str
    programs: int
    out_of_memory: int
    size_bytes: int
    compile_s: float
    used_s: float


def by_target(entries: Sequence[Entry]) -> tuple[KeptFor, ...]:
    """What is kept for each target, what was used last first."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.stored.target, []).append(entry)
    found = [_summed(target, group) for target, group in groups.items()]
    return tuple(sorted(found, key=lambda kept: (-kept.used_s, kept.target)))


def render_store(store: ModuleStore, *, width: int = 80) -> str:
    """The store as text: its folder, its size, and a row for each target."""
    from rich.console import Console
    from rich.table import Table

    kept = by_target(store.entries())
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    console.print(f"folder    {store.folder}", soft_wrap=True)
    console.print(
        f"size      {format_bytes(store.size_bytes())} of {format_bytes(store.limit_bytes)}; "
        f"${LIMIT_VARIABLE} sets the limit",
        soft_wrap=True,
    )
    if not kept:
        console.print("programs  none")
        return text.getvalue()
    console.print(f"programs  {sum(one.programs for one in kept)}\n")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("target", overflow="fold")
    for heading in ("programs", "out of memory", "size", "compiled in"):
        table.add_column(heading, justify="right")
    table.add_column("last used", no_wrap=True)
    for one in kept:
        table.add_row(
            one.target,
            str(one.programs),
            str(one.out_of_memory),
            format_bytes(one.size_bytes),
            format_wait(one.compile_s),
            _day(one.used_s),
        )
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def store_to_json(store: ModuleStore) -> dict[str, Any]:
    """The store as plain values."""
    return {
        "folder": str(store.folder),
        "size_bytes": store.size_bytes(),
        "limit_bytes": store.limit_bytes,
        "targets": [
            {
                "target": one.target,
                "programs": one.programs,
                "out_of_memory": one.out_of_memory,
                "size_bytes": one.size_bytes,
                "compile_s": one.compile_s,
                "last_used": datetime.fromtimestamp(one.used_s, UTC).isoformat(),
            }
            for one in by_target(store.entries())
        ],
    }


def _summed(target: str, group: Sequence[Entry]) -> KeptFor:
    return KeptFor(
        target=target,
        programs=len(group),
        out_of_memory=sum(1 for entry in group if entry.stored.out_of_memory is not None),
        size_bytes=sum(entry.size_bytes for entry in group),
        compile_s=sum(entry.stored.compile_s for entry in group),
        used_s=max(entry.used_s for entry in group),
    )


def _day(used_s: float) -> str:
    return datetime.fromtimestamp(used_s, UTC).date().isoformat()
