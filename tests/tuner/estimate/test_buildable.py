"""Plans that cannot be built: found before anything is listed, and counted with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import pytest

import automesh
from automesh.errors import NoFeasibleMesh, UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Failed, Failure, RuledOut, TimedOut
from automesh.program.capture.build import EndedEarly
from automesh.program.nouns import BuildAnswer, Entry, StepRef
from automesh.report.progress import Silent
from automesh.space.mapping import SplitArray, SplitDimension
from automesh.tuner.estimate.buildable import BuildCheck, refusal_notices
from automesh.worker.blame import failure
from automesh.worker.messages import BuildJob, Job
from automesh.worker.pool import Finished, OnEvent
from tests.support.paths import SCRIPTS

AXES = ("dp", "tp")
ENTRY = Entry(kind="script", location="/train.py")
SCRIPT = SCRIPTS / "refusing.py"
ALL = {"dp:8", "dp:4,tp:2", "dp:2,tp:4", "tp:8"}


def plan(mesh: str, **options: str) -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), compiler_options=tuple(options.items()))


def rows(size: int, *axes: str) -> SplitArray:
    return SplitArray(name="args[1]", split=(SplitDimension(place=0, size=size, names=axes),))


def six_rows(plan: Plan) -> BuildAnswer:
    """As jax answers of a batch of six that is always split over dp."""
    batch = rows(6, "dp")
    return BuildAnswer(arguments=(batch,), uneven=(batch,) if 6 % plan.sizes["dp"] else ())


@dataclass
class FakePool:
    """Answers builds in their order, one per wait; each takes a second."""

    answer: Callable[[Plan], BuildAnswer | Failure]
    doubtful: Callable[[BuildJob, bool], bool] = lambda job, fresh: False
    now_s: float = 0.0
    built: list[str] = field(default_factory=list)
    waiting: list[tuple[int, BuildJob, bool]] = field(default_factory=list)

    def submit(
        self,
        job: Job,
        timeout_s: float,
        on_event: OnEvent | None = None,
        *,
        fresh: bool = False,
        affinity: object = None,
    ) -> int:
        assert isinstance(job, BuildJob)
        self.built.append(str(job.plan))
        self.waiting.append((len(self.built), job, fresh))
        return len(self.built)

    def wait(self, timeout_s: float | None = None) -> list[Finished]:
        ticket, job, fresh = self.waiting.pop(0)
        self.now_s += 1.0
        doubtful = self.doubtful(job, fresh)
        return [Finished(ticket=ticket, job=job, result=self.answer(job.plan), doubtful=doubtful)]


def check(pool: FakePool, *, deadline_s: float = 100.0, workers: int = 1) -> BuildCheck:
    return BuildCheck(
        entry=ENTRY,
        job=lambda plan: BuildJob(
            step=StepRef(entry=ENTRY),
            plan=plan,
        ),
        pool=pool,
        progress=Silent(),
        workers=workers,
        deadline_s=deadline_s,
        timeout_s=60.0,
        clock=lambda: pool.now_s,
    )


def test_plans_are_built_until_the_list_is_full() -> None:
    pool = FakePool(answer=six_rows)
    plans = [plan("dp:4,tp:2"), plan("tp:8"), plan("dp:8"), plan("dp:2,tp:4"), plan("dp:1,tp:4")]
    one = check(pool)
    one.build(plans, wanted=2)
    assert pool.built == ["dp:4,tp:2", "tp:8", "dp:8", "dp:2,tp:4"]
    assert [str(it) for it in plans if one.can_be_built(it)] == ["tp:8", "dp:2,tp:4"]
    refused = one.refused(plans)
    assert {str(it): why for it, why in refused.items()} == {
        "dp:4,tp:2": RuledOut(
            rule="dp divides 6", detail="dp is 4, does not divide dimension 0 of `args[1]` = 6"
        ),
        "dp:8": RuledOut(
            rule="dp divides 6", detail="dp is 8, does not divide dimension 0 of `args[1]` = 6"
        ),
    }


def test_compiler_options_are_none_of_builds_business() -> None:
    pool = FakePool(answer=six_rows)
    plans = [plan("dp:8", xla_a="1"), plan("dp:8", xla_a="2"), plan("dp:8")]
    one = check(pool)
    one.build(plans, wanted=3)
    assert pool.built == ["dp:8"]
    assert set(one.refused(plans)) == set(plans)


def test_slices_are_none_of_builds_business_either() -> None:
    pool = FakePool(answer=six_rows)
    plans = [plan("dcn.dp:2,tp:4"), plan("dp:2,dcn.tp:2,tp:2"), plan("dcn.dp:2,dp:4")]
    one = check(pool)
    one.build(plans, wanted=3)
    assert pool.built == ["dp:2,tp:4", "dp:8"]
    assert set(one.refused(plans)) == {plans[2]}


def test_what_jax_refuses_is_refused_of_plans_with_the_same_sizes() -> None:
    pool = FakePool(answer=six_rows)
    many = [
        Plan(axes=parse_mesh(mesh, (*AXES, "sp")))
        for mesh in ("dp:1,tp:16", "dp:4,tp:4", "dp:4,sp:4", "dp:4,tp:2,sp:2", "dp:2,tp:8")
    ]
    one = check(pool)
    one.build(many[:1], wanted=1)
    refused = one.refused(many)
    assert pool.built == ["tp:16", "dp:4,tp:4", "dp:4,tp:2,sp:2"], "not those in between"
    assert {str(it) for it in refused} == {"dp:4,tp:4", "dp:4,sp:4", "dp:4,tp:2,sp:2"}


def test_a_build_that_adapts_is_believed() -> None:
    def adapting(plan: Plan) -> BuildAnswer:
        return BuildAnswer(arguments=(rows(6, "dp"),) if 6 % plan.sizes["dp"] == 0 else ())

    pool = FakePool(answer=adapting)
    plans = [plan("dp:2,tp:4"), plan("dp:4,tp:2"), plan("dp:8")]
    one = check(pool)
    one.build(plans[:1], wanted=1)
    assert one.refused(plans) == {}


def test_a_build_that_adapts_to_another_axis_is_believed_once_it_was_seen() -> None:
    """With sp it splits nothing: that dp:4 is refused alone says nothing of dp:4,sp:2."""

    def adapting(plan: Plan) -> BuildAnswer:
        return BuildAnswer(arguments=()) if plan.sizes["sp"] > 1 else six_rows(plan)

    pool = FakePool(answer=adapting)
    names = (*AXES, "sp")
    plans = [Plan(axes=parse_mesh(one, names)) for one in ("dp:4,tp:2", "tp:4,sp:2", "dp:4,sp:2")]
    one = check(pool)
    one.build(plans[:2], wanted=2)
    assert [str(it) for it in one.refused(plans)] == ["dp:4,tp:2"]


def test_nothing_is_built_after_the_deadline_but_the_baseline() -> None:
    pool = FakePool(answer=six_rows)
    one = check(pool, deadline_s=0.0)
    one.build([plan("dp:8")], wanted=1)
    assert pool.built == []
    with pytest.raises(UsageError, match="the baseline `dp:8` cannot be built: dp is 8, does not"):
        one.require(plan("dp:8"))


def test_what_took_too_long_is_not_ruled_out() -> None:
    pool = FakePool(answer=lambda plan: TimedOut(stage="build", limit_s=60.0))
    one = check(pool)
    one.build([plan("dp:8")], wanted=1)
    assert one.refused([plan("dp:8")]) == {}
    one.require(plan("dp:8"))


@pytest.mark.parametrize(
    "failed",
    [
        Failed(stage="start", reason="jax could not start"),
        Failed(stage="build", reason="the worker was killed by SIGSEGV while building the step"),
        Failed(stage="build", reason="mesh `dp:8` has 8 devices", hint="an error of automesh's"),
    ],
)
def test_what_is_no_exception_of_the_step_rules_nothing_out(failed: Failed) -> None:
    pool = FakePool(answer=lambda plan: failed)
    one = check(pool)
    one.build([plan("dp:8")], wanted=1)
    assert one.refused([plan("dp:8")]) == {}


def test_a_process_that_ends_is_tried_again_in_a_fresh_one() -> None:
    answers = iter([Failed(stage="build", reason="the worker was killed by SIGSEGV")])
    pool = FakePool(
        answer=lambda plan: next(answers, six_rows(plan)), doubtful=lambda job, fresh: not fresh
    )
    one = check(pool)
    one.build([plan("tp:8")], wanted=1)
    assert pool.built == ["tp:8", "tp:8"]
    assert one.can_be_built(plan("tp:8"))


def test_a_rule_counts_what_one_line_raises() -> None:
    tail = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in build\n    check(mesh)\n'
        '  File "/home/me/model.py", line 12, in check\n    raise ValueError(...)\n'
        "ValueError: {} heads"
    )

    def raising(plan: Plan) -> Failed:
        tp = plan.sizes["tp"]
        reason = f"`build` raised ValueError: {tp} heads"
        return Failed(stage="build", reason=reason, log_tail=tail.format(tp))

    one = check(FakePool(answer=raising))
    plans = [plan("tp:8"), plan("dp:2,tp:4")]
    one.build(plans, wanted=2)
    refused = one.refused(plans)
    assert {why.rule for why in refused.values()} == {"ValueError at model.py:12"}
    assert refusal_notices(refused) == (
        "`tp:8` cannot be built: ValueError: 8 heads (model.py:12)",
    )


def test_a_script_that_ends_before_its_step_is_a_rule_in_words() -> None:
    """No class of automesh's own is named."""

    def answer(plan: Plan) -> Failed:
        error = EndedEarly(f"main.py fails at main.py:7: ValueError: {plan.sizes['dp']} is odd")
        outcome = failure(error, stage="build", function="train_step", limit_bytes=0)
        assert isinstance(outcome, Failed)
        return outcome

    plans = [plan("dp:8"), plan("dp:4,tp:2")]
    one = check(FakePool(answer=answer))
    one.build(plans, wanted=2)
    refused = one.refused(plans)
    assert {why.rule for why in refused.values()} == {"main.py fails at main.py:7"}
    assert refused[plans[0]].detail == "main.py fails at main.py:7: ValueError: 8 is odd"


def dry_run(function: str, folder: Path, *, baseline: str = "") -> automesh.Result:
    return automesh.search(
        f"{SCRIPT}:{function}",
        target="cpu:8",
        space=two_axes(folder),
        baseline=baseline,
        results=folder / "results",
        dry_run=True,
    )


def two_axes(folder: Path) -> Path:
    space = folder / "space.toml"
    space.write_text("[axes]\ndp = {}\ntp = {}\n")
    return space


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "left", "rules", "notice"),
    [
        (
            "six_rows",
            {"dp:2,tp:4", "tp:8"},
            (("dp divides 6", 2),),
            "cannot be built: dp is 8, does not divide dimension 0 of `args[1]` = 6",
        ),
        (
            "too_many_heads",
            ALL - {"tp:8"},
            (("ValueError at refusing.py:29", 1),),
            "`tp:8` cannot be built: ValueError: eight is too many heads (refusing.py:29)",
        ),
        ("adapting", ALL, (), ""),
        (
            "manual",
            {"dp:2,tp:4", "tp:8"},
            (("ValueError at refusing.py:46", 2),),
            "cannot be built: ValueError: dimension 0 of an array (6, 64) is 6, no multiple of 8",
        ),
        ("constrained", ALL, (), ""),
        (
            "placed_outputs",
            {"dp:2,tp:4", "tp:8"},
            (("IndivisibleError while lowering the step", 2),),
            "cannot be built: IndivisibleError: ",
        ),
    ],
)
def test_what_cannot_be_built_is_never_listed(
    function: str, left: set[str], rules: object, notice: str, tmp_path: Path
) -> None:
    result = dry_run(function, tmp_path)
    found = result.found
    assert {one.plan.mesh for one in found.candidates} == left
    assert found.funnel.ruled_out == rules
    assert (found.funnel.enumerated, found.funnel.legal) == (4, len(left))
    said = [one for one in found.notices if "cannot be built" in one]
    assert bool(said) == bool(notice)
    assert not notice or notice in said[0]
    assert not any("not estimated" in one for one in found.notices)
    exported = result.to_json()
    assert [(one["rule"], one["count"]) for one in exported["funnel"]["ruled_out"]] == list(rules)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "baseline"), [("six_rows", "dp:8"), ("own_baseline", ""), ("manual", "dp:4,tp:2")]
)
def test_a_baseline_that_cannot_be_built_is_bad_input(
    function: str, baseline: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"^the baseline `dp:.* cannot be built: "):
        dry_run(function, tmp_path, baseline=baseline)


@pytest.mark.slow
def test_where_no_mesh_can_be_built_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        NoFeasibleMesh, match=r"none is legal.*RuntimeError at refusing.py:\d+"
    ) as e:
        dry_run("nowhere", tmp_path)
    assert "this cluster is closed" in e.value.message


@pytest.mark.long
def test_a_search_compiles_none_of_them(tmp_path: Path) -> None:
    """Nor does the one that goes on with it."""

    def once() -> automesh.Result:
        return automesh.search(
            f"{SCRIPT}:six_rows",
            target="cpu:8",
            space=two_axes(tmp_path),
            budget="15s",
            top=2,
            rules=tmp_path / "mesh_rules.toml",
            results=tmp_path / "results",
        )

    result = once()
    assert {one.plan.mesh for one in result.found.candidates} <= {"dp:2,tp:4", "tp:8"}
    assert (result.found.funnel.failed, result.found.funnel.legal) == (0, 2)
    assert result.found.funnel.ruled_out == (("dp divides 6", 2),)
    (study,) = (tmp_path / "results").iterdir()
    table = pd.read_csv(study / "estimates.csv")
    reasons = table.set_index("mesh")["not_estimated"].dropna()
    assert set(reasons.index) == {"dp:8", "dp:4,tp:2"}
    assert all("ruled out by dp divides 6: dp is " in reason for reason in reasons)
    # How many are measured in the time is another matter.
    again = once().found.funnel
    assert replace(again, measured=0) == replace(result.found.funnel, measured=0)
