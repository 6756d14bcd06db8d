"""Searches for absent devices from their command to their rule, with made-up compiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import automesh
from automesh import api
from automesh.answers import Results
from automesh.errors import NoFeasibleMesh, UsageError
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, OutOfMemory
from automesh.report.estimates import NO_TIME, STEP_REFUSES, Estimates
from automesh.report.progress import Silent
from automesh.tuner.session import Session
from automesh.tuner.strategies import absent
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import open_study
from tests.support.fakes.absent_search import SPACE, TARGET, folder_for_search, install
from tests.support.handlers.absent import JOURNAL, LIMIT_BYTES, PEAKS, REFUSED
from tests.support.worker_jobs import ROOT

MIB = 2**20


class Interrupting(Silent):
    """Presses Ctrl-C when the first plan is being compiled at default effort."""

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        if name == "compile":
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Place:
    """A folder with a script, and searches in it."""

    folder: Path

    def search(self, **changes: object) -> api.Result:
        arguments = {
            "target": TARGET,
            "space": self.folder / "space.toml",
            "budget": "10m",
            "results": self.folder / "results",
            "rules": self.folder / "mesh_rules.toml",
            **changes,
        }
        return automesh.search(self.folder / "train.py", **arguments)  # pyright: ignore

    @property
    def compiles(self) -> Counter[str]:
        """How often each compile was finished, or refused."""
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line for line in lines if not line.startswith("begin"))

    @property
    def study(self) -> Path:
        (study,) = self.folder.glob("results/train-v5e-2x4-*")
        return study


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    install(monkeypatch.setattr)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(JOURNAL, str(tmp_path / "journal"))
    return Place(folder_for_search(tmp_path))


@pytest.mark.slow
def test_from_the_command_to_the_rule(place: Place) -> None:
    result = place.search()
    found = result.found
    assert (
        found.is_ahead
        and found.facts.devices.target == "v5e-2x4"
        and found.facts.devices.kind == "TPU v5 lite"
    )
    kinds = {str(one.plan): type(one.outcome) for one in found.candidates}
    assert kinds == {
        "dp:4,tp:2": Compiled,
        "dp:2,tp:4": Compiled,
        "tp:8": Compiled,
        "dp:8": OutOfMemory,
    }
    best = found.candidates[0]
    assert best.standing.verdict == "best" and str(best.plan) == "dp:4,tp:2"
    assert isinstance(best.outcome, Compiled) and best.outcome.replay is not None
    assert best.bound_by == "compute" and best.peak_bytes == PEAKS[2]
    refused = next(one.outcome for one in found.candidates if str(one.plan) == "dp:8")
    assert isinstance(refused, OutOfMemory)
    assert (refused.needed_bytes, refused.limit_bytes) == (PEAKS[1], LIMIT_BYTES)
    assert refused.reserve_bytes == 256 * MIB
    table = result.table(width=100)
    assert "needs 20.0 GiB of 15.8 GiB, of which 256 MiB stay in reserve" in table
    assert "1.20 ms predicted by a replay of the compiled program" in table
    assert "not measured" in table and "measured in" not in table
    assert "every legal plan was compiled, and nothing was run" in table

    rule = (place.folder / "mesh_rules.toml").read_text()
    assert 'kind = "compiled"' in rule and "measured" not in rule
    config = automesh.load(place.folder / "mesh_rules.toml").select("v5e-2x4")
    assert config.evidence.kind == "compiled"
    assert config.evidence.bracket_s == best.outcome.replay.bracket_s
    assert config.evidence.exposed_s == pytest.approx(2e-4)
    assert config.evidence.hbm_bytes == PEAKS[2]
    assert config.evidence.reserve_bytes == 256 * MIB
    assert config.evidence.mfu == 0.4
    assert dict(config.evidence.versions).keys() >= {"jax", "jaxlib"}
    assert config.evidence.runner_up.plan == "dp:2,tp:4"
    assert result.best.mesh_shape == config.mesh_shape

    again = api.show(place.study)
    assert again.found.candidates == found.candidates
    assert again.to_json()["best"]["exposed_s"] == pytest.approx(2e-4)
    json.dumps(again.to_json(), allow_nan=False)
    frame = again.dataframe()
    assert list(frame["effort"].dropna()) == ["default"] * 3
    assert list(frame["reserve_bytes"].dropna()) == [256 * MIB]


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 4])
def test_what_has_no_estimate_yet_or_is_refused_is_not_compiled(
    place: Place, monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    """Neither among the first plans, of which fewer than `top` may fit, nor as a challenger."""
    estimate = Session.estimate

    def late(self: Session, **given: Any) -> Estimates:
        made = estimate(self, **given)
        reasons = {"tp:8": NO_TIME, "dp:8": f"{STEP_REFUSES}: odd"}
        gone = {plan: reasons[str(plan)] for plan in made.found if str(plan) in reasons}
        found = {plan: one for plan, one in made.found.items() if plan not in gone}
        return replace(made, found=found, missing={**made.missing, **gone})

    asked: list[set[str]] = []

    def all_of(_: object, among: Sequence[Plan]) -> Sequence[Plan]:
        asked.append({str(plan) for plan in among})
        return among

    monkeypatch.setattr(absent, "challengers", all_of)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "estimate", late)
        result = place.search(top=top)
    assert asked and not any(plans & {"tp:8", "dp:8"} for plans in asked)
    table = " ".join(result.table(width=100).split())
    assert "1 plan waits for an estimate, so run the same command to go on" in table
    assert not any(" tp:8" in line or " dp:8" in line for line in place.compiles)
    place.search(top=top)
    assert any(" tp:8" in line or " dp:8" in line for line in place.compiles)


@pytest.mark.slow
def test_low_effort_comes_first_and_rejects_for_good(place: Place) -> None:
    place.search(top=3)
    with open_study(parse_storage("", place.study), place.study.name, create=False) as study:
        screened = {str(one.plan): one.outcome for one in study.screen.trials()}
        compiled = {str(one.plan): one.outcome for one in study.compile.trials()}
    assert isinstance(screened["dp:8"], OutOfMemory)
    assert "dp:8" not in compiled
    assert {one.effort for one in screened.values() if isinstance(one, Compiled)} == {"low"}
    assert all(isinstance(one, Compiled) and one.replay for one in compiled.values())
    # dp:4,tp:2 is below the limit at low effort, and above three quarters of it before the default
    # effort has its say.
    assert compiled.keys() == screened.keys() - {"dp:8"}


@pytest.mark.slow
def test_the_same_command_goes_on_and_repeats_nothing(place: Place) -> None:
    first = place.search(progress=Interrupting())
    assert first.interrupted
    assert not (place.folder / "mesh_rules.toml").exists()
    screened = place.compiles
    assert screened and all("default" not in line for line in screened)
    second = place.search()
    assert not second.interrupted
    done = place.compiles
    assert all(done[line] == times for line, times in screened.items())
    assert set(done.values()) == {1}
    place.search()
    assert place.compiles == done
    # What the study has forgotten, the store of compiled programs still knows.
    place.search(new=True)
    kept = {line: times for line, times in place.compiles.items() if line.startswith("end")}
    assert set(kept.values()) == {1}


@pytest.mark.slow
@pytest.mark.long
def test_another_reserve_is_judged_without_a_compile(place: Place) -> None:
    place.search()
    done = place.compiles
    found = place.search(reserve_hbm="4GiB").found
    assert place.compiles == done
    assert str(found.candidates[0].plan) == "dp:2,tp:4"
    refused = {
        str(one.plan): one.outcome
        for one in found.candidates
        if isinstance(one.outcome, OutOfMemory)
    }
    assert refused.keys() == {"dp:8", "dp:4,tp:2"}
    assert refused["dp:4,tp:2"].needed_bytes == PEAKS[2]
    assert refused["dp:4,tp:2"].reserve_bytes == 4096 * MIB
    config = automesh.load(place.folder / "mesh_rules.toml").select("v5e-2x4")
    assert config.evidence.reserve_bytes == 4096 * MIB
    back = place.search(reserve_hbm="0").found
    assert str(back.candidates[0].plan) == "dp:4,tp:2"
    assert back.facts.devices.reserve_bytes == 0


@pytest.mark.long
def test_a_measured_rule_is_not_replaced_by_a_prediction(place: Place) -> None:
    path = place.folder / "mesh_rules.toml"
    place.search()
    path.write_text(path.read_text().replace('kind = "compiled"', 'kind = "measured"'))
    before = path.read_text()
    result = place.search()
    assert path.read_text() == before
    assert not result.found.footer.rules_path
    assert "was measured, and stays" in result.found.footer.stop_reason
    assert result.best.evidence.kind == "compiled"


def test_nothing_that_fits_is_an_answer(place: Place) -> None:
    result = place.search(reserve_hbm="95%")
    with pytest.raises(NoFeasibleMesh, match=r"no plan was compiled that fits.*4 out of memory"):
        _ = result.best
    assert not (place.folder / "mesh_rules.toml").exists()


@pytest.mark.slow
@pytest.mark.long
def test_compiler_options_are_knobs_of_the_plan_and_of_the_rule(place: Place) -> None:
    found = place.search(xla={"xla_some_option": ["default", 5]}).found
    plans = {str(one.plan) for one in found.candidates if isinstance(one.outcome, Compiled)}
    assert {"dp:4,tp:2", "dp:4,tp:2 xla_some_option=5"} <= plans
    assert str(found.candidates[0].plan) == "dp:4,tp:2"
    fixed = place.search(xla={"xla_some_option": 5}, new=True).found
    assert str(fixed.candidates[0].plan) == "dp:4,tp:2 xla_some_option=5"
    config = automesh.load(place.folder / "mesh_rules.toml").select("v5e-2x4")
    assert config.compiler_options == {"xla_some_option": 5}


@pytest.mark.slow
def test_an_option_that_the_compiler_does_not_take_ends_the_search(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = frozenset({"xla_such_option", "xla_other"})
    monkeypatch.setattr("automesh.tuner.compile.rung.known_names", lambda: names)
    with pytest.raises(UsageError, match="did you mean `xla_such_option`") as raised:
        place.search(xla={"xla_no_such_option": 1})
    assert "--xla" in raised.value.hint


@pytest.mark.long
def test_several_targets_give_a_rule_each_and_share_their_terms(place: Place) -> None:
    found = place.search(target=["v5e:2x4", "v6e:2x4"])
    assert isinstance(found, Results)
    assert not found.found.not_found
    rules = automesh.load(place.folder / "mesh_rules.toml")
    for selector in ("v5e-2x4", "v6e-2x4"):
        assert rules.select(selector).evidence.kind == "compiled"
    assert found["v6e:2x4"].found.facts.devices.target == "v6e-2x4"
    text = found.table(width=90)
    assert "2 targets, all found" in text
    assert [one["target"] for one in found.to_json()["searches"]] == ["v5e-2x4", "v6e-2x4"]
    found.require_all()
    logs = sorted(place.folder.glob("results/train-v6e*/terms/*.json"))
    first = sorted(place.folder.glob("results/train-v5e*/terms/*.json"))
    assert [path.name for path in logs] == [path.name for path in first]


@pytest.mark.slow
@pytest.mark.long
def test_meshes_that_jax_cannot_lay_out_are_not_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REFUSED, "2x4")
    space = place.folder / "space.toml"
    space.write_text(SPACE.replace("tp = {}", "tp = { min = 4 }"))
    found = place.search().found
    assert [str(one.plan) for one in found.candidates] == ["tp:8"]
    assert found.footer.stop_reason.startswith("every legal plan that jax can lay out was compiled")
    space.write_text(SPACE.replace("tp = {}", "tp = { size = 4 }"))
    with pytest.raises(NoFeasibleMesh, match=r"no legal plan .* `2x4` out") as caught:
        place.search()
    assert "other sizes" in caught.value.hint


@pytest.mark.slow
@pytest.mark.long
def test_a_target_without_an_answer_is_named(place: Place) -> None:
    found = place.search(target=["v5e:2x4", "v6e:2x4"], reserve_hbm="95%")
    assert isinstance(found, Results)
    assert [one.target for one in found.found.not_found] == ["v5e:2x4", "v6e:2x4"]
    with pytest.raises(NoFeasibleMesh, match=r"v5e:2x4: no plan .* v6e:2x4: no plan"):
        found.require_all()
    with pytest.raises(UsageError, match="are the same target"):
        place.search(target=["v5e:2x4", "v5e-2x4"])


@pytest.mark.slow
@pytest.mark.long
def test_explain_shows_the_replay_beside_the_estimate_and_writes_a_trace(place: Place) -> None:
    place.search()
    one = api.explain(place.study, "dp:4,tp:2")
    text = one.text(width=100)
    assert "1.20 ms predicted by a replay of the compiled program" in text
    assert "replayed" in text.splitlines()[6:12][0] or "replayed" in text
    assert one.to_json()["one"]["replay"]["step_s"] == pytest.approx(1.2e-3)
    both = api.explain(place.study, "dp:4,tp:2", against="tp:8")
    assert "Replayed, dp:4,tp:2 is 1.50x faster" in both.why
    assert "waiting for collectives over tp" in both.why
    trace = place.folder / "trace.json"
    api.write_trace(place.study, "dp:4,tp:2", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["dot.1"]
    with pytest.raises(UsageError, match="none of the"):
        api.write_trace(place.study, "dp:8", trace)


@pytest.mark.long
def test_plans_at_low_effort_alone_stand_with_their_estimates(place: Place) -> None:
    place.search(progress=Interrupting())
    found = api.show(place.study).found
    assert found.footer.interrupted and not found.footer.rules_path
    outcomes = {str(one.plan): one.outcome for one in found.candidates}
    assert isinstance(outcomes["tp:8"], Estimated)
    assert isinstance(outcomes["dp:8"], OutOfMemory)
    assert found.funnel.screened == 3 and found.funnel.compiled == 0
    assert "3 compiled at low effort only" in api.show(place.study).table(width=100)


MANY = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh, copies=1):
    def loss(w, x):
        for _ in range(copies):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct(
        (512, 256), jnp.float32, sharding=NamedSharding(mesh, P(("dp", "sp"), None))
    )
    return jax.jit(step, donate_argnums=0), (w, x)
"""
MANY_SPACE = "[axes]\ndp = {}\ntp = {}\nsp = {}\n[knobs]\ncopies = [1, 60]\n"


class Order(Silent):
    """Records the phases in the order of their reports; may press Ctrl-C where one begins again."""

    def __init__(self, stops_at: str = "") -> None:
        self.phases: list[str] = []
        self.stops_at = stops_at

    def phase(self, name: str, **_: object) -> None:  # pyright: ignore
        if not self.phases or self.phases[-1] != name:
            is_again = name in self.phases
            self.phases.append(name)
            if is_again and name == self.stops_at:
                raise KeyboardInterrupt


@pytest.mark.slow
def test_the_first_ten_are_compiled_before_the_rest_is_estimated(place: Place) -> None:
    (place.folder / "train.py").write_text(MANY)
    (place.folder / "space.toml").write_text(MANY_SPACE)
    stopped = place.search(progress=Order(stops_at="estimate"), top=3)
    assert stopped.interrupted and "interrupted" in stopped.table()
    assert {type(one.outcome) for one in stopped.found.candidates[:3]} == {Compiled}
    assert not (place.folder / "mesh_rules.toml").exists()
    seen = Order()
    result = place.search(progress=seen, top=3, new=True)
    estimated = [number for number, name in enumerate(seen.phases) if name == "estimate"]
    assert len(estimated) == 2 and "compile" in seen.phases[estimated[0] : estimated[1]]
    found = result.found
    assert found.funnel.not_reached == 0 and "not estimated" not in result.table()
    assert any("were settled with" in one for one in found.facts.details)
    assert (place.folder / "mesh_rules.toml").is_file()
    again = place.search(top=3)
    assert [str(one.plan) for one in again.found.candidates] == [
        str(one.plan) for one in found.candidates
    ]
