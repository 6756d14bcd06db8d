"""Which plan is exported, and what the table says of the others: races and fresh processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.hardware import chip_for
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Failed
from automesh.report.result import Candidate
from automesh.tuner.choose.ranking import rank
from automesh.tuner.measure.decision import (
    Decision,
    ProcessRecord,
    RaceRecord,
    Records,
    comparisons_of,
    decide,
    raced_against,
)
from automesh.tuner.measure.final import LOOKS, Final, FinalRules
from automesh.tuner.measure.fresh_processes import figures_of
from automesh.tuner.worker_errors import refuse_to_blame
from tests.tuner.choose.test_ranking import measured

AXES = ("dp", "fsdp", "tp")


def plan(mesh: str) -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES))


BASE, A, B, C = plan("dp:4"), plan("tp:4"), plan("dp:2,tp:2"), plan("fsdp:4")
CRASH = Failed(stage="run", reason="it crashed")


def rows(count: int, seconds: Mapping[Plan, float], noise: float = 0.0, seed: int = 0):
    luck = random.Random(seed)
    return tuple(
        ProcessRecord(
            machine="here",
            seconds=tuple(
                (one, step_s * math.exp(luck.gauss(0, noise))) for one, step_s in seconds.items()
            ),
            took_s=10.0,
        )
        for _ in range(count)
    )


def race(values: Mapping[Plan, Sequence[float]], *, beaten: Sequence[Plan] = ()) -> RaceRecord:
    rounds = tuple((one, tuple(found)) for one, found in values.items())
    return RaceRecord(machine="here", rounds=rounds, beaten=tuple(beaten), left=(), sentence="")


def final_of(
    records: Records, *, baseline: Sequence[Plan] = (BASE,), incumbent: Sequence[Plan] = ()
) -> Final:
    return records.final(rules=FinalRules(), baseline=baseline, incumbent=incumbent)


def exported(records: Records, **given: Sequence[Plan]) -> Plan:
    (found,) = final_of(records, **given).exported()
    return found


def decided(records: Records, **given: Sequence[Plan]) -> Decision:
    final = final_of(records, **given)
    confirmed = {
        one: measured(figure.step_s, rounds_s=figure.rounds_s, confirmed=True)
        for one, figure in figures_of(final).items()
    }
    return decide(records, final, final.exported()[0], confirmed, process_s=10.0, sentence="")


def table(decision: Decision, raced: Mapping[Plan, float]) -> tuple[Candidate, ...]:
    """The table of a decision, where the race's own seconds are `raced`."""
    known = {one: measured(step_s) for one, step_s in raced.items()}
    return rank(
        compiled={},
        measured={**known, **dict(decision.confirmed)},
        comparisons=decision.comparisons,
        baseline=(BASE,),
        chip=chip_for("cpu", "cpu"),
        winner=(decision.winner,),
    )


def test_fresh_processes_decide_whatever_a_race_has_said() -> None:
    """A race is one process, whose luck may be that of a plan."""
    against = race({A: [1.2] * 12, BASE: [1.0] * 12}, beaten=[A])
    found = decided(Records(races=(against,), processes=rows(5, {A: 1.0, BASE: 1.26}, 0.02)))
    assert found.winner == A
    assert found.verification.baseline == str(BASE)
    assert found.verification.processes == 5
    assert not found.verification.is_tie
    assert found.verification.speedup_interval[0] > 1.0


def test_the_five_processes_that_were_called_a_tie_decide() -> None:
    """0.795 (0.636 to 0.893) of the baseline was a tie, and the baseline was exported."""
    ratios = [0.795, 0.70, 0.85, 0.74, 0.82]
    records = Records(
        processes=tuple(
            ProcessRecord(machine="here", seconds=((A, one), (BASE, 1.0)), took_s=9.0)
            for one in ratios
        )
    )
    found = decided(records)
    assert found.winner == A
    assert found.verification.speedup_interval[0] > 1.0


def test_a_tie_is_not_final() -> None:
    """Winner 30 ms, baseline 35 ms, ratios 1.20 to 0.98: it stays open, and says for how long."""
    ratios = [1.20, 1.19, 1.09, 1.17, 0.98]
    records = Records(
        processes=tuple(
            ProcessRecord(machine="here", seconds=((A, 0.03), (BASE, 0.03 * one)), took_s=9.0)
            for one in ratios
        )
    )
    found = decided(records)
    assert found.winner == BASE
    ((plan, waiting),) = found.undecided
    assert plan == A and waiting.more_s > 0
    assert final_of(records).entrants([]) == (BASE, A)
    more = replace_rows(records, rows(9, {A: 0.03, BASE: 0.0342}, 0.02))
    assert exported(more) == A


def replace_rows(records: Records, more: Sequence[ProcessRecord]) -> Records:
    return Records(races=records.races, processes=(*records.processes, *more))


def test_a_plan_that_is_as_fast_leaves_the_baseline() -> None:
    found = decided(Records(processes=rows(10, {A: 1.0, BASE: 1.0}, 0.004)))
    assert found.winner == BASE
    ((_, one),) = found.comparisons
    assert one.verdict == "equal" and one.more_s == 0.0
    (most,) = found.verification.most_faster
    assert 0.0 <= most < 0.02


def test_a_plan_that_cannot_be_faster_is_not_measured_for_ever() -> None:
    final = final_of(Records(processes=rows(10, {A: 1.06, BASE: 1.0}, 0.045, seed=3)))
    effect = final.compare(A, BASE)
    assert effect.verdict == "no faster"
    assert effect.interval[0] < 1.0 < effect.interval[1]
    assert final.entrants([]) == ()


def test_of_two_faster_plans_the_one_that_was_exported_stays() -> None:
    records = Records(processes=rows(7, {A: 1.0, B: 0.99, BASE: 1.3}, 0.03))
    assert exported(records, incumbent=[A]) == A
    assert exported(records, incumbent=[B]) == B
    clear = Records(processes=rows(7, {A: 1.0, B: 0.8, BASE: 1.3}, 0.03))
    assert exported(clear, incumbent=[A]) == B


def test_without_a_baseline_the_fastest_is_exported() -> None:
    records = Records(processes=rows(5, {A: 1.0, B: 1.1}, 0.01))
    assert exported(records, baseline=[]) == A
    assert decided(records, baseline=[]).verification.baseline == ""


def test_two_processes_export_nothing() -> None:
    final = final_of(Records(processes=rows(2, {A: 1.0, BASE: 2.0})))
    assert final.exported() == ()
    assert final.entrants([A]) == (BASE, A)


def test_what_failed_is_neither_exported_nor_run_again() -> None:
    records = Records(processes=rows(5, {A: 1.0, B: 1.05, BASE: 1.3}, 0.01), failed=((A, CRASH),))
    assert exported(records) == B
    assert A not in final_of(records).entrants([A, C])
    assert decided(records).failed == ((A, CRASH),)
    gone = Records(processes=records.processes, failed=((BASE, CRASH),))
    assert exported(gone) == A
    assert decided(gone).verification.baseline == ""


def test_rows_of_another_machine_do_not_count() -> None:
    records = Records(processes=rows(5, {A: 1.0, BASE: 1.3}))
    assert final_of(records.of_machine("there")).exported() == ()
    assert exported(records.of_machine("here")) == A


def test_a_process_has_room_for_three() -> None:
    final = final_of(Records(processes=()))
    assert final.entrants([BASE, A, B, C]) == (BASE, A, B)
    adopted = final_of(Records(processes=rows(5, {A: 1.0, BASE: 1.5}, 0.01)))
    assert adopted.entrants([B, C]) == (BASE, A, B)
    # Whoever has begun goes on before somebody else begins.
    begun = rows(5, {B: 1.0, BASE: 1.0, C: 1.0}, 0.08, seed=1)
    assert set(final_of(Records(processes=begun)).entrants([A])) == {BASE, B, C}


def test_nothing_is_decided_between_two_looks() -> None:
    """A verdict after each process would be a chance to err after each."""
    for count in range(3, 40):
        final = final_of(Records(processes=rows(count, {A: 1.0, BASE: 1.2}, 0.02)))
        look = max((one for one in LOOKS if one <= count), default=0)
        assert final.compare(A, BASE, at_look=True).processes == look
        assert final.compare(A, BASE).processes == count


def test_every_row_is_against_the_exported_plan() -> None:
    """A race of 42 ms beside fresh processes of 53 ms: rows that were slower looked faster."""
    records = Records(
        races=(
            race({BASE: [42e-3] * 9, A: [41e-3] * 9, C: [44e-3] * 9, B: [60e-3] * 4}, beaten=[B]),
        ),
        processes=rows(10, {BASE: 53e-3, A: 53.2e-3}, 0.004),
    )
    found = decided(records)
    assert found.winner == BASE
    shown = table(found, {BASE: 42e-3, A: 41e-3, C: 44e-3, B: 60e-3})
    assert [one.plan for one in shown] == [BASE, A, C, B]
    assert [one.standing.verdict for one in shown] == ["kept", "equal", "slower", "slower"]
    times = [one.standing.step_s or 53e-3 for one in shown]
    assert times == sorted(times)
    assert shown[2].standing.ratio == pytest.approx(44 / 42)


def test_a_race_without_the_exported_plan_is_joined_by_the_baseline() -> None:
    first = race({BASE: [1.0] * 9, C: [1.01, 1.03] * 4 + [1.02]})
    records = Records(races=(first,), processes=rows(7, {BASE: 1.0, A: 0.8}, 0.01))
    ((plan, one),) = raced_against(records.races, final_of(records), A, out=[BASE])
    assert plan == C
    assert one.ratio == pytest.approx(1.02 / 0.8, rel=0.02)
    assert one.verdict == "slower"
    # As wide as both together.
    own = raced_against(records.races, final_of(records), BASE)[0][1]
    assert math.log(one.interval[1] / one.interval[0]) > math.log(own.interval[1] / own.interval[0])


def test_what_a_race_finds_faster_is_undecided_until_fresh_processes_say_so() -> None:
    records = Records(
        races=(race({BASE: [1.0] * 9, C: [0.9] * 9}),), processes=rows(5, {BASE: 1.0}, 0.01)
    )
    ((_, one),) = comparisons_of(records, final_of(records), BASE, process_s=10.0)
    assert (one.verdict, one.more_s) == ("undecided", 50.0)
    assert decided(records).verification.most_faster == (pytest.approx(1 / 0.9 - 1),)


def test_a_plan_that_a_race_has_beaten_is_no_faster_unless_one_of_the_race_has_failed() -> None:
    """Whoever beat it may be who failed since."""
    first = race({BASE: [1.0] * 9, A: [0.5] * 9, C: [0.95, 1.06] * 4 + [1.0]}, beaten=[C])

    def verdict(*failed: tuple[Plan, Failed]) -> str:
        records = Records(races=(first,), processes=rows(5, {BASE: 1.0}, 0.01), failed=failed)
        return dict(raced_against(records.races, final_of(records), BASE, out=[A]))[C].verdict

    assert verdict() == "no faster"
    assert verdict((A, CRASH)) == "undecided"


def test_one_round_bounds_nothing() -> None:
    records = Records(races=(race({BASE: [1.0], C: [1.1]}),), processes=rows(5, {BASE: 1.0}, 0.01))
    found = decided(records)
    assert found.comparisons[0][1].verdict == "undecided"
    assert found.verification.most_faster == ()


@given(
    true_s=st.lists(st.sampled_from([1.0, 1.01, 1.03, 1.1, 1.5]), min_size=4, max_size=4),
    noise=st.sampled_from([0.0, 0.005, 0.03, 0.1]),
    count=st.integers(3, 30),
    seed=st.integers(0, 1000),
    own=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_no_row_contradicts_the_verdict(
    true_s: list[float], noise: float, count: int, seed: int, own: bool
) -> None:
    plans = dict(zip((BASE, A, B, C), true_s, strict=True))
    luck = random.Random(seed)
    raced = race(
        {one: [s * math.exp(luck.gauss(0, noise)) for _ in range(9)] for one, s in plans.items()}
    )
    ran = {one: s for one, s in plans.items() if one != C}
    records = Records(races=(raced,), processes=rows(count, ran, noise, seed))
    found = decided(records, baseline=[BASE] if own else [])
    for _, one in found.comparisons:
        low, high = one.interval
        assert low <= one.ratio <= high
        if one.verdict == "equal":
            assert low <= 1.0 <= high
        elif one.verdict == "slower":
            assert low > 1.0
        elif one.verdict == "faster":
            # Only another plan that beats the baseline, while the exported one does, too.
            assert found.winner != BASE
        elif one.processes:
            assert low <= 1.0 <= high
    if own:
        is_faster = found.verification.speedup_interval[0] > 1.0
        assert is_faster == (found.winner != BASE)


def simulate(
    true_s: Mapping[Plan, float],
    noise: Callable[[], float],
    *,
    most: int = 40,
    start: Records | None = None,
) -> Records:
    """Runs processes until nothing is left to decide."""
    records = start or Records()
    while entrants := final_of(records).entrants(list(true_s)):
        if final_of(records).count(*entrants) >= most:
            break
        row = tuple((one, true_s[one] * math.exp(noise())) for one in entrants)
        one = ProcessRecord(machine="here", seconds=row, took_s=1.0)
        records = replace_rows(records, [one])
    return records


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("share", [0.03, 0.05])
def test_equal_plans_rarely_replace_the_baseline(share: float) -> None:
    """Three processes let an equal plan replace the baseline in 12 to 14 % of cases."""
    luck = random.Random(7)
    wrong = 0
    for _ in range(200):
        records = simulate({BASE: 1.0, A: 1.0, B: 1.0}, lambda: luck.gauss(0, share))
        wrong += exported(records) != BASE
    assert wrong <= 0.05 * 200


def test_a_plan_that_is_three_per_cent_faster_is_resolved_or_called_equal() -> None:
    luck = random.Random(8)
    settled = 0
    for _ in range(60):
        records = simulate({BASE: 1.0, A: 0.97}, lambda: luck.gauss(0, 0.015), most=28)
        effect = final_of(records).compare(A, BASE)
        settled += effect.verdict in ("faster", "equal")
        assert effect.verdict != "slower"
    assert settled >= 57


def test_going_on_repeats_nothing_and_decides() -> None:
    luck = random.Random(9)
    true_s = {BASE: 1.0, A: 0.93}
    first = simulate(true_s, lambda: luck.gauss(0, 0.06), most=5)
    assert final_of(first).compare(A, BASE).verdict == "undecided"
    again = simulate(true_s, lambda: luck.gauss(0, 0.06), start=first)
    assert again.processes[:5] == first.processes
    assert exported(again) == A


def test_a_worker_that_cannot_start_is_no_plans_fault() -> None:
    refuse_to_blame(Failed(stage="build", reason="no"))
    with pytest.raises(UsageError, match="the disk is full"):
        refuse_to_blame(Failed(stage="start", reason="the disk is full"))
