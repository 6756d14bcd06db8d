"""The store of compiled programs as a table, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from automesh.hlo.store import LIMIT_VARIABLE, ModuleStore, StoreEntry
from automesh.texts.terminal import clean
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


def by_target(entries: Sequence[StoreEntry]) -> tuple[KeptFor, ...]:
    """What is kept for each target, what was used last first."""
    groups: dict[str, list[StoreEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.stored.target, []).append(entry)
    found = [_summed(target, group) for target, group in groups.items()]
    return tuple(sorted(found, key=lambda kept: (-kept.used_s, kept.target)))


def render_store(store: ModuleStore, *, width: int = 80) -> str:
    """The store as text: its folder, its size, and a row for each target."""
    kept = by_target(store.entries())
    size = f"{format_bytes(store.size_bytes())} of {format_bytes(store.limit_bytes)}"
    heading = [
        f"folder    {clean(str(store.folder))}",
        f"size      {size}; ${LIMIT_VARIABLE} sets the limit",
        f"programs  {sum(one.programs for one in kept) or 'none'}",
    ]
    text = "".join(f"{line}\n" for line in heading)
    return f"{text}\n{_table(kept, width)}" if kept else text


def _table(kept: Sequence[KeptFor], width: int) -> str:
    from rich.table import Table

    from automesh.report.drawing import draw

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
            _time_of(one).date().isoformat(),
        )
    return draw([table], width=width, colour=False)


def store_to_json(store: ModuleStore) -> dict[str, Any]:
    """The store as plain values."""
    targets: list[dict[str, Any]] = []
    for one in by_target(store.entries()):
        facts = asdict(one)
        del facts["used_s"]
        targets.append({**facts, "last_used": _time_of(one).isoformat()})
    return {
        "folder": str(store.folder),
        "size_bytes": store.size_bytes(),
        "limit_bytes": store.limit_bytes,
        "targets": targets,
    }


def _summed(target: str, group: Sequence[StoreEntry]) -> KeptFor:
    return KeptFor(
        target=target,
        programs=len(group),
        out_of_memory=sum(1 for entry in group if entry.stored.out_of_memory is not None),
        size_bytes=sum(entry.size_bytes for entry in group),
        compile_s=sum(entry.stored.compile_s for entry in group),
        used_s=max(entry.used_s for entry in group),
    )


def _time_of(kept: KeptFor) -> datetime:
    return datetime.fromtimestamp(kept.used_s, UTC)
