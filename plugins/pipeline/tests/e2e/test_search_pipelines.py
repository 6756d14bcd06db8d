"""Whole searches in which pipelines are tried: measured on virtual devices, compiled for slices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import automesh
from automesh import api
from automesh.outcomes import Compiled, Measured
from automesh.report.blocks.terminal import render
from automesh.report.predicted import stage_bytes
from automesh.report.table import report_of
from tests.support.paths import ROOT, SCRIPTS

SCRIPT = SCRIPTS / "pipelined.py"
SPACE = """\
[axes]
pp = { min = 2, max = 4, dcn = true }
dp = {}
tp = { max = 2 }
[constraints]
pp = { divides = "num_layers" }
"dp*microbatches" = { divides = "batch" }
[knobs]
microbatches = [2, 4]
schedule = ["1f1b", "zb_h1"]
"""


@pytest.mark.long
def test_a_search_over_pipelines_ends_with_a_measured_rule(tmp_path: Path) -> None:
    space, rules = tmp_path / "space.toml", tmp_path / "mesh_rules.toml"
    space.write_text(SPACE)
    result = api.search(
        SCRIPT,
        target="cpu:8",
        space=space,
        budget="2m",
        top=2,
        rules=rules,
        results=tmp_path / "results",
    )
    measured = [one for one in result.found.candidates if isinstance(one.outcome, Measured)]
    assert len(measured) >= 2
    for one in measured:
        assert one.plan.sizes["pp"] > 1
        assert one.outcome.numerics == "agree" and one.outcome.values == "user"
        assert len(stage_bytes(one)) == one.plan.sizes["pp"]
    # zb_h1 with 2 microbatches on 4 ranks
    assert dict(result.found.funnel.ruled_out)["schedule for pp and microbatches"] > 0
    config = automesh.load(rules).select("cpu-8")
    assert config.evidence.kind == "measured"
    best = measured[0].plan
    assert dict(config.create_device_mesh(devices=jax.devices()[:8]).shape) == best.sizes
    assert dict(config.knobs) == dict(best.knobs)
    assert config.evidence.stage_bytes == stage_bytes(measured[0])
    study = tmp_path / "results" / Path(result.found.facts.provenance.results_dir).name
    assert "bubble" in api.explain(study, str(best)).text(width=100)
    said = render(report_of(api.show(study).found, top=5), width=200, colour=False)
    assert f"{len(stage_bytes(measured[0]))} stages of" in said


@pytest.mark.long
def test_an_example_is_trained_on_the_pipeline_of_a_rule(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'schema = 1\naxes = ["pp", "dp", "fsdp", "ep", "tp", "sp"]\nbatch_axes = ["dp", "fsdp"]\n'
        '[[rule]]\nmatch = "cpu-8"\nici = { pp = 2, fsdp = 2, tp = 2 }\n'
        'knobs = { microbatches = 4, schedule = "interleaved", virtual_stages = 2 }\n'
    )

    def losses(*words: str) -> list[float]:
        environment = {key: value for key, value in os.environ.items() if key[:4] != "JAX_"}
        command = [sys.executable, str(ROOT / "examples" / "dense_lm.py"), "--layers", "4"]
        done = subprocess.run(
            [*command, "--steps", "5", *words],
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return [float(one) for one in re.findall(r"loss (\d+\.\d+)", done.stdout)]

    found = losses("--devices", "8", "--rules", str(rules))
    assert len(found) == 5 and found[-1] < found[0]
    assert found == pytest.approx(losses("--devices", "1"), abs=1e-3)


TWO_RANKS = """\
[axes]
pp = { min = 2, max = 2, dcn = true }
dp = { dcn = true }
[constraints]
"dp*microbatches" = { divides = "batch" }
[knobs]
microbatches = [2]
schedule = ["1f1b"]
"""


def search_for_slices(target: str, space: str, folder: Path) -> api.Result:
    (folder / "space.toml").write_text(space)
    return api.search(
        SCRIPT,
        target=target,
        space=folder / "space.toml",
        budget="5m",
        timeout="10m",
        top=1,
        rules=folder / "mesh_rules.toml",
        results=folder / "results",
    )


@pytest.mark.tpu
@pytest.mark.long
def test_a_search_for_slices_ends_with_a_compiled_rule_and_the_memory_of_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    space = SPACE.replace("[2, 4]", "[4]").replace(', "zb_h1"', "")
    result = search_for_slices("v5e:2x2*2", space, tmp_path)
    best = result.found.candidates[0]
    assert isinstance(best.outcome, Compiled) and best.outcome.replay is not None
    assert str(best.plan).startswith("dcn.pp:2")
    pipeline = best.outcome.pipeline
    assert pipeline is not None and all(one.stored for one in pipeline.programs)
    assert best.outcome.memory.peak_bytes == max(stage_bytes(best))
    causes = dict(best.outcome.replay.causes)
    assert causes["bubble"] > 0 and causes["dcn pp"] > 0
    assert sum(causes.values()) == pytest.approx(best.outcome.step_s)
    config = automesh.load(tmp_path / "mesh_rules.toml").select(result.found.facts.devices.target)
    assert config.evidence.kind == "compiled"
    assert config.evidence.stage_bytes == stage_bytes(best)


@pytest.mark.tpu
@pytest.mark.long
def test_stages_may_span_some_of_the_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    result = search_for_slices("v5e:1x1*4", TWO_RANKS, tmp_path)
    best = result.found.candidates[0]
    assert str(best.plan).startswith("dcn.pp:2,dcn.dp:2")
    assert isinstance(best.outcome, Compiled) and best.outcome.replay is not None
    causes = dict(best.outcome.replay.causes)
    assert causes["dcn pp"] > 0 and causes["dcn dp"] > 0
