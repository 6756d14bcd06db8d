"""Plans for devices that are not here, estimated, compiled and replayed; what was done is kept.

Outcomes of compiles lie in a file for each case, the scheduled programs in a store beside it.
Programs are replayed anew every time: estimate and replay always come from the same code.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.calibration.profile_files import FOLDER_VARIABLE
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.model import HardwareModel
from automesh.hlo.store import ModuleStore
from automesh.jsonio import from_json, to_json
from automesh.mesh.axes import Plan
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Failure,
    OutOfMemory,
    ReplayOutcome,
    TimedOut,
)
from automesh.outcomes import Outcome as AnyOutcome
from automesh.program.nouns import CompileAnswer, Entry
from automesh.report.progress import Silent
from automesh.space.spec import read_space
from automesh.tuner.compile.jobs import CompilingAhead
from automesh.tuner.compile.replay import Player
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import open_session
from automesh.worker.environment import surroundings_for
from automesh.worker.pool import Pool
from benchmarks.support.paths import ROOT

STORE_BYTES = 20 * 2**30
_TIMEOUT_S = 1800.0
_BUDGET_S = 24 * 3600.0
_WORKER_BYTES = 8 * 2**30

Choose = Callable[[Sequence[Plan]], Sequence[Plan]]
Outcome = Compiled | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step on one target.

    Attributes:
      script: below the root of the repository.
      argv: its arguments.
      space: a shipped search space, or TOML text.
      baseline: a plan to look at even if it is not legal; empty: none.
    """

    name: str
    script: str
    argv: tuple[str, ...]
    target: str
    space: str
    baseline: str = ""

    @property
    def entry(self) -> Entry:
        return Entry(kind="script", location=str(ROOT / self.script), argv=self.argv)

    @property
    def slug(self) -> str:
        """As a part of names of files."""
        return f"{self.name}-{self.target}".replace(":", "-").replace("*", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One plan.

    Attributes:
      replay: None where the program does not fit, or could not be compiled or replayed.
      failure: why there is none, in words.
    """

    plan: Plan
    estimated: Estimated
    replay: ReplayOutcome | None = None
    compile_s: float = 0.0
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Bench:
    """A case with its plans estimated, ready to compile and to replay.

    Attributes:
      plans: that were chosen and have an estimate, the most promising first.
      calibrated: estimates by the speeds that were measured; as `estimates` where none were.
      missing: the others, with the reasons.
    """

    case: Case
    folder: Path
    preparation: Preparation
    legal: LegalPlans
    player: Player
    plans: tuple[Plan, ...]
    estimates: Mapping[Plan, Estimated]
    calibrated: Mapping[Plan, Estimated]
    missing: Mapping[Plan, str]
    _known: dict[str, Outcome] = field(init=False, default_factory=dict[str, Outcome])

    def __post_init__(self) -> None:
        self._known = self._read()

    def compile(self, plans: Sequence[Plan], *, workers: int) -> None:
        """Compiles those plans of which nothing is kept; what finishes is kept at once."""
        known = self._known
        todo = [plan for plan in plans if not self._is_done(plan)]
        say(f"{self.case.slug}: {len(plans) - len(todo)} of {len(plans)} plans are compiled")
        if not todo:
            return
        absent = parse_target(self.case.target, os.environ).absent
        assert absent is not None
        compiling = CompilingAhead(
            preparation=self.preparation,
            effort="default",
            store=self.player.store,
            player=None,
        )
        began_s = time.monotonic()
        with Pool(
            size=workers,
            surroundings=surroundings_for(absent_devices_of(absent)),
            log_dir=self.folder / "logs",
            memory_limit_bytes=_WORKER_BYTES,
        ) as pool:
            tickets = {
                pool.submit(compiling.job(plan), _TIMEOUT_S, lambda _: {"go": True}): plan
                for plan in todo
            }
            done = 0
            while done < len(todo):
                for finished in pool.wait():
                    plan, answer = tickets[finished.ticket], finished.result
                    if isinstance(answer, CompileAnswer):
                        outcome = compiling.outcome(plan, answer)
                        assert isinstance(outcome, Compiled | OutOfMemory)
                    elif isinstance(answer, Failed | TimedOut | OutOfMemory):
                        outcome = answer
                    else:
                        raise TypeError(f"a compile was answered with {type(answer).__name__}")
                    known[str(plan)] = outcome
                    self._write()
                    done += 1
                    say(
                        f"{self.case.slug}: {done}/{len(todo)} after "
                        f"{time.monotonic() - began_s:.0f} s: {plan}: {_said(outcome)}"
                    )

    def played(self, plans: Sequence[Plan]) -> list[Played]:
        """Estimates and replays of those plans that were compiled."""
        return [self._played(plan) for plan in plans if str(plan) in self._known]

    def outcome(self, plan: Plan) -> AnyOutcome | None:
        """What became of a plan, its time by its replay; None if it was not compiled."""
        known = self._known.get(str(plan))
        return self.player.replayed(plan, known) if isinstance(known, Compiled) else known

    def _played(self, plan: Plan) -> Played:
        outcome, estimated = self.outcome(plan), self.estimates[plan]
        if not isinstance(outcome, Compiled):
            assert isinstance(outcome, Failed | TimedOut | OutOfMemory)
            return Played(plan=plan, estimated=estimated, failure=_said(outcome))
        return Played(
            plan=plan,
            estimated=estimated,
            replay=outcome.replay,
            compile_s=outcome.compile_s,
        )

    def _is_done(self, plan: Plan) -> bool:
        outcome = self._known.get(str(plan))
        if isinstance(outcome, Compiled):
            return self.player.store.find(outcome.stored) is not None
        return isinstance(outcome, OutOfMemory)

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.case.slug}.json"

    def _header(self) -> dict[str, Any]:
        return {
            "source": self.preparation.inspection.source_hash,
            "argv": list(self.case.argv),
            "space": self.case.space,
            "versions": [list(one) for one in self.preparation.provenance],
        }

    def _read(self) -> dict[str, Outcome]:
        if not self._path.exists():
            return {}
        kept = json.loads(self._path.read_text(encoding="utf-8"))
        if kept["header"] != self._header():
            say(f"{self._path} is of another script or of other versions: asking the store again")
            return {}
        return {plan: from_json(one, Outcome) for plan, one in kept["plans"].items()}

    def _write(self) -> None:
        """Whole or not at all."""
        plans = {plan: to_json(one, Outcome) for plan, one in self._known.items()}
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps({"header": self._header(), "plans": plans}), "utf-8")
        temporary.replace(self._path)


@contextmanager
def bench(
    case: Case, folder: Path, choose: Choose, profiles: Path | None = None
) -> Generator[Bench]:
    """Inspects a step, enumerates its plans and estimates those that are chosen.

    Args:
      profiles: folder with the speeds that were measured on the target; None: estimates are by
        those that the user's own folder has, if any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = parse_target(case.target, os.environ)
    if target.absent is None:
        raise ValueError(f"{case.target} is here; the benchmark is about devices that are not")
    request = SearchRequest(
        subject=case.entry,
        target=case.target,
        space=case.space,
        baseline=case.baseline,
        rules="",
        results=folder,
        budget_s=_BUDGET_S,
        timeout_s=_TIMEOUT_S,
        dry_run=True,
    )
    chosen: list[Plan] = []

    def remember(legal: Sequence[Plan]) -> Sequence[Plan]:
        chosen.extend(choose(legal))
        return chosen

    space = read_space(_space_file(case, folder))
    # The terms of a step are the same for other devices of the platform.
    terms = folder / "terms" / case.name
    with open_session(request, target, space, Silent()) as session:
        say(f"{case.slug}: {len(session.legal.plans)} legal plans")
        with _profiles_in(profiles and folder / "none"):
            estimates = session.estimate(share=1.0, choose=remember, terms_folder=terms)
        calibrated = estimates
        if profiles is not None:
            with _profiles_in(profiles):
                calibrated = session.estimate(
                    share=1.0, choose=lambda _: chosen, terms_folder=terms
                )
    assert estimates.layouts is not None
    fabric, found = target.absent.fabric, estimates.found
    yield Bench(
        case=case,
        folder=folder,
        preparation=session.preparation,
        legal=session.legal,
        player=Player(
            store=ModuleStore(folder / "modules", STORE_BYTES),
            hardware=HardwareModel(
                fabric=fabric,
                layouts=estimates.layouts,
                speeds=datasheet_speeds(fabric.chip, fabric),
            ),
        ),
        plans=tuple(sorted(found, key=lambda plan: found[plan].step_s)),
        estimates=found,
        calibrated=calibrated.found,
        missing={plan: estimates.missing.get(plan, "") for plan in chosen if plan not in found},
    )


@contextmanager
def _profiles_in(folder: Path | None) -> Generator[None]:
    """Lets calibrations be read from a folder; changes nothing for None."""
    if folder is None:
        yield
        return
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def _space_file(case: Case, folder: Path) -> str:
    if "\n" not in case.space:
        return case.space
    path = folder / f"{case.slug}.toml"
    path.write_text(case.space, "utf-8")
    return str(path)


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, Compiled):
        return f"compiled in {outcome.compile_s:.0f} s"
    if isinstance(outcome, OutOfMemory):
        needed, limit = outcome.needed_bytes / 2**30, outcome.limit_bytes / 2**30
        return f"needs {needed:.1f} GiB of {limit:.1f} GiB"
    if isinstance(outcome, TimedOut):
        return f"stopped after {outcome.limit_s:.0f} s"
    return f"failed ({outcome.stage}): {outcome.reason}"


def say(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)
