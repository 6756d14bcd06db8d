"""The arguments of a search, checked as far as no worker is needed for it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.hardware.reserve import parse_reserve
from automesh.program.capture.nouns import parse_splits
from automesh.program.nouns import Entry
from automesh.program.script.payload import pickle_entry
from automesh.space.space import Knob
from automesh.tuner.entry import parse_entry
from automesh.tuner.request import SearchRequest


def make_request(
    build: str | Path | Callable[..., Any],
    *,
    args: Sequence[str],
    target: str,
    hardware: str = "",
    space: str,
    budget_s: float,
    top: int | None,
    baseline: str,
    rules: Path | None,
    results: Path,
    storage: str,
    workers: int,
    timeout_s: float,
    memory_limit_bytes: int,
    reserve: str = "",
    xla: tuple[Knob, ...] = (),
    curated: bool = False,
    dry_run: bool,
    new: bool,
    command: str = "",
    step: str = "",
    split: Sequence[str] = (),
) -> SearchRequest:
    """Checks the arguments of a search that need no worker; see `SearchRequest`."""
    if top is not None and top < 1:
        raise UsageError(f"`top` is {top}; at least one finalist must be measured")
    if reserve:
        parse_reserve(reserve)
    entry = _entry_of(build, args)
    if rules is None and entry.kind == "script":
        rules = Path(entry.location).parent / "mesh_rules.toml"
    elif rules is None and entry.kind == "module":
        rules = Path("mesh_rules.toml")
    return SearchRequest(
        entry=entry,
        command=command,
        target=target,
        hardware=hardware,
        space=space,
        budget_s=budget_s,
        top=top or 0,
        baseline=baseline,
        rules=str(rules.absolute()) if rules is not None else "",
        results=results.absolute(),
        storage=storage,
        workers=workers,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        reserve=reserve,
        xla=xla,
        curated=curated,
        dry_run=dry_run,
        new=new,
        step=step,
        splits=parse_splits(split),
    )


def _entry_of(build: str | Path | Callable[..., Any], args: Sequence[str]) -> Entry:
    if isinstance(build, str | Path):
        return parse_entry(str(build), args)
    folder = Path(tempfile.mkdtemp(prefix="automesh-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pickle_entry(build, folder / "build.pickle")
