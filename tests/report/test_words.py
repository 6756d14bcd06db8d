"""A result in words: one test per sentence that a user may read."""

from dataclasses import replace

import pytest

from automesh.outcomes import Failed, Measured, OutOfMemory, RuledOut, TimedOut
from automesh.report import words
from automesh.report.comparison import Comparison
from automesh.report.result import Candidate, SearchResult
from tests.support.samples import results_samples
from tests.support.samples.changed_results import changed
from tests.support.samples.results_samples import GIB, compiled, measured, plan

RESULT = results_samples.measured_search()


def standing(outcome: object, verdict: str, ratio: float = 1.0) -> Candidate:
    return Candidate(
        plan=plan("dp:8"), outcome=outcome, standing=Comparison(verdict=verdict, ratio=ratio)
    )


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            OutOfMemory(stage="run", needed_bytes=3 * GIB, limit_bytes=2 * GIB, detail="x"),
            "out of memory: needs 3.00 GiB of 2.00 GiB (while running)",
        ),
        (
            OutOfMemory(stage="compile", needed_bytes=3 * GIB, limit_bytes=0, detail="x"),
            "out of memory: needs 3.00 GiB (while compiling)",
        ),
        (
            OutOfMemory(stage="", needed_bytes=0, limit_bytes=GIB, detail="RESOURCE_EXHAUSTED"),
            "out of memory: RESOURCE_EXHAUSTED",
        ),
        (
            OutOfMemory(stage="", needed_bytes=0, limit_bytes=0, detail=""),
            "out of memory: the amount is not known",
        ),
        (Failed(stage="build", reason="ValueError: no"), "failed in build: ValueError: no"),
        (Failed(stage="start", reason=""), "failed in start: no reason was given"),
        (TimedOut(stage="compile", limit_s=60.0), "timed out after 60 s while compiling"),
        (TimedOut(stage="odd", limit_s=600.0), "timed out after 10 min while in odd"),
        (RuledOut(rule="tp divides heads", detail="8"), "ruled out by tp divides heads: 8"),
        (RuledOut(rule="tp at most 4", detail=""), "ruled out by tp at most 4"),
        (
            measured(1.0, numerics="differ", numerics_detail="step 2"),
            "numerics differ: step 2",
        ),
        (measured(1.0, numerics="unverified"), "numerics unverified"),
        (
            measured(1.0, numerics="other_arguments", numerics_detail="not seeded"),
            "not seeded",
        ),
    ],
)
def test_every_way_to_fall_out_has_its_words(outcome: object, expected: str) -> None:
    fallen = standing(outcome, "failed")
    assert words.reason(fallen) == expected
    assert not words.is_ranked(fallen)
    assert words.versus_exported(fallen) == ""


def test_a_plan_in_the_ranking_has_no_reason() -> None:
    assert words.reason(standing(measured(1.0), "slower", 1.2)) == ""
    assert words.reason(standing(compiled(1.0), "not_measured")) == ""


@pytest.mark.parametrize(
    ("verdict", "ratio", "expected"),
    [
        ("best", 1.0, "best"),
        ("kept", 1.0, "kept"),
        ("new", 1.0, "new"),
        ("equal", 1.004, "equal"),
        ("no faster", 1.02, "no faster"),
        ("undecided", 0.97, "undecided"),
        ("faster", 0.97, "-3.0 %"),
        ("slower", 1.0632, "+6.3 %"),
        ("slower", 1.312, "+31 %"),
        ("slower", 2.0, "2.00x"),
        ("not_measured", 0.95, "-5.0 %"),
        ("not_measured", 1.0, "+0.0 %"),
    ],
)
def test_versus_exported(verdict: str, ratio: float, expected: str) -> None:
    assert words.versus_exported(standing(measured(1.0), verdict, ratio)) == expected


def test_the_interval_is_the_larger_half() -> None:
    lopsided = replace(measured(1.0), interval_s=(0.99, 1.03))
    assert words.half_of(lopsided) == "±3.0 %"
    assert words.half_interval(standing(lopsided, "slower", 1.2)) == "±3.0 %"


def test_what_is_compared_shows_seconds_and_interval_of_the_ratio() -> None:
    """Its own seconds come from another race: beside the exported plan's they would mislead."""
    row = standing(measured(42e-3), "slower", 1.1)
    row = replace(row, standing=replace(row.standing, interval=(1.045, 1.155), step_s=0.0583))
    assert words.step_s(row) == 0.0583
    assert words.half_interval(row) == "±5.0 %"


def test_one_round_claims_no_interval() -> None:
    assert words.half_of(measured(1.0, half=0.0)) == ""
    assert words.half_of(compiled(1.0)) == ""


def test_the_parts_of_the_funnel_add_up() -> None:
    assert words.funnel_sentence(RESULT.funnel) == (
        "315 plans: 113 compiled (6 measured, 20 duplicates), 195 ruled out, 1 out of memory, "
        "1 failed, 1 timed out, 4 not reached"
    )
    assert 113 + 195 + 1 + 1 + 1 + 4 == 315
    died = replace(RESULT.funnel, measured=0, failed_in_run=6)
    assert (
        "113 compiled (6 failed when run, 20 duplicates), 195 ruled out"
        in words.funnel_sentence(died)
    )
    refused = replace(RESULT.funnel, refused=3)
    assert words.funnel_sentence(refused).endswith("3 refused by the step, 1 not reached")


def test_rules_are_counted_and_the_rest_is_summed() -> None:
    assert words.ruled_out_sentence(RESULT.funnel, most=2) == (
        "axis ep is never used (120), dp*fsdp divides batch (60), 3 other rules (15)"
    )
    assert words.ruled_out_sentence(replace(RESULT.funnel, ruled_out=())) == ""


def test_numerics() -> None:
    assert words.numerics_sentence(RESULT) == (
        "losses and first updates compared with those of the script's dp:8: 1 differs, 1 unverified"
    )
    command = changed(RESULT, template="python train.py --dp {dp}")
    assert words.numerics_sentence(command).startswith("losses compared with those of")
    agreeing = replace(RESULT, candidates=RESULT.candidates[:4])
    assert words.numerics_sentence(agreeing).endswith("the script's dp:8: all agree")
    assert words.numerics_sentence(results_samples.compiled_search()) == ""
    silent = replace(
        RESULT,
        candidates=tuple(
            replace(one, outcome=replace(one.outcome, losses=()))
            for one in RESULT.candidates[:4]
            if isinstance(one.outcome, Measured)
        ),
    )
    assert words.numerics_sentence(silent) == (
        "no loss: first updates compared with those of the script's dp:8: all agree"
    )


def test_other_data_are_not_called_a_mesh_that_was_not_measured() -> None:
    (kept, *_) = RESULT.candidates
    kept = replace(kept, is_baseline=True, standing=replace(kept.standing, verdict="kept"))
    other = measured(1.0, numerics="other_arguments", numerics_detail="its data are not seeded")
    result = replace(RESULT, candidates=(kept, standing(other, "excluded")))
    said = words.best_sentence(result)
    assert said.endswith("no other mesh could be compared: its data are not seeded")


def verified(result: SearchResult, **changes: object) -> SearchResult:
    return replace(result, verifications=(replace(result.verifications[0], **changes),))


def test_best_is_confirmed_faster() -> None:
    assert words.best_sentence(RESULT) == (
        "dp:2,tp:4 remat=dots is 1.31x faster than the script's dp:8 (1.27x to 1.35x): "
        "12.3 ms measured in 3 fresh processes"
    )
    assert words.best_label(RESULT) == "best"


def test_best_was_not_shown_to_be_faster() -> None:
    """Of an older version, which exported the fastest of a race."""
    gain = Comparison(verdict="equal", ratio=1.004, interval=(0.99, 1.02))
    tie = verified(RESULT, gain=gain)
    assert "not shown to be faster than the script's dp:8 (0.99x to 1.02x)" in (
        words.best_sentence(tie)
    )


def kept(*others: Candidate, most_faster: tuple[float, ...] = ()) -> SearchResult:
    own = replace(standing(measured(0.0123, confirmed=True), "kept"), is_baseline=True)
    return replace(verified(RESULT, most_faster=most_faster), candidates=(own, *others))


@pytest.mark.parametrize(
    ("most_faster", "expected"),
    [
        ((0.034,), "no measured mesh is more than 3.4 % faster"),
        ((0.0,), "no measured mesh is faster"),
        ((), "whether others are faster is not known"),
    ],
)
def test_the_scripts_own_mesh_is_kept(most_faster: tuple[float, ...], expected: str) -> None:
    other = standing(measured(0.0123), "equal", 1.001)
    result = kept(other, most_faster=most_faster)
    assert words.best_label(result) == "keep"
    assert words.best_sentence(result).endswith(
        f", the script's own mesh, 12.3 ms measured in 3 fresh processes: {expected}"
    )
    alone = kept(most_faster=most_faster)
    assert words.best_sentence(alone).endswith(": no other mesh was measured")


def test_what_is_undecided_says_what_deciding_takes() -> None:
    assert words.undecided_sentence(RESULT) == ""
    one = standing(measured(0.012), "undecided", 0.97)
    one = replace(one, standing=replace(one.standing, interval=(0.92, 1.03), more_s=170.0))
    plan = str(one.plan)
    assert words.undecided_sentence(kept(one)) == (
        f"{plan} may be faster: -3.0 % step time (-8.0 % to +3.0 %); "
        "about 3 min more would decide, with the same command"
    )
    assert f"{plan} and 1 other may be faster" in words.undecided_sentence(kept(one, one))
    assert "about 6 min more" in words.undecided_sentence(kept(one, one))
    # A plan that is 20 % slower in the one visit that it had is not said to be perhaps faster.
    once = replace(one, standing=replace(one.standing, ratio=1.2, interval=(0.0, 0.0)))
    assert words.undecided_sentence(kept(once)) == (
        f"{plan} was timed too little to tell: +20.0 % step time so far; "
        "about 3 min more would decide, with the same command"
    )
    assert f"{plan} and 1 other were timed too little" in words.undecided_sentence(kept(once, one))


def test_best_turns_out_slower_when_confirmed() -> None:
    """Of an older version, too."""
    gain = Comparison(verdict="faster", ratio=0.8, interval=(0.75, 0.85))
    slower = verified(RESULT, gain=gain)
    assert words.best_sentence(slower).endswith(
        "1.25x slower than the script's dp:8 (1.18x to 1.33x)"
    )


def test_best_not_yet_confirmed() -> None:
    first, *rest = RESULT.candidates
    racing = replace(first, outcome=replace(first.outcome, confirmed=False))
    result = replace(RESULT, candidates=(racing, *rest), verifications=())
    assert words.best_sentence(result) == (
        "dp:2,tp:4 remat=dots, 12.3 ms measured, not yet confirmed in fresh processes, "
        "1.31x faster than the script's dp:8 (1.29x to 1.34x)"
    )


def test_best_is_the_scripts_own() -> None:
    first = RESULT.candidates[0]
    best = replace(first, is_baseline=True, standing=replace(first.standing, verdict="best"))
    result = replace(RESULT, candidates=(best,))
    assert words.best_sentence(result).endswith("in 3 fresh processes, the script's own mesh")


def test_best_without_a_baseline() -> None:
    result = replace(RESULT, candidates=RESULT.candidates[:1])
    assert words.best_sentence(result).endswith("in 3 fresh processes")


def test_best_when_the_baseline_failed() -> None:
    failed = standing(TimedOut(stage="run", limit_s=9.0), "failed")
    candidates = (RESULT.candidates[0], replace(failed, is_baseline=True))
    assert words.best_sentence(replace(RESULT, candidates=candidates)).endswith(
        "while the script's dp:8 gives no time (timed out after 9 s while running)"
    )


def test_best_shares_the_mesh_of_the_baseline() -> None:
    best = replace(RESULT.candidates[0], plan=plan("dp:8", remat="dots"))
    result = replace(RESULT, candidates=(best, *RESULT.candidates[1:]))
    assert "faster than the script's dp:8 remat=full (" in words.best_sentence(result)


def test_best_is_only_predicted() -> None:
    text = words.best_sentence(results_samples.compiled_search())
    assert "412 ms predicted from the compiled program, not measured" in text
    assert text.endswith("predicted 3.59x faster than the script's dcn.fsdp:4,fsdp:128")


def test_measured_and_compiled_seconds_are_never_compared() -> None:
    base = replace(standing(compiled(0.02), "not_measured", 1.6), is_baseline=True)
    result = replace(RESULT, candidates=(RESULT.candidates[0], base), verifications=())
    assert "faster" not in words.best_sentence(result)


def test_nothing_found() -> None:
    assert words.best_sentence(results_samples.empty_search()) == (
        "none: no plan may become a rule"
    )


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (1.2, "1.20x faster than the script's dp:8"),
        (1.002, "0.2 % faster than the script's dp:8"),
        (1.0002, "as fast as the script's dp:8"),
    ],
)
def test_a_gain_that_rounds_to_one_is_told_in_per_cent(speedup: float, said: str) -> None:
    interval = (speedup, speedup)
    found = words._compared(speedup, interval, is_tie=False, whose="the script's dp:8")
    assert found == said
