"""Do the meshes that experts published stand among the best that automesh finds, and if not, why?

    python -m benchmarks.experts [presets.json] [--platform gpu] [--limit 25] [--preset p239]...

For every public preset that the shipped examples can represent: all plans of the example's search
space are estimated for the preset's devices, at the preset's batch, sequence length, remat and
gradient accumulation; the expert's mesh and the leaders are compiled at default effort (needs the
`tpu` extra, or `gpu`; no devices) and their schedules replayed. A mesh stands where its replay puts
it among the replays of the others and the estimates, as corrected by the replays, of the rest.
Where the expert's mesh does not fit, the rows are accumulated in more microbatches, on both sides.

Half a minute to a few minutes per compile for TPUs, seconds for GPUs: presets of few devices come
first, and what is done is kept in `results/experts` (outcomes, compiled programs, and the rows of
this table as long as the code is the same). Nothing here is measured: both sides are predictions by
the same model.
The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from automesh.errors import AutomeshError
from automesh.jsonio import from_json, to_json
from automesh.units import format_seconds
from benchmarks.experts.fitting import fitted
from benchmarks.experts.presets import Expert, Skipped, read_presets, sort_out
from benchmarks.experts.study import TIE, Row, Side, studied
from benchmarks.support.compiles import say
from benchmarks.support.paths import DATA, ROOT

PRESETS = DATA / "expert_presets.json"


@dataclass(slots=True, kw_only=True)
class Kept:
    """The rows of a table, in a file, each with a digest of what it came from."""

    path: Path
    rows: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path) -> Kept:
        rows = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return cls(path=path, rows=rows)

    def find(self, expert: Expert, digest: str) -> Row | None:
        kept = self.rows.get(expert.id)
        return from_json(kept["row"], Row) if kept and kept["digest"] == digest else None

    def keep(self, row: Row, digest: str) -> None:
        self.rows[row.id] = {"digest": digest, "row": to_json(row, Row)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.rows, indent=1), "utf-8")
        temporary.replace(self.path)


def digest_of(expert: Expert, *settings: object) -> str:
    """Of everything that a row depends on: the preset, the settings, and the code."""
    digest = hashlib.sha256(repr((expert, expert.space, settings)).encode())
    for folder, names in (
        ("automesh", "*.py"),
        ("examples", "*.py"),
        ("benchmarks/experts", "fitting.py"),
        ("benchmarks/experts", "presets.py"),
        ("benchmarks/experts", "study.py"),
        ("benchmarks/support", "granules.py"),
        ("benchmarks/support", "models.py"),
    ):
        for path in sorted((ROOT / folder).rglob(names)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def described(expert: Expert, row: Row) -> list[str]:
    """The lines of one preset."""
    lines = [
        f"{expert.id} {expert.framework} {expert.model} on {expert.selector}: "
        f"{' '.join(expert.argv)} ({Path(expert.script).stem})",
        f"  {row.legal} legal plans, {row.compiled} compiled; the expert's mesh "
        + (f"ranks {row.rank}" if row.rank else "has no place"),
        f"  expert {_side(row.expert)}",
        f"  ours   {_side(row.ours)}",
    ]
    if row.accumulated:
        lines.append(f"  {row.accumulated}")
    if row.excluded:
        lines.append(f"  our space excludes the expert's mesh: {'; '.join(row.excluded)}")
    if row.ratio:
        lines.append(f"  the expert's mesh takes {row.ratio:.3f} of our time{_because(row)}")
    elif row.cause:
        lines.append(f"  by the estimate, {row.cause}")
    return [*lines, *(f"  but: {remark}" for remark in expert.remarks)]


def _side(side: Side) -> str:
    replayed = f"{format_seconds(side.step_s)} replayed, " if side.step_s else ""
    return f"{side.plan}: {replayed}{format_seconds(side.estimated_s)} estimated, {side.verdict}"


def _because(row: Row) -> str:
    if abs(row.ratio - 1.0) <= TIE:
        return ": a tie"
    return f": {row.cause}" if row.cause else ""


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures over all presets: ratios are over those where both sides fit."""
    ratios = [row.ratio for row in rows if row.ratio]
    return {
        "presets": len(rows),
        "expert_in_top5": sum(row.in_top5 for row in rows),
        "median_ratio": round(statistics.median(ratios), 4) if ratios else None,
        "largest_ratio": round(max(ratios), 4) if ratios else None,
        "with_ratio": len(ratios),
        "ties": sum(abs(ratio - 1.0) <= TIE for ratio in ratios),
        "expert_faster": sum(ratio < 1.0 - TIE for ratio in ratios),
        "expert_does_not_fit": sum(not row.expert.fits for row in rows),
        "accumulated": sum(bool(row.accumulated) and row.expert.fits for row in rows),
        "excluded_by_space": sum(bool(row.excluded) for row in rows),
    }


def left_out(skipped: Sequence[Skipped]) -> list[str]:
    """The presets that cannot be represented, by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in skipped:
        reasons[one.reason].append(f"{one.id} {one.model}")
    ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return [f"  {reason}: {', '.join(names)}" for reason, names in ranked]


def _studied_all(
    experts: Sequence[Expert],
    kept: Kept,
    settings: tuple[object, ...],
    run: Callable[[Expert], Row],
) -> tuple[list[Row], dict[str, str]]:
    """The rows, printed as they come, and the presets that failed with the reasons."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for number, expert in enumerate(experts, start=1):
        digest = digest_of(expert, *settings)
        row = kept.find(expert, digest)
        say(f"{number}/{len(experts)} {expert.id}: {'kept' if row else expert.baseline}")
        if row is None:
            try:
                row = run(expert)
            except (AutomeshError, RuntimeError) as error:
                failures[expert.id] = str(error)
                say(f"{expert.id} failed: {error}")
                continue
            kept.keep(row, digest)
        rows.append(row)
        print("\n".join(described(expert, row)), flush=True)
        say(json.dumps(summary(rows)))
    return rows, failures


def main(
    presets: Annotated[Path, typer.Argument(help="A file of presets.")] = PRESETS,
    limit: Annotated[int, typer.Option(min=0, help="Only so many; 0: all.")] = 0,
    preset: Annotated[
        list[str] | None, typer.Option(help="Only the one of this id; may be repeated.")
    ] = None,
    platform: Annotated[
        Literal["tpu", "gpu"] | None, typer.Option(help="Only presets of these devices.")
    ] = None,
    estimates_only: Annotated[
        bool, typer.Option("--estimates-only", help="Compile nothing.")
    ] = False,
    leaders: Annotated[int, typer.Option(min=1, help="Plans to compile beside the expert's.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Compiles side by side.")] = 2,
    folder: Annotated[Path, typer.Option(help="For records.")] = Path("results/experts"),
) -> None:
    """Compares, and prints preset by preset."""
    try:
        experts, skipped = sort_out(read_presets(presets))
    except AutomeshError as error:
        raise SystemExit(f"error: {error}") from None
    chosen = [
        one
        for one in experts
        if (not preset or one.id in preset)
        and (not platform or one.target.startswith("gpu") == (platform == "gpu"))
    ]
    chosen = chosen[:limit] if limit else chosen
    folder = folder.absolute()
    name = "estimates.json" if estimates_only else "rows.json"
    rows, failures = _studied_all(
        chosen,
        Kept.open(folder / name),
        (leaders, estimates_only),
        lambda expert: fitted(
            expert,
            lambda one: studied(
                one, folder, leaders=leaders, workers=workers, compiling=not estimates_only
            ),
        ),
    )
    if skipped and not preset:
        print(f"{len(skipped)} presets that the examples cannot represent:")
        print("\n".join(left_out(skipped)))
    for one, reason in failures.items():
        print(f"{one} failed: {reason}")
    counted = {**summary(rows), "failed": len(failures), "not_representable": len(skipped)}
    print(json.dumps(counted | {"evidence": "estimated" if estimates_only else "compiled"}))
