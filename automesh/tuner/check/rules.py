"""`automesh check`: compares every rule of a file with today's script."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.evidence import ProgramFacts, differences, relevant_environment
from automesh.mesh.rules.file import merge_rule
from automesh.mesh.rules.rule import MeshRule, escape, first_match, matches_only
from automesh.package import installed_version
from automesh.report.check.facts import BOUNDS, Bounds, compare, facts_of
from automesh.report.check.nouns import RuleCheck, RulesChecked
from automesh.report.progress import Progress
from automesh.texts.terminal import clean
from automesh.tuner.check.compiling import Aimed, Broken, Workers, aim_at, compile_today
from automesh.tuner.request import SearchRequest
from automesh.worker.temporary import temporary_folder

_GIT_LIMIT_S = 60.0
_PACKAGES = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """The options of one check.

    Attributes:
      request: request for the script; its target is not used.
      script: the script as the user named it.
      source: the rules file as the user named it.
      select: targets whose rules are checked; empty for all rules.
      against: a version of the script in git to compare with instead of the evidence.
    """

    request: SearchRequest
    script: str
    source: str
    select: tuple[str, ...] = ()
    against: str = ""
    bounds: Bounds = BOUNDS


class FiguresNotWritten(UsageError):
    """A rules file that does not take the figures of today.

    Attributes:
      checked: the comparison, which is done.
    """

    def __init__(self, error: UsageError, checked: RulesChecked) -> None:
        super().__init__(error.message, hint=error.hint)
        self.checked = checked


def check_rules(rules: Rules, order: CheckOrder, progress: Progress) -> RulesChecked:
    """Compiles and compares every rule.

    Raises:
      UsageError: no such rule, a script that is not in git, or no such version of it.
    """
    chosen = _chosen(rules, order.select)
    with ExitStack() as stack:
        before = stack.enter_context(_earlier(order)) if order.against else None
        # A worker keeps its imported modules, so each version of the script has workers of its own.
        now = Workers(stack, order.request, progress)
        then = Workers(stack, order.request, progress)
        found = [_check(rules, rule, order, progress, now, then, before) for rule in chosen]
    against = order.against or order.source
    return RulesChecked(script=order.script, against=against, rules=tuple(found))


def write_facts(path: Path, rules: Rules, checked: RulesChecked) -> None:
    """Writes today's figures into the rules that were compiled, and changes nothing else of them.

    Raises:
      FiguresNotWritten: the file cannot be read any more, or not be written.
    """
    try:
        _write_facts(path, rules, checked)
    except UsageError as error:
        raise FiguresNotWritten(error, checked) from None


def _write_facts(path: Path, rules: Rules, checked: RulesChecked) -> None:
    known = {rule.match: rule for rule in rules.rules}
    for found in checked.rules:
        rule = known.get(found.match)
        if rule is None or found.now is None:
            continue
        evidence = replace(
            rule.evidence,
            program=found.now,
            versions=tuple((name, installed_version(name)) for name in _PACKAGES),
            environment=tuple(relevant_environment(os.environ).items()),
        )
        if evidence.kind == "none":
            evidence = replace(
                evidence, kind="compiled", step_s=found.now.step_s, hbm_bytes=found.now.peak_bytes
            )
        merge_rule(
            path,
            replace(rule, axes=rules.axes_of(rule), evidence=evidence),
            selector=matches_only(rule.match),
        )


def _chosen(rules: Rules, select: Sequence[str]) -> list[MeshRule]:
    if not rules.rules:
        raise UsageError("the file has no rules", hint="search first: `automesh search train.py`")
    if not select:
        return list(rules.rules)
    found: list[MeshRule] = []
    for name in select:
        index = first_match(rules.rules, name)
        if index == len(rules.rules):
            raise UsageError(f"no rule matches `{name}`: {'; '.join(rules.explain(name))}")
        found.append(replace(rules.rules[index], match=escape(name)))
    return found


def _check(
    rules: Rules,
    rule: MeshRule,
    order: CheckOrder,
    progress: Progress,
    now: Workers,
    then: Workers,
    before: SearchRequest | None,
) -> RuleCheck:
    axes = rules.axes_of(rule)
    try:
        aimed = aim_at(rule, axes, order.request)
        said = RuleCheck(
            match=rule.match,
            plan=str(aimed.plan),
            target=aimed.target.name,
            status="unknown",
            explain=_explain(order, aimed),
        )
        facts = rule.evidence.program
        if before is not None:
            earlier = compile_today(aimed, before, then, progress)
            if isinstance(earlier, Broken):
                return replace(said, reason=f"{order.against}: {earlier.reason}")
            facts = facts_of(earlier)
        found = compile_today(aimed, order.request, now, progress)
    except UsageError as error:
        return RuleCheck(match=rule.match, status="unknown", reason=error.message)
    if isinstance(found, Broken):
        status = "regressed" if found.of_rule else "unknown"
        return replace(said, status=status, reason=clean(found.reason))
    notes = () if before is not None else differences(rule.evidence, os.environ)
    return _judged(said, rule, facts, facts_of(found), order.bounds, notes)


def _judged(
    said: RuleCheck,
    rule: MeshRule,
    then: ProgramFacts,
    now: ProgramFacts,
    bounds: Bounds,
    notes: tuple[str, ...],
) -> RuleCheck:
    if not then.fingerprint:
        return replace(
            said,
            now=now,
            reason=f"the rule `{rule.match}` does not say what its program does: it was written by "
            "hand or by an earlier version; --update adds it",
            notes=notes,
        )
    changes = compare(then, now, bounds)
    worse = [change for change in changes if change.verdict == "regressed"]
    if not worse and then.fingerprint != now.fingerprint:
        notes = (*notes, "the program is another one, within all bounds")
    return replace(
        said,
        status="regressed" if worse else "holds",
        reason="beyond the bounds: " + ", ".join(change.what for change in worse) if worse else "",
        changes=changes,
        notes=notes,
        now=now,
    )


def _explain(order: CheckOrder, aimed: Aimed) -> str:
    words = ["automesh", "explain", order.script, str(aimed.plan), "--target", aimed.target.name]
    arguments = order.request.entry.argv
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


@contextmanager
def _earlier(order: CheckOrder) -> Generator[SearchRequest]:
    """Yields the request for an earlier version of the script, with all files of that version from
    git."""
    script = Path(order.request.entry.location)
    if order.request.entry.kind != "script":
        raise UsageError("--against is for a script, not for a module", hint="name its file")
    top = Path(_git(script.parent, "rev-parse", "--show-toplevel").strip())
    commit = _git(top, "rev-parse", "--verify", "--end-of-options", f"{order.against}^{{commit}}")
    with temporary_folder("against") as folder:
        archive = folder / "tree.tar"
        _git(top, "archive", "--format=tar", f"--output={archive}", commit.strip())
        tree = folder / "tree"
        tree.mkdir()
        # The archive is git's own, so tar writes nothing outside of the temporary folder.
        _run(["tar", "-xf", str(archive), "-C", str(tree)], folder)
        there = tree / script.resolve().relative_to(top.resolve())
        if not there.is_file():
            raise UsageError(f"`{order.script}` is not in {order.against}")
        yield replace(order.request, subject=replace(order.request.entry, location=str(there)))


def _git(folder: Path, *words: str) -> str:
    return _run(["git", "-C", str(folder), *words], folder)


def _run(words: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"`{words[0]}` could not be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            f"`{shlex.join(words)}` failed: {clean(last)}",
            hint="--against names a commit, tag or branch of the script's own repository",
        )
    return done.stdout
