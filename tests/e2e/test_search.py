"""Whole searches on real, small steps: every shape that a workload may have, and wrong numerics."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.outcomes import Measured
from automesh.report.result import Candidate
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import few_processes

pytestmark = pytest.mark.slow

TWO_AXES = "[axes]\ndp = {}\nfsdp = { size = 1 }\ntp = {}\n"


def search(script: str, folder: Path, *, top: int = 2, baseline: str = "") -> automesh.Result:
    space = folder / "two_axes.toml"
    space.write_text(TWO_AXES)
    return api.search(
        script,
        target="cpu:4",
        space=space,
        budget="1m",
        top=top,
        baseline=baseline,
        rules=folder / "mesh_rules.toml",
        results=folder / "results",
    )


def measured(result: automesh.Result) -> dict[str, Candidate]:
    found = result.found.candidates
    return {one.plan.mesh: one for one in found if isinstance(one.outcome, Measured)}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("adamw.py", marks=pytest.mark.long),
        pytest.param("unsharded_state.py", marks=pytest.mark.long),
        pytest.param("refs_explicit.py", marks=pytest.mark.long),
        pytest.param("static_config.py", marks=pytest.mark.long),
    ],
)
def test_every_kind_of_workload_ends_in_a_measured_rule(script: str, tmp_path: Path) -> None:
    result = search(str(SCRIPTS / script), tmp_path)
    rules = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())
    assert rules["rule"][0]["match"] == "cpu-4"
    assert rules["rule"][0]["evidence"]["kind"] == "measured"
    mesh = result.best.create_device_mesh(_four_devices())
    assert mesh.devices.size == 4
    assert all(one.outcome.numerics in ("agree", "reference") for one in measured(result).values())


@pytest.mark.long
def test_a_module_with_a_context_and_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPTS)
    result = search("shaped.steps:make_step", tmp_path, baseline="dp:4")
    assert result.found.reference == "the baseline dp:4"
    assert any(one.is_baseline for one in result.found.candidates)
    assert "measured" in (tmp_path / "mesh_rules.toml").read_text()


@pytest.mark.long
def test_a_forgotten_collective_is_flagged_and_not_exported(tmp_path: Path) -> None:
    result = search(str(SCRIPTS / "missing_psum.py"), tmp_path, top=3)
    numerics = {mesh: one.outcome.numerics for mesh, one in measured(result).items()}
    assert numerics == {"dp:4": "agree", "tp:4": "differ", "dp:2,tp:2": "differ"}
    assert result.found.reference == "the step on one device"
    assert "numerics differ" in result.table(width=100)
    assert result.best.create_device_mesh(_four_devices()).shape["dp"] == 4
    rules = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())
    assert rules["rule"][0]["ici"] == {"dp": 4}


@pytest.mark.long
def test_a_callable_is_searched_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_processes(monkeypatch)

    def build(mesh, scale=1):
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        def step(w, x):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        w = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
        return jax.jit(step, donate_argnums=0), (w, x)

    space = tmp_path / "two_axes.toml"
    space.write_text(TWO_AXES)

    def once() -> automesh.Result:
        return api.search(
            build, target="cpu:4", space=space, budget="2m", top=1, results=tmp_path / "results"
        )

    first, again = once(), once()
    assert again.found.facts.provenance.location == first.found.facts.provenance.location
    kept = {one.plan: one.outcome for one in again.found.candidates}
    for one in first.found.candidates:
        here = kept[one.plan]
        assert here == one.outcome or isinstance(here, Measured)  # Measured meanwhile.
    # Nothing that was measured is lost; which of three near ones wins may change as more is.
    measured = {one.plan for one in first.found.candidates if isinstance(one.outcome, Measured)}
    assert measured and all(isinstance(kept[plan], Measured) for plan in measured)
    assert again.best.mesh_axis_names == first.best.mesh_axis_names
    assert len(first.dataframe()) == first.found.funnel.legal - first.found.funnel.waiting
    path = first.save_rules(tmp_path / "saved.toml")
    assert automesh.load(path).select("cpu-4").mesh_shape == first.best.mesh_shape


def _four_devices() -> list[object]:
    import jax

    return jax.devices()[:4]
