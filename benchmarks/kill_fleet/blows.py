"""Who is struck, how and when; what became of it, and what of that is a fault."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from automesh.launch.wire import LOST_S
from automesh.worker.place import PLACE

Victim = Literal["rank", "agent", "search", "node", "step"]
Sign = Literal["KILL", "STOP"]
Stage = Literal["compile", "measure"]
Launch = Literal["local", "ray", "slurm"]
STAGES: tuple[Stage, ...] = ("compile", "measure")
LIMIT_S = 20.0
"""Nobody is waited for longer than this beyond what docs/clusters.md states."""
STOPPED_S = 8.0  # docs/clusters.md: a process is stopped by a signal for 8 s.
RAY_S = 30.0  # Ray's own time, to see that a node is gone and to place its bundle on another one.
_FATES: dict[Launch, tuple[tuple[Victim, Sign], ...]] = {
    "local": (
        *(("rank", "KILL"), ("rank", "STOP")),
        *(("agent", "KILL"), ("agent", "STOP")),
        *(("search", "KILL"), ("search", "STOP")),
    ),
    "ray": (("node", "KILL"), ("agent", "STOP")),
    "slurm": (("step", "KILL"), ("step", "STOP")),
}
_STAND = re.compile(r"(?:^|, )(?:\.\.\. )?([a-z]+) (\d+)/(\d+)(?=, |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One way to be killed.

    Attributes:
      launch: what starts the agents.
      victim: a process of a gang, an agent, the search, a node of Ray, a job step of SLURM.
      sign: the signal; who gets SIGSTOP is there, and silent.
      stage: what the search is at.
    """

    launch: Launch
    victim: Victim
    sign: Sign
    stage: Stage

    @property
    def name(self) -> str:
        """As `local agent STOP measure`."""
        return f"{self.launch} {self.victim} {self.sign} {self.stage}"

    @property
    def stated_s(self) -> float:
        """How long it may last until the loss counts, as docs/clusters.md has it."""
        if self.victim == "node":
            return RAY_S
        if self.sign == "KILL":
            return 0.0
        return STOPPED_S if self.victim == "rank" else LOST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one blow.

    Attributes:
      blow: its name.
      stated_s: see `Blow.stated_s`.
      waited_s: until who was struck was gone and another one was started in its place; of the
        search, until all that it had started elsewhere was gone.
      went_on_s: until the search had done something more, whatever the machine is busy with; 0 if
        it was the search that was struck, -1 if it did not.
      orphans: whom the victim had started, and who was there when the time was up.
      doing: the last thing that the search had said before.
    """

    blow: str
    stated_s: float
    waited_s: float
    went_on_s: float
    orphans: int
    doing: str

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be, in words."""
        found: list[str] = []
        if self.waited_s > self.stated_s + LIMIT_S:
            found.append(
                f"{self.blow}: {self.waited_s:.1f} s, and {self.stated_s + LIMIT_S:.0f} are allowed"
            )
        if self.went_on_s < 0:
            found.append(f"{self.blow}: the search did nothing more")
        if self.orphans:
            found.append(f"{self.blow}: {self.orphans} processes were left")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One study from its first start to its end: a line of the raw file.

    Attributes:
      kills: the blows that fell, in their order.
      starts: of the same command.
      finished: trials, in all rungs.
      failed: plans whose trial says that they failed: one that is struck twice may.
      lost, repeated, torn: see `benchmarks.kill_resume.Report`.
      orphans: processes that were left after the end of a search.
      has_rule: whether the file has a measured rule at the end.
      faults: all of it in words.
    """

    launch: Launch
    kills: tuple[Kill, ...]
    starts: int
    finished: int
    failed: int
    lost: int
    repeated: int
    torn: int
    orphans: int
    has_rule: bool
    seconds: float
    faults: tuple[str, ...]


def row_of(data: Mapping[str, Any]) -> StudyRow:
    """A line of the raw file; `dataclasses.asdict` writes it."""
    kills = tuple(Kill(**one) for one in data["kills"])
    return StudyRow(**{**data, "kills": kills, "faults": tuple(data["faults"])})


def blows(kills: int, launches: Iterable[Launch], *, seed: int) -> list[Blow]:
    """So many blows, each kind as often as the others, in an order that the seed decides."""
    kinds = [
        Blow(launch=launch, victim=victim, sign=sign, stage=stage)
        for launch in launches
        for victim, sign in _FATES[launch]
        for stage in STAGES
    ]
    luck, found = random.Random(seed), list[Blow]()
    while len(found) < kills:
        found += luck.sample(kinds, len(kinds))
    return found[:kills]


def without(wanted: Sequence[Blow], done: Iterable[StudyRow]) -> list[Blow]:
    """What is left to do of what an earlier run has begun."""
    fallen = Counter(kill.blow for row in done for kill in row.kills)
    left: list[Blow] = []
    for blow in wanted:
        if fallen[blow.name] > 0:
            fallen[blow.name] -= 1
        else:
            left.append(blow)
    return left


def next_study(left: Sequence[Blow], most: int) -> list[Blow]:
    """The blows of one study: of one launcher, half of them while it compiles, then the others.

    A search compiles before it measures, so that those at compiles come first.
    """
    of_one = [blow for blow in left if blow.launch == left[0].launch]
    queues = {stage: deque(blow for blow in of_one if blow.stage == stage) for stage in STAGES}
    chosen: dict[Stage, list[Blow]] = {stage: [] for stage in STAGES}
    while any(queues.values()) and sum(map(len, chosen.values())) < most:
        for stage in STAGES:
            if queues[stage] and sum(map(len, chosen.values())) < most:
                chosen[stage].append(queues[stage].popleft())
    return [blow for stage in STAGES for blow in chosen[stage]]


def stand_of(line: str) -> tuple[str, int, int] | None:
    """The phase that a line of a search tells of, how much of it is done, and of how much.

    >>> stand_of("... dp:8, compiling, rank 0 of 2, compile 1/6, about 3 s left, 12 s elapsed")
    ('compile', 1, 6)
    """
    found = _STAND.findall(line)
    return (found[-1][0], int(found[-1][1]), int(found[-1][2])) if found else None


def kind_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """`rank`, `agent`, `guardian` (or its deputy) or `other`: what a process is."""
    if any(part.endswith("guardian.py") for part in command):
        return "guardian"
    if "automesh.worker.child" in command:
        return "rank" if PLACE in environ else "other"
    words = list(command)
    is_agent = any(words[at : at + 3] == ["-m", "automesh", "agent"] for at in range(len(words)))
    return "agent" if is_agent else "other"


def summary(rows: Sequence[StudyRow], *, missing: Mapping[str, str]) -> dict[str, Any]:
    """The figures of all studies, as they are printed.

    Args:
      missing: blows that cannot fall here, with the reason.
    """
    kills = [kill for row in rows for kill in row.kills]
    faults = [fault for row in rows for fault in row.faults]
    each = {
        name: {
            "kills": len(own),
            "longest_wait_s": round(max(kill.waited_s for kill in own), 1),
            "allowed_s": own[0].stated_s + LIMIT_S,
            "longest_until_it_went_on_s": round(max(kill.went_on_s for kill in own), 1),
        }
        for name in sorted({kill.blow for kill in kills})
        if (own := [kill for kill in kills if kill.blow == name])
    }
    return {
        "kills": len(kills),
        "studies": len(rows),
        "starts": sum(row.starts for row in rows),
        "finished_trials": sum(row.finished for row in rows),
        "failed_plans": sum(row.failed for row in rows),
        "lost": sum(row.lost for row in rows),
        "repeated": sum(row.repeated for row in rows),
        "torn_files": sum(row.torn for row in rows),
        "orphans": sum(row.orphans for row in rows) + sum(kill.orphans for kill in kills),
        "without_rule": sum(not row.has_rule for row in rows),
        "longest_beyond_stated_s": round(
            max((kill.waited_s - kill.stated_s for kill in kills), default=0.0), 1
        ),
        "by_blow": each,
        "not_here": dict(missing),
        "faults": len(faults),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }


def line_of(row: StudyRow) -> dict[str, Any]:
    """As `row_of` reads it."""
    return asdict(row)
