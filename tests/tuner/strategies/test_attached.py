"""A search on devices that are here: what is compiled when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from automesh.hardware import Target
from automesh.hardware.chips import chip_called
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled, Failed, Outcome
from automesh.program.nouns import Device, VisitAnswer
from automesh.tuner import run
from automesh.tuner.compile.memory_limit import NO_LIMIT
from automesh.tuner.measure.rung import Challenge
from automesh.tuner.measure.schedule import Calibration
from automesh.tuner.measure.seen_once import StoredVisits
from automesh.tuner.strategies import attached
from automesh.tuner.strategies.attached import AttachedStrategy, player_for
from automesh.worker.messages import Surroundings
from automesh.worker.process import Process
from tests.support.samples.results_samples import compiled

FIRST, LATER = Plan(axes=parse_mesh("dp:8")), Plan(axes=parse_mesh("tp:8"))
BUDGET_S = 600.0


class Compiles:
    """Compile rungs that are done at once; of each, what it is for and whether it is waited for."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[Plan], bool]] = []
        self.until_s: list[float] = []

    def __call__(
        self,
        *,
        choose: Callable[[Any], Sequence[Plan]],
        deadline_s: float,
        is_first: bool = True,
        **_: Any,
    ) -> Any:
        wanted = list(choose({}))
        self.begun.append((wanted, is_first))
        self.until_s.append(deadline_s)
        return SimpleNamespace(run=lambda: dict.fromkeys(wanted, compiled(0.1)))


class Measures:
    """A measure rung that only asks for plans that may still win."""

    def __init__(self, challenge: Challenge) -> None:
        self._challenge = challenge

    @classmethod
    def of(cls, *_: Any, challenge: Challenge, **__: Any) -> Measures:
        return cls(challenge)

    def run(self) -> str:
        self._challenge({}, BUDGET_S)
        return ""


def climbed(
    monkeypatch: pytest.MonkeyPatch,
    *,
    now_s: float = 0.0,
    clock: Callable[[], float] | None = None,
    rung: Compiles | None = None,
    chosen: Callable[..., Sequence[Plan]] = lambda *_, **__: (FIRST,),
    racing: Callable[..., Sequence[Plan]] = lambda *_: (FIRST,),
    likely: Sequence[Plan] = (LATER,),
    visits: StoredVisits | None = None,
    is_decided: bool = False,
) -> Compiles:
    """The compiles of a search of which the time `now_s` has passed before them.

    `visits` are those of earlier searches, which have compiled their plans.
    """
    begun = rung or Compiles()
    state: Any = SimpleNamespace(top=1, first=(), view=lambda: None)
    state.knowing = lambda *_: state
    for name, stand_in in {
        "CompileRung": begun,
        "MeasureRung": Measures,
        "state_of": lambda *_, **__: state,
        "player_for": lambda _: None,
        "outcomes_of": lambda *_: {},
        "to_compile": chosen,
        "finalists": racing,
        "challengers": lambda *_: likely,
        "raceable": lambda *_: (),
    }.items():
        monkeypatch.setattr(attached, name, stand_in)
    search: Any = SimpleNamespace(
        preparation=SimpleNamespace(device_memory=NO_LIMIT),
        legal=SimpleNamespace(baseline=(FIRST,)),
        cache_dir=None,
        estimates=SimpleNamespace(found={}),
        request=SimpleNamespace(top=1, budget_s=BUDGET_S, timeout_s=300.0),
        study=SimpleNamespace(
            compile=None, measure=None, owner=SimpleNamespace(machine="this machine")
        ),
        notebook=SimpleNamespace(
            read=lambda *_: visits, decision=lambda: object() if is_decided else None
        ),
        progress=None,
        workers=1,
        started_s=0.0,
        end_s=BUDGET_S,
        clock=clock or (lambda: now_s),
        outcomes=lambda _: (
            {one.plan: compiled(0.1) for one in visits.calibrations} if visits else {}
        ),
        open_pool=lambda *_: nullcontext(),
    )
    AttachedStrategy(search=search, surroundings=Surroundings(platforms="cpu")).climb()
    return begun


def test_what_may_still_win_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compile of a run must come to its end, or no run ever had a program; another one
    that takes long would only take the time in which the best are measured."""
    begun = climbed(monkeypatch)
    assert begun.begun == [([FIRST], True), ([FIRST, LATER], False)]


@pytest.mark.parametrize(
    ("now_s", "until_s"),
    [(0.0, 240.0), (120.0, 312.0), (540.0, 560.0), (580.0, 585.0), (650.0, 650.0)],
)
def test_compiles_have_their_share_of_what_estimates_left(
    monkeypatch: pytest.MonkeyPatch, now_s: float, until_s: float
) -> None:
    """A step that is slow to build had its first compile after the end of their time, and no
    second one, while half of the budget was left."""
    begun = climbed(monkeypatch, now_s=now_s, likely=())
    assert begun.until_s == [pytest.approx(until_s)]


MANY = [Plan(axes=parse_mesh(f"dp:{2**power}")) for power in range(12)]


def visits_of(*plans: Plan, machine: str = "this machine") -> StoredVisits:
    """First visits, each of 6 s in a process that takes 20 s to start."""
    calibrations = tuple(
        Calibration(
            plan=plan,
            steps=1,
            samples=1,
            visit_s=6.0,
            first=VisitAnswer(
                samples_s=(0.1,),
                losses=(1.0,),
                loss_dtype="float32",
                values="user",
                setup_s=5.0,
                peak_bytes=0,
                fingerprint="",
                start_s=20.0,
            ),
        )
        for plan in plans
    )
    return StoredVisits(machine=machine, calibrations=calibrations, references=())


@pytest.mark.parametrize(
    ("visits", "is_decided", "now_s", "until_s"),
    [
        (visits_of(FIRST, LATER), False, 510.0, None),
        (visits_of(FIRST, LATER), False, 0.0, 240.0),
        (visits_of(FIRST, LATER), True, 510.0, 546.0),
        (visits_of(FIRST), False, 510.0, 546.0),
        (visits_of(LATER, Plan(axes=parse_mesh("sp:8"))), False, 510.0, 546.0),
        (visits_of(FIRST, LATER, machine="another one"), False, 510.0, 546.0),
    ],
)
def test_what_waits_for_a_rule_comes_before_further_compiles(
    visits: StoredVisits,
    is_decided: bool,
    now_s: float,
    until_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of 90 s ended without a rule; repeated, it compiled further plans first, and ended
    without a rule again."""
    begun = climbed(
        monkeypatch,
        now_s=now_s,
        chosen=lambda *_, **__: (FIRST, LATER, *MANY),
        visits=visits,
        is_decided=is_decided,
        likely=(),
    )
    assert begun.until_s == ([] if until_s is None else [pytest.approx(until_s)])


@pytest.mark.parametrize(("works", "count"), [(0, 3), (4, 5), (8, 9), (11, 12), (12, 12)])
def test_where_nothing_compiled_can_be_measured_the_next_are_compiled(
    monkeypatch: pytest.MonkeyPatch, works: int, count: int
) -> None:
    """The first failed, and the search ended there, with the rest of its budget unspent. Once there
    is one that can be measured, the time is for measuring it.

    A compile takes 40 s of 600; only that of the plan `works` does not fail.
    """
    clock = SimpleNamespace(now_s=100.0)
    done: dict[Plan, Outcome] = {}

    class Slow(Compiles):
        def __call__(self, *, choose: Any, deadline_s: float, **_: Any) -> Any:
            def run() -> dict[Plan, Outcome]:
                while clock.now_s <= deadline_s:
                    left = [plan for plan in choose(done) if plan not in done]
                    if not left:
                        break
                    clock.now_s += 40.0
                    is_good = left[0] in MANY[works : works + 1]
                    failed = Failed(stage="compile", reason="no")
                    done[left[0]] = compiled(0.1) if is_good else failed
                return {plan: done[plan] for plan in choose(done) if plan in done}

            return SimpleNamespace(run=run)

    climbed(
        monkeypatch,
        clock=lambda: clock.now_s,
        rung=Slow(),
        chosen=lambda *_, wanted: tuple(MANY[:wanted]),
        racing=lambda *_: tuple(plan for plan in done if isinstance(done[plan], Compiled)),
        likely=(),
    )
    assert list(done) == MANY[:count]
    assert clock.now_s <= BUDGET_S


# Whose programs are played.


def search_on(
    kind: Literal["torus", "switch", "shared"], *, lender: object = None, start: object = Process
) -> Any:
    fabric = Fabric(kind=kind, chip=chip_called("h100"), num_granules=1, granule_devices=1)
    return SimpleNamespace(
        estimates=SimpleNamespace(fabric=fabric, layouts=Layouts(shapes=(), spans=())),
        preparation=SimpleNamespace(aim=SimpleNamespace(platform="gpu", device_kind="H100")),
        lender=lender,
        start_worker=start,
    )


def test_programs_for_accelerators_of_this_host_are_played() -> None:
    player = player_for(search_on("switch"))
    assert player is not None
    assert player.hardware.fabric.kind == "switch"


def test_those_of_virtual_devices_and_of_other_hosts_are_not() -> None:
    assert player_for(search_on("shared")) is None
    assert player_for(search_on("switch", lender=object())) is None
    assert player_for(search_on("switch", start=object())) is None
    nowhere = search_on("switch")
    nowhere.estimates.fabric = None
    assert player_for(nowhere) is None


@pytest.mark.parametrize(
    ("platform", "kind", "said"),
    [("cpu", "cpu", ""), ("gpu", "NVIDIA H200", "data sheet of H200-SXM-141GB")],
)
def test_replays_at_other_speeds_are_told_apart(
    platform: str, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_PROFILES", str(tmp_path))
    one = Device(id=0, platform=platform, kind=kind, process_index=0, slice_index=0, coords=())
    preparation: Any = SimpleNamespace(
        inspection=SimpleNamespace(devices=(one,)),
        aim=SimpleNamespace(platform=platform, device_kind=kind),
    )
    target = Target(name="local", selector="", platforms=platform)
    assert run._replay_speeds(target, preparation) == said
