"""The store of compiled programs: what is kept for each target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from automesh.hlo.store import LIMIT_VARIABLE, ModuleStore, StoreEntry
from automesh.report.blocks.columns import figures_column, text_column
from automesh.report.blocks.nouns import Report, Section, Table, lines_of
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFor:
    """The files that are kept for one target.

    Attributes:
      programs: outcomes of compiles.
      out_of_memory: how many of them are refusals for lack of memory.
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
    """Lists what is kept for each target, the last used first."""
    groups: dict[str, list[StoreEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.stored.target, []).append(entry)
    found = [_summed(target, group) for target, group in groups.items()]
    return tuple(sorted(found, key=lambda kept: (-kept.used_s, kept.target)))


def report_of(store: ModuleStore, removed: int | None = None) -> Report:
    """Reports the store: its folder, its size, and a row for each target.

    Args:
      removed: programs that were removed from it just now; None where nobody asked for that.
    """
    kept = by_target(store.entries())
    size = f"{format_bytes(store.size_bytes())} of {format_bytes(store.limit_bytes)}"
    lines = lines_of(
        ("removed", "" if removed is None else f"{removed} programs"),
        ("folder", clean(str(store.folder))),
        ("size", f"{size}; ${LIMIT_VARIABLE} sets the limit"),
        ("programs", str(sum(one.programs for one in kept) or "none")),
    )
    days = [_time_of(one).date().isoformat() for one in kept]
    table = Table(
        columns=(
            text_column("target", [clean(one.target) for one in kept], most=12),
            figures_column("programs", [str(one.programs) for one in kept]),
            figures_column("out of memory", [str(one.out_of_memory) for one in kept]),
            figures_column("size", [format_bytes(one.size_bytes) for one in kept]),
            figures_column("compiled in", [format_wait(one.compile_s) for one in kept]),
            figures_column("last used", days, justify="left"),
        ),
        dropped=("out of memory", "compiled in", "programs"),
        is_ruled=False,
    )
    sections = (Section(blocks=(lines,)), Section(blocks=(table,)))
    return Report(sections=sections, facts=lambda: _facts(store, kept, removed or 0))


def _facts(store: ModuleStore, kept: Sequence[KeptFor], removed: int) -> dict[str, Any]:
    targets: list[dict[str, Any]] = []
    for one in kept:
        facts = asdict(one)
        del facts["used_s"]
        targets.append({**facts, "last_used": _time_of(one).isoformat()})
    return {
        "folder": str(store.folder),
        "size_bytes": store.size_bytes(),
        "limit_bytes": store.limit_bytes,
        "targets": targets,
        "removed": removed,
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
