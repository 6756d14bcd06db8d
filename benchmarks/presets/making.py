"""Makes one preset: a search of MaxText's own step for a target, first estimated, then compiled.

Each pair of a model and a target is kept as soon as anything is known of it: the rule in
`maxtext/MODEL.toml`, and how it was made in `maxtext/MODEL.json`. What the installed versions have
made already is not made again; a search that was cut off is gone on with, by its study.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from automesh import api
from automesh.errors import AutomeshError, NoFeasibleMesh
from automesh.files import write_whole
from automesh.hardware import check_compilable, parse_target
from automesh.hardware.reserve import default_reserve
from automesh.jsonio import to_json
from automesh.mesh.axes import usual_batch_axes
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import format_rules, read_rules
from automesh.mesh.rules.rule import MeshRule, matches_only
from automesh.mesh.rules.shipped import PresetOrigin, PresetOrigins, Side, read_records
from automesh.outcomes import Compiled, Estimated, Failed, OutOfMemory, TimedOut
from automesh.package import installed_version
from automesh.platforms import COMPILED_ABSENT
from automesh.report.files.rule import estimated_rule_of, rule_of
from automesh.report.result import Candidate, SearchResult
from benchmarks.presets.models import FRAMEWORK, TARGETS, Model
from benchmarks.presets.published import Published, published
from benchmarks.support.compiles import say

# Packages that bring the compiler of a platform.
_COMPILERS = {
    one.name: tuple(plugin.packages[0] for plugin in one.plugins) for one in COMPILED_ABSENT
}
# A preset was made by these: with another version of one of them it is made again.
MAKERS = ("jax", "jaxlib", "maxtext", *(name for names in _COMPILERS.values() for name in names))
_BY = "python -m benchmarks.presets"
_ROUNDS = 8  # searches of one pair, each with another published mesh as the baseline
# For the estimates of one pair, which are all made: a minute of work and one for each mesh apart.
_ALL_ESTIMATES = "24h"
# What a search says of itself whose time was over before its last compile.
_LATE = "before all promising plans were compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How presets are made.

    Attributes:
      folder: for what is kept.
      studies: for the searches, which go on where they were.
      budget, timeout, top, workers: of each search that compiles, as `automesh search` takes them.
    """

    folder: Path
    studies: Path
    budget: str
    timeout: str
    top: int
    workers: int


@dataclass(slots=True, kw_only=True)
class Book:
    """The two files of a model: its rules, and how they were made."""

    model: Model
    path: Path
    rules: dict[str, MeshRule] = field(default_factory=dict[str, MeshRule])
    made: dict[str, PresetOrigin] = field(default_factory=dict[str, PresetOrigin])

    @classmethod
    def open(cls, model: Model, folder: Path) -> Book:
        """What is kept of a model so far."""
        path = folder / f"{model.preset}.toml"
        book = cls(model=model, path=path)
        if path.exists():
            known = read_rules(path)
            for rule in known.rules:
                own = replace(rule, axes=known.axes_of(rule), batch_axes=known.batch_axes_of(rule))
                book.rules[matches_only(rule.match)] = own
        book.made = dict(read_records(path).targets)
        return book

    def keep(self, target: str, made: PresetOrigin, rule: MeshRule | None) -> None:
        """Writes down what became of a target; `rule` is None where there is none."""
        self.made[target] = made
        if rule is None:
            self.rules.pop(target, None)
        else:
            self.rules[target] = rule
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The rules last: who finds one finds how it was made.
        known = {name: self.made[name] for name in _in_order(self.made)}
        tree = to_json(PresetOrigins(targets=known), PresetOrigins)
        write_whole(self.path.with_name(f"{self.model.name}.json"), _text(tree))
        write_whole(self.path, self._rules_text().encode())

    def _rules_text(self) -> str:
        """The rules file, each rule under the arguments that it is for."""
        targets = [name for name in _in_order(self.rules) if name in self.rules]
        rules = [self.rules[name] for name in targets]
        if not rules:
            return format_rules(Rules(axes=("data", "fsdp")), by=_BY)
        axes, batch = rules[0].axes, rules[0].batch_axes or usual_batch_axes(rules[0].axes)
        short = [replace(rule, axes=(), batch_axes=None) for rule in rules]
        text = format_rules(Rules(axes=axes, batch_axes=batch, rules=tuple(short)), by=_BY)
        head, *blocks = text.split("[[rule]]\n")
        said = [f"# {self.made[name].arguments}\n[[rule]]\n" for name in targets]
        return head + "".join(one + block for one, block in zip(said, blocks, strict=True))


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (TARGETS.index(name) if name in TARGETS else 99, name))


def _text(tree: object) -> bytes:
    return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()


def is_current(made: PresetOrigin, arguments: str) -> bool:
    """Whether the installed versions have made it, of MaxText's arguments as they are now."""
    return made.arguments == arguments and all(
        installed_version(name) == made.versions[name] for name in MAKERS if name in made.versions
    )


# Printed in front of what is missing: MaxText prints things of its own while it is imported.
_MISSING = "missing: "


def missing_of_maxtext() -> str:
    """What keeps MaxText from being imported here; empty if nothing does."""
    code = (
        "from automesh.errors import AutomeshError\n"
        "from automesh_frameworks.steps.maxtext import check_installed\n"
        "try:\n    check_installed()\n"
        f"except AutomeshError as error:\n    print({_MISSING!r} + error.message)"
    )
    # In a process of its own: nothing of jax is imported in this one.
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or [f"its import ended with {ran.returncode}"])[-1]
    said = [line for line in ran.stdout.splitlines() if line.startswith(_MISSING)]
    return said[-1].removeprefix(_MISSING) if said else ""


def has_compiler(target: str) -> str:
    """Why the devices of a target cannot be compiled for here; empty if they can."""
    try:
        check_compilable(parse_target(target, os.environ))
    except AutomeshError as error:
        return error.message
    return ""


def free_bytes(target: str) -> int:
    """What plans may use of a device, the usual reserve left free."""
    absent = parse_target(target, {}).absent
    assert absent is not None, target
    limit = absent.device_memory_bytes
    return limit - default_reserve(absent.platform, {}).of(limit)


def estimate(book: Book, target: str, settings: Settings) -> None:
    """Estimates every legal mesh, and keeps the best that is estimated to fit as a rule."""
    begun = time.monotonic()
    rule = ours = None
    try:
        found = _search(book.model, target, settings, dry_run=True).found
        reason = has_compiler(target)
    except AutomeshError as error:
        book.keep(target, _made(book, target, begun, reason=error.message, is_final=True), None)
        return
    within = free_bytes(target)
    try:
        rule = estimated_rule_of(found, within_bytes=within)
        ours = side_of(_with_plan(found.candidates, rule))
    except NoFeasibleMesh as error:
        reason = error.message
    # Not the last word even where no compiler is installed: one may be, the next time.
    made = _made(book, target, begun, reason=reason, is_final=False)
    book.keep(
        target,
        replace(
            made,
            versions=_versions(found),
            legal=found.funnel.legal,
            ours=ours,
            published=tuple(sides(book.model, target, found, within)),
        ),
        rule,
    )


def compile_best(book: Book, target: str, settings: Settings) -> None:
    """Compiles the best of a pair and the published meshes; the rule then says `compiled`."""
    begun = time.monotonic()
    before = book.made[target]
    within = free_bytes(target)
    found, asked = None, set[str]()
    try:
        for _ in range(_ROUNDS):
            candidates = () if found is None else found.candidates
            chosen = _to_compare(book.model, target, candidates, within, before)
            plan = next((one for one in chosen if one not in asked), "")
            if found is not None and not plan:
                break
            asked.add(plan)
            found = _search(book.model, target, settings, baseline=plan).found
            if found.footer.interrupted:
                raise KeyboardInterrupt
    except AutomeshError as error:
        say(f"{book.model.preset} on {target}: {error.message}")
        made = replace(before, reason=error.message, seconds=before.seconds + _since(begun))
        book.keep(target, replace(made, is_final=True), book.rules.get(target))
        return
    assert found is not None
    rule, reason = book.rules.get(target), ""
    try:
        rule = rule_of(found)
    except NoFeasibleMesh as error:
        reason = error.message
        # What no compiler has taken is no rule where the compiler has refused the best ones.
        rule = None if found.funnel.out_of_memory else rule
    seen = found.funnel.compiled + found.funnel.duplicates
    # Beside the first published mesh the best; a search with time left goes on to challengers.
    is_enough = seen > settings.top or _LATE not in found.footer.stop_reason
    ours = side_of(_with_plan(found.candidates, rule)) if rule is not None else None
    made = _made(book, target, begun, reason=reason, is_final=is_enough)
    book.keep(
        target,
        replace(
            made,
            versions=_versions(found),
            legal=found.funnel.legal,
            compiled=seen,
            ours=ours,
            published=tuple(sides(book.model, target, found, within, before.published)),
        ),
        rule,
    )


def _search(
    model: Model, target: str, settings: Settings, *, baseline: str = "", dry_run: bool = False
) -> api.Result:
    """One `automesh search maxtext`, in this process.

    Raises:
      AutomeshError: as that.
    """
    settings.studies.mkdir(parents=True, exist_ok=True)
    with api.progress_on_stderr() as progress:
        return api.search(
            FRAMEWORK,
            target=target,
            args=list(model.arguments(target)),
            space=model.space_path,
            budget=_ALL_ESTIMATES if dry_run else settings.budget,
            timeout=settings.timeout,
            top=settings.top,
            workers=settings.workers,
            baseline=baseline,
            rules=settings.studies / f"{model.name}-{target}.toml",
            results=settings.studies,
            dry_run=dry_run,
            progress=progress,
        )


def _made(book: Book, target: str, begun: float, *, reason: str, is_final: bool) -> PresetOrigin:
    before = book.made.get(target)
    arguments = " ".join(book.model.arguments(target))
    again = before is not None and is_current(before, arguments)
    return PresetOrigin(
        arguments=arguments,
        command=f"{_BY} --model {book.model.name} --target {target}",
        seconds=_since(begun) + (before.seconds if again and before is not None else 0.0),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: version for name in MAKERS if (version := installed_version(name))},
        reason=reason,
        is_final=is_final,
    )


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 1)


def _versions(found: SearchResult) -> dict[str, str]:
    """Of what made the programs; of a compiler only where it is the target's."""
    told = dict(found.facts.provenance.versions)
    others = {
        name
        for on, names in _COMPILERS.items()
        if on != found.facts.devices.platform
        for name in names
    }
    known = {name: told[name] for name in MAKERS if name in told and name not in others}
    return known | {FRAMEWORK: installed_version(FRAMEWORK)}


# Which of the candidates stands for what.


def _with_plan(candidates: Iterable[Candidate], rule: MeshRule) -> Candidate:
    """The candidate that a rule was made from."""
    shape, knobs = rule.hybrid_shape, dict(rule.knobs)
    return next(
        one
        for one in candidates
        if tuple(axis.ici for axis in one.plan.axes) == shape.ici_mesh_shape
        and tuple(axis.dcn for axis in one.plan.axes) == shape.dcn_mesh_shape
        and dict(one.plan.knobs) == knobs
    )


def chosen_for(candidates: Iterable[Candidate], mesh: str, within: int) -> Candidate | None:
    """The plan with a published mesh that is compared: with the knobs that suit it best.

    That is the fastest that the compiler took, or that is estimated to fit as long as it has seen
    none; else the one that it refused.

    Args:
      candidates: of a search.
      mesh: as text.
      within: bytes of a device that plans may use.
    """
    mine = [one for one in candidates if one.plan.mesh == mesh]
    fitting = [one for one in mine if isinstance(one.outcome, Compiled)]
    unseen = [one for one in mine if isinstance(one.outcome, Estimated)]
    small = [one for one in unseen if one.peak_bytes <= within]
    for among in (fitting, small, unseen, mine):
        if among:
            return min(among, key=lambda one: _seconds(one) or float("inf"))
    return None


def _to_compare(
    model: Model, target: str, candidates: Sequence[Candidate], within: int, before: PresetOrigin
) -> list[str]:
    """Published plans that no compiler has seen, as text; by the estimates before any search."""
    if not candidates:
        return [side.plan for side in before.published if side.kind == "estimated"]
    chosen = [chosen_for(candidates, one.mesh, within) for one in published(model, target)]
    return [
        str(one.plan) for one in chosen if one is not None and isinstance(one.outcome, Estimated)
    ]


def sides(
    model: Model,
    target: str,
    found: SearchResult,
    within: int,
    before: Sequence[Side] = (),
) -> Iterator[Side]:
    """The published meshes, each with the best that is known of it.

    Args:
      before: what the estimates said: a search does not list a plan that it had no time to compile.
    """
    known = {(side.plan.split()[0], side.source): side for side in before}
    for one in published(model, target):
        candidate = chosen_for(found.candidates, one.mesh, within)
        if candidate is None:
            yield known.get((one.mesh, one.source)) or _absent(one)
        else:
            yield side_of(candidate, one)


def _absent(one: Published) -> Side:
    remark = "; ".join(filter(None, ("no plan of the search space", one.remark)))
    return Side(plan=one.mesh, source=one.source, kind="failed", remark=remark)


def _seconds(candidate: Candidate) -> float:
    match candidate.outcome:
        case Compiled(replay=replay) if replay is not None:
            return replay.step_s
        case Compiled(step_s=step_s) | Estimated(step_s=step_s):
            return step_s
        case _:
            return candidate.estimated.step_s if candidate.estimated is not None else 0.0


def side_of(candidate: Candidate, one: Published | None = None) -> Side:
    """A plan of a search as one side of a comparison.

    Args:
      one: the published mesh that it has; None for the plan of the rule.
    """
    outcome = candidate.outcome
    estimated = outcome if isinstance(outcome, Estimated) else candidate.estimated
    side = Side(
        plan=str(candidate.plan),
        source=one.source if one is not None else "",
        remark=one.remark if one is not None else "",
        kind="failed",
        estimated_s=estimated.step_s if estimated is not None else 0.0,
        memory_bytes=candidate.peak_bytes,
    )
    match outcome:
        case Compiled(replay=replay) if replay is not None:
            return replace(side, kind="compiled", step_s=replay.step_s, causes=replay.causes)
        case Estimated(step_s=step_s, causes=causes):
            return replace(side, kind="estimated", step_s=step_s, causes=causes)
        case OutOfMemory(needed_bytes=needed):
            return replace(side, kind="too large", memory_bytes=needed)
        case Failed(reason=reason):
            return replace(side, remark="; ".join(filter(None, (side.remark, reason))))
        case TimedOut(limit_s=limit_s):
            told = f"not compiled within {limit_s:.0f} s"
            return replace(side, remark="; ".join(filter(None, (side.remark, told))))
        case _:
            return side
