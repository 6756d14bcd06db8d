"""What a study promises, on every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.tuner.study import lease
from automesh.tuner.study.assemble import outcomes_of
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.optuna_records import outcome_attributes
from automesh.tuner.study.scope import Scope
from automesh.tuner.study.storage import Storage
from automesh.tuner.study.study import Study, open_study
from tests.support.samples.storage_cases import (
    BACKENDS,
    SOURCE,
    VERSIONS,
    compiled,
    measured,
    opened,
    plans,
)

pytest_plugins = ("tests.support.storage_fixtures",)
pytestmark = pytest.mark.parametrize("kind", BACKENDS, indirect=True)


@pytest.fixture
def study(storage: Storage) -> Generator[Study]:
    with opened(storage) as study:
        yield study


@pytest.fixture
def other(storage: Storage, study: Study, monkeypatch: pytest.MonkeyPatch) -> Generator[Study]:
    """The same study as a process on another host has it open."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lease, "_machine", lambda: "another machine")
        other = opened(storage)
    with other:
        yield other


@contextlib.contextmanager
def silence(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Everybody who does not renew in here has been silent for too long."""
    with monkeypatch.context() as later:
        later.setattr(lease, "LEASE_S", -1.0)
        yield


def test_trials_are_claimed_in_the_order_that_is_asked_for(study: Study) -> None:
    first, second, third, fourth = plans(4)
    assert study.lead()
    study.compile.enqueue([first, second, third])
    assert study.compile.claim().plan == first
    wanted = {second: 2.0, third: 1.0, fourth: 0.0}
    study.compile.enqueue([fourth])
    assert study.compile.claim(lambda plan: wanted[plan]).plan == fourth
    assert study.compile.claim(lambda plan: wanted[plan]).plan == third
    assert study.compile.claim().plan == second
    assert study.compile.claim(lambda plan: wanted[plan]) is None


def test_a_trial_from_queue_to_result(study: Study, storage: Storage) -> None:
    first, second = plans(2)
    assert study.lead()
    added = study.compile.enqueue([first, second, first])
    assert [(one.number, one.plan, one.state) for one in added] == [
        (0, first, "waiting"),
        (1, second, "waiting"),
    ]
    assert added[0].owner is None
    assert added[0].attempts == 0
    assert study.compile.enqueue([second, first]) == []

    trial = study.compile.claim()
    assert trial is not None
    assert (trial.number, trial.state, trial.owner, trial.attempts) == (
        0,
        "running",
        study.owner,
        1,
    )
    assert trial.outcome is None
    assert study.compile.finish(trial, compiled(0.25)) == "stored"

    with opened(storage) as again:
        done, waiting = again.compile.trials()
        assert again.measure.trials() == []
    assert (done.state, done.outcome, done.fingerprint) == ("done", compiled(0.25), "f00d")
    assert (done.source_hash, done.versions) == (SOURCE, VERSIONS)
    assert waiting.state == "waiting"


def test_the_best_plan_is_claimed_first(study: Study) -> None:
    study.lead()
    study.compile.enqueue(plans(3))
    numbers = [trial.number for trial in iter(study.compile.claim, None)]
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize(
    ("outcome", "state", "reason"),
    [
        (Failed(stage="build", reason="no `build`", log_tail="x" * 9), "failed", "no `build`"),
        (TimedOut(stage="compile", limit_s=300.0), "failed", "no end after 300 s"),
        (
            OutOfMemory(stage="run", needed_bytes=9, limit_bytes=4, detail="9 of 4 bytes"),
            "failed",
            "9 of 4 bytes",
        ),
        (measured(0.5), "done", None),
        (measured(0.5, raced_out=True), "raced_out", None),
    ],
)
def test_every_outcome_is_kept(study: Study, outcome: Failed, state: str, reason: str) -> None:
    study.lead()
    trial = study.measure.begin(plans(1)[0])
    assert trial is not None
    assert study.measure.finish(trial, outcome, fingerprint="beef") == "stored"
    (kept,) = study.measure.trials()
    assert repr(kept.outcome) == repr(outcome)  # NaN losses are not equal to themselves
    assert (kept.state, kept.fingerprint) == (state, "beef")
    (frozen,) = study.measure.optuna_study.trials
    assert frozen.user_attrs.get("reason") == reason
    assert frozen.user_attrs["kind"] == outcome.kind


def test_long_logs_are_cut_at_the_front(study: Study) -> None:
    study.lead()
    trial = study.measure.begin(plans(1)[0])
    study.measure.finish(trial, Failed(stage="run", reason="r", log_tail="a" * 99_999 + "end"))
    (kept,) = study.measure.trials()
    assert len(kept.outcome.log_tail) == 20_000
    assert kept.outcome.log_tail.endswith("aend")


def test_only_the_leader_enqueues(study: Study, other: Study) -> None:
    assert study.lead()
    assert study.lead()
    assert not other.lead()
    assert other.leader() == study.owner
    assert other.compile.enqueue(plans(2)) == []
    assert other.measure.begin(plans(1)[0]) is None
    assert other.compile.trials() == []
    study.compile.enqueue(plans(2))
    trial = other.compile.claim()
    assert trial is not None
    assert trial.owner == other.owner
    study.close()
    assert other.leader() is None
    assert other.lead()


def test_a_silent_leader_is_replaced(
    study: Study, other: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.lead()
    assert not study.lead()
    with silence(monkeypatch):
        assert study.lead()
    assert not other.heartbeat()
    assert other.compile.enqueue(plans(1)) == []
    assert study.heartbeat()
    assert [one.number for one in study.compile.enqueue(plans(1))] == [0]


def test_a_heartbeat_keeps_lease_and_claims(
    study: Study, other: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.lead()
    other.compile.enqueue(plans(1))
    assert other.compile.claim() is not None
    with monkeypatch.context() as later:
        clock = [1000.0]
        for each in (study, other):
            later.setattr(type(each._backend.leases), "now", lambda _: clock[0])
        later.setattr(lease, "monotonic", lambda: clock[0])
        assert other.heartbeat()
        clock[0] += lease.LEASE_S - 1
        assert other.heartbeat()
        clock[0] += lease.LEASE_S - 1
        assert not study.lead()
        assert study.compile.adopt_expired() == []
        clock[0] += 2
        assert not study.lead(), "its silence was not seen for long enough"
        clock[0] += lease.GRACE_S
        assert study.lead()
        assert [one.number for one in study.compile.adopt_expired()] == [0]


def test_a_late_finisher_changes_nothing(
    study: Study, other: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.lead()
    study.compile.enqueue(plans(1))
    paused = other.compile.claim()
    assert paused is not None
    assert study.compile.claim() is None
    assert study.compile.adopt_expired() == [], "its owner was alive"
    with silence(monkeypatch):
        (waiting,) = study.compile.adopt_expired()
        assert (waiting.number, waiting.state) == (0, "waiting")
    mine = study.compile.claim()
    assert mine is not None
    assert (mine.owner, mine.attempts) == (study.owner, 2)

    assert other.compile.finish(paused, compiled(0.9)) == "lost"
    assert not other.compile.report(paused, 0, [0.9])
    assert study.compile.finish(mine, compiled(0.1)) == "stored"
    assert other.compile.finish(paused, compiled(0.9)) == "already_finished"
    assert study.compile.finish(mine, compiled(0.8)) == "already_finished"
    (kept,) = other.compile.trials()
    assert (kept.outcome, kept.owner) == (compiled(0.1), study.owner)


def test_a_race_goes_on_from_its_rounds(
    study: Study, other: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans(1)[0]
    other.lead()
    trial = other.measure.begin(plan)
    assert trial is not None
    assert other.measure.report(trial, 0, [0.3, 0.1, 0.2])
    assert other.measure.report(trial, 1, [0.4])
    assert study.measure.begin(plan) is None, "another process runs it"
    with silence(monkeypatch):
        study.lead()
        taken = study.measure.begin(plan)
    assert taken is not None
    assert [(one.number, one.samples_s, one.machine) for one in taken.rounds] == [
        (0, (0.3, 0.1, 0.2), "another machine"),
        (1, (0.4,), "another machine"),
    ]
    study.measure.report(taken, 1, [0.5])
    study.measure.finish(taken, measured(0.2, raced_out=True))
    assert study.measure.begin(plan) is None, "it is finished"
    (frozen,) = study.measure.optuna_study.trials
    assert frozen.intermediate_values == {0: 0.2, 1: 0.5}
    assert frozen.state.name == "PRUNED"


def test_closing_gives_everything_back(study: Study, storage: Storage) -> None:
    study.lead()
    study.compile.enqueue(plans(2))
    study.compile.claim()
    running = study.measure.begin(plans(1)[0])
    study.measure.report(running, 0, [0.5])
    study.close()
    with opened(storage) as again:
        assert again.leader() is None
        assert [one.state for one in again.compile.trials()] == ["waiting", "waiting"]
        assert again.lead()
        resumed = again.measure.begin(plans(1)[0])
        assert resumed is not None
        assert len(resumed.rounds) == 1
    with opened(storage) as last:
        assert last._backend.leases.under("") == {}


def test_a_stored_outcome_without_its_state_is_completed(study: Study, other: Study) -> None:
    study.lead()
    study.compile.enqueue(plans(1))
    trial = study.compile.claim()
    # What a kill between the two leaves behind: the attributes, but neither state nor owner alive.
    for name, value in outcome_attributes(compiled(0.25)).items():
        study._backend.optuna.set_trial_user_attr(trial.storage_id, name, value)
    lease.release(study._backend.leases, "lm-cpu-8-1234/compile/0", study.owner)
    assert [one.outcome for one in other.compile.trials()] == [None]
    assert other.compile.adopt_expired() == []
    (kept,) = other.compile.trials()
    assert (kept.state, kept.outcome) == ("done", compiled(0.25))


def test_stale_trials_are_kept_and_not_claimed(study: Study, storage: Storage) -> None:
    study.lead()
    study.compile.enqueue(plans(2))
    study.compile.finish(study.compile.claim(), compiled(0.5))
    study.close()
    with opened(storage, source_hash="source-2") as edited:
        edited.lead()
        assert edited.compile.claim() is None
        old = edited.compile.trials()
        assert [one.matches("source-2", VERSIONS) for one in old] == [False, False]
        assert [one.matches(SOURCE, VERSIONS) for one in old] == [True, True]
        assert not old[0].matches(SOURCE, VERSIONS[:1])
        assert [one.number for one in edited.compile.enqueue(plans(2))] == [2, 3]
        assert edited.compile.claim().number == 2
    with opened(storage) as back:
        assert back.lead()
        assert back.compile.claim().number == 1


def test_plans_of_another_space_are_not_claimed(study: Study, storage: Storage) -> None:
    first, second = plans(2)
    study.lead()
    study.compile.enqueue([first, second])
    study.close()
    with opened(storage, scope=Scope(plans=frozenset([second]))) as narrow:
        assert narrow.lead()
        claimed = narrow.compile.claim()
        assert claimed is not None and claimed.plan == second
        assert narrow.compile.claim() is None
    with opened(storage) as wide:
        assert wide.compile.claim().plan == first


@pytest.mark.parametrize(
    ("outcome", "wider", "as_wide"),
    [
        (
            TimedOut(stage="compile", limit_s=300.0),
            Scope(timeout_s=301.0),
            Scope(timeout_s=300.0),
        ),
        (
            OutOfMemory(stage="compile", needed_bytes=9, limit_bytes=100, detail="", is_host=True),
            Scope(worker_bytes=111),
            Scope(worker_bytes=109),
        ),
        (
            OutOfMemory(stage="compile", needed_bytes=9, limit_bytes=100, detail=""),
            None,
            Scope(worker_bytes=10**9, timeout_s=1e9),
        ),
    ],
)
def test_what_failed_by_a_limit_is_tried_again_where_that_is_wider(
    study: Study, storage: Storage, outcome: TimedOut, wider: Scope | None, as_wide: Scope
) -> None:
    (plan,) = plans(1)
    study.lead()
    study.compile.enqueue([plan])
    study.compile.finish(study.compile.claim(), outcome)
    study.measure.finish(study.measure.begin(plan), outcome)
    study.close()
    with opened(storage, scope=as_wide) as same:
        assert same.lead()
        assert same.compile.enqueue([plan]) == []
        assert same.measure.begin(plan) is None
    if wider is None:
        return
    with opened(storage, scope=wider) as more:
        assert more.lead()
        (again,) = more.compile.enqueue([plan])
        assert more.compile.claim() == more.compile.trials()[again.number]
        assert more.measure.begin(plan).number == 1
        book = Notebook(study=more, source_hash=SOURCE, versions=VERSIONS)
        assert outcomes_of(book, more.compile) == {}


def test_studies_in_one_storage_do_not_mix(study: Study, storage: Storage) -> None:
    with open_study(storage, "lm-cpu-8-12", source_hash=SOURCE, versions=VERSIONS) as second:
        assert study.lead()
        assert second.lead()
        study.compile.enqueue(plans(1))
        assert second.compile.trials() == []
        assert second.compile.claim() is None


def test_reading_makes_nothing(study: Study, storage: Storage) -> None:
    study.note("header", {"plans": 3})
    with open_study(storage, study.name, create=False) as seen:
        assert seen.noted("header") == {"plans": 3}
        assert seen.noted("footer") is None
        assert seen.leader() is None
    with pytest.raises(UsageError) as caught:
        open_study(storage, "other", create=False)
    assert "there is no study `other` in " in caught.value.message
    assert caught.value.hint.endswith("the studies there are: `lm-cpu-8-1234`")


def test_who_only_reads_sees_one_moment(study: Study, storage: Storage) -> None:
    first, second = plans(2)
    assert study.lead()
    study.note("header", {"plans": 2})
    study.compile.enqueue([first])
    with open_study(storage, study.name, create=False) as seen:
        seen.freeze()
        assert seen.noted("header") == {"plans": 2}
        assert [one.plan for one in seen.compile.trials()] == [first]
        assert (seen.measure.trials(), seen.screen.trials()) == ([], [])
        study.note("header", {"plans": 3})
        for rung in (study.compile, study.measure, study.screen):
            rung.enqueue([second])
        assert seen.noted("header") == {"plans": 2}
        assert [one.plan for one in seen.compile.trials()] == [first]
        assert (seen.measure.trials(), seen.screen.trials()) == ([], [])
        seen.freeze()
        assert seen.noted("header") == {"plans": 3}
        assert [one.plan for one in seen.compile.trials()] == [first, second]
        assert [len(one.trials()) for one in (seen.measure, seen.screen)] == [1, 1]


def test_what_optuna_sees(study: Study) -> None:
    def plan(dp: int, tp: int, remat: str, *option: tuple[str, bool | int | float]) -> Plan:
        axes = (MeshAxis(name="dp", ici=dp, dcn=2), MeshAxis(name="tp", ici=tp))
        return Plan(axes=axes, knobs=(("remat", remat),), compiler_options=option)

    tried = [
        plan(4, 1, "full"),
        plan(2, 2, "none", ("flag", True)),
        plan(1, 4, "full", ("flag", 1)),
        plan(4, 1, "dots", ("flag", 1.0)),
    ]
    study.lead()
    study.compile.enqueue(tried[:2])
    study.compile.enqueue(tried)  # the lists of choices grow
    for number, trial in enumerate(iter(study.compile.claim, None)):
        assert str(trial.plan.compiler_options) == str(tried[number].compiler_options)
        study.compile.finish(trial, compiled(0.1 + number))
    frame = study.compile.optuna_study.trials_dataframe()
    columns = ["dcn.dp", "dcn.tp", "dp", "tp", "knob.remat", "option.flag"]
    rows = frame[["value", *(f"params_{name}" for name in columns)]].to_numpy().tolist()
    assert rows == [
        [0.1, 2, 1, 4, 1, 0, 0],
        [1.1, 2, 1, 2, 2, 1, 1],
        [2.1, 2, 1, 1, 4, 0, 2],
        [3.1, 2, 1, 4, 1, 2, 3],
    ]
    assert frame["user_attrs_plan"][1] == "dcn.dp:2,dp:2,tp:2 remat=none flag=True"
    assert study.compile.optuna_study.user_attrs["choices"] == {
        "knob.remat": ["full", "none", "dots"],
        "option.flag": [None, True, 1, 1.0],
    }
    assert study.compile.optuna_study.best_trial.number == 0
