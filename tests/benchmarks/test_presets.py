"""The benchmark that makes presets: what is published, what is kept, what is made again."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.evidence import Evidence
from automesh.mesh.rules.rule import MeshRule, rule_for
from automesh.mesh.rules.shipped import PresetOrigin, find_presets, read_preset
from automesh.outcomes import Compiled, Counts, Estimated, Memory, OutOfMemory, ReplayOutcome
from automesh.report.comparison import Comparison
from automesh.report.result import Candidate
from benchmarks.presets import command, making
from benchmarks.presets.command import make
from benchmarks.presets.index import page
from benchmarks.presets.making import Book, Settings, chosen_for, is_current, side_of, sides
from benchmarks.presets.models import MODELS, TARGETS
from benchmarks.presets.published import Published, published
from tests.support.presets import OURS, THEIRS, made, preset_in

BY_NAME = {model.name: model for model in MODELS}
NAMES = ("data", "fsdp", "tensor")
SMALL = replace(BY_NAME["llama3.1-8b"], name="small", rows=4, length=128, axlearn="")
GIB = 2**30


def presets_file(folder: Path, *listed: dict[str, Any]) -> Path:
    path = folder / "presets.json"
    usual = {"id": "p310", "framework": "maxtext", "model": "<any>", "source": "base.yml"}
    usual |= {"selector": "<default>", "ici": {"fsdp": -1}, "dcn": {"dp": -1}, "remat": "full"}
    path.write_text(json.dumps({"presets": [*listed, usual]}))
    return path


def of_maxtext(**changes: Any) -> dict[str, Any]:
    return {
        "id": "p1",
        "framework": "maxtext",
        "model": "small",
        "selector": "tpu-v6e-64",
        "resolved": {"tpu-v6e-64": {}},
        "source": "recipes",
        **changes,
    }


def meshes(found: tuple[Published, ...]) -> list[str]:
    return [one.mesh for one in found]


def test_there_are_six_models_of_the_kinds_that_are_wanted_on_five_targets() -> None:
    kinds = [model.kind for model in MODELS]
    assert len(MODELS) >= 6 and len(TARGETS) == 5
    assert sum("mixture" in kind for kind in kinds) == 2
    for wanted in ("1B", "8B", "70B", "long context"):
        assert any(wanted in kind for kind in kinds), wanted
    assert all(model.space_path.exists() for model in MODELS)


def test_the_batch_of_a_target_goes_into_the_arguments() -> None:
    model = BY_NAME["llama3.1-8b"]
    assert model.arguments("tpu-v6e-64")[-1] == "per_device_batch_size=5"
    assert model.arguments("tpu-v5p-64")[-1] == f"per_device_batch_size={model.rows}"


def test_what_maxtext_has_for_tpus_alone_is_replaced_on_gpus() -> None:
    for model in MODELS:
        asked = model.arguments("gpu-h100-64")
        assert "attention=dot_product" in asked
        assert ("sparse_matmul=false" in asked) == ("mixture" in model.kind)
        assert not {*asked[3:]} & {*model.arguments("tpu-v5p-64")} - {*model.more}


def test_an_open_size_is_filled_and_a_mesh_for_another_number_left_out(tmp_path: Path) -> None:
    path = presets_file(
        tmp_path,
        of_maxtext(ici={"fsdp": 64, "ep": 4}, dcn={"dp": -1}),
        of_maxtext(ici={"fsdp": -1, "tp": 4}, dcn={"dp": -1}, remat="custom"),
        of_maxtext(ici={"fsdp": -1, "cp": 8}, dcn={}, seq_len=100_000),
    )
    found = published(SMALL, "tpu-v6e-64", path)
    assert meshes(found) == ["fsdp:16,tensor:4", "fsdp:64"]
    assert "custom" in found[0].remark and "recipes" in found[0].source


def test_those_for_the_target_itself_come_first_and_none_twice(tmp_path: Path) -> None:
    path = presets_file(
        tmp_path,
        of_maxtext(ici={"fsdp": -1, "tp": 2}, dcn={}, selector="x", resolved={"tpu-v6e-256": {}}),
        of_maxtext(ici={"fsdp": -1}, dcn={}),
        of_maxtext(ici={"fsdp2": -1}, dcn={}),
    )
    assert meshes(published(SMALL, "tpu-v6e-64", path)) == ["fsdp:64", "fsdp:32,tensor:2"]


def test_the_first_rule_of_axlearn_that_matches_is_laid_row_by_row(tmp_path: Path) -> None:
    def rule(selector: str, **mesh: int) -> dict[str, Any]:
        return {"id": selector, "framework": "axlearn", "model": "fuji", "selector": selector,
                "mesh": mesh, "source": "fuji.py"}  # fmt: skip

    path = presets_file(
        tmp_path, rule("<default>", fsdp=-1), rule("gpu-h100-64", dp=-1, fsdp=8),
        rule("tpu-v5p-.*", dp=-1, fsdp=8),
    )  # fmt: skip
    model = replace(SMALL, axlearn="fuji")
    assert meshes(published(model, "tpu-v5p-64", path)) == ["fsdp:32", "data:4,fsdp:8"]
    assert meshes(published(model, "gpu-h100-64", path)) == ["dcn.data:8,fsdp:8"]
    (both,) = published(model, "tpu-v6e-64", path)
    assert both.mesh == "fsdp:64"
    assert "MaxText for <default>" in both.source and "AXLearn's fuji" in both.source


def test_the_real_file_has_meshes_for_every_pair() -> None:
    for model in MODELS:
        for target in TARGETS:
            found = published(model, target)
            assert found and len(set(meshes(found))) == len(found)
    on_v5p = published(BY_NAME["llama3.1-8b"], "tpu-v5p-64")
    assert meshes(on_v5p) == ["fsdp:32", "data:4,fsdp:8"]


# Candidates and sides.


def candidate(text: str, outcome: Any, *, memory: int = GIB, estimated_s: float = 0.0) -> Candidate:
    mesh, *settings = text.split()
    knobs = tuple(tuple(setting.split("=")) for setting in settings)
    plan = Plan(axes=parse_mesh(mesh, NAMES), knobs=knobs)  # pyright: ignore[reportArgumentType]
    return Candidate(
        plan=plan,
        outcome=outcome,
        standing=Comparison(verdict="not_measured"),
        peak_bytes=memory,
        estimated=estimate(estimated_s) if estimated_s else None,
    )


def estimate(step_s: float, memory: int = GIB) -> Estimated:
    return Estimated(
        step_s=step_s,
        bracket_s=(step_s, step_s),
        bound_s=0.0,
        memory_bytes=memory,
        causes=(("compute", step_s),),
    )


def compiled(step_s: float) -> Compiled:
    memory = Memory(
        argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0, peak_bytes=GIB
    )
    replay = ReplayOutcome(
        step_s=step_s,
        bracket_s=(step_s, step_s),
        causes=(("compute", step_s),),
        communication_s=(),
        busy_s=(),
        mfu=0.5,
    )
    counts = Counts(flops=1, hbm_bytes=1, collectives=())
    return Compiled(
        fingerprint="x", memory=memory, counts=counts, step_s=step_s, compile_s=1.0, replay=replay
    )


REFUSED = OutOfMemory(stage="compile", needed_bytes=50 * GIB, limit_bytes=GIB, detail="too large")


def test_a_published_mesh_gets_the_knobs_that_suit_it_best() -> None:
    large = candidate("fsdp:32 remat=minimal", estimate(1.0), memory=99 * GIB)
    slow = candidate("fsdp:32 remat=full", estimate(2.0))
    other = candidate("data:32 remat=full", estimate(0.5))
    assert chosen_for([large, slow, other], "fsdp:32", 10 * GIB) is slow
    seen = candidate("fsdp:32 remat=minimal", compiled(1.5))
    assert chosen_for([seen, slow], "fsdp:32", 10 * GIB) is seen
    refused = candidate("fsdp:32 remat=minimal", REFUSED, estimated_s=1.0)
    assert chosen_for([refused, slow], "fsdp:32", 10 * GIB) is slow
    assert chosen_for([refused], "fsdp:32", 10 * GIB) is refused
    assert chosen_for([other], "fsdp:32", 10 * GIB) is None


def test_a_side_never_claims_more_than_its_outcome() -> None:
    one = Published(mesh="fsdp:32", source="MaxText", remark="published with remat full")
    estimated = side_of(candidate("fsdp:32", estimate(2.0)), one)
    assert (estimated.kind, estimated.step_s, estimated.source) == ("estimated", 2.0, "MaxText")
    replayed = side_of(candidate("fsdp:32", compiled(1.5), estimated_s=1.4))
    assert (replayed.kind, replayed.step_s, replayed.estimated_s) == ("compiled", 1.5, 1.4)
    refused = side_of(candidate("fsdp:32", REFUSED, estimated_s=1.0), one)
    assert (refused.kind, refused.step_s, refused.memory_bytes) == ("too large", 0.0, 50 * GIB)


def test_a_published_mesh_that_was_not_compiled_in_time_stays_estimated() -> None:
    model, target = BY_NAME["llama3.1-8b"], "tpu-v5p-64"
    one, other, *_ = published(model, target)
    estimated = side_of(candidate(f"{one.mesh} remat=full", estimate(2.0)), one)
    nothing: Any = SimpleNamespace(candidates=())
    found = {side.source: side for side in sides(model, target, nothing, GIB, [estimated])}
    assert found[one.source] == estimated
    assert found[other.source].kind == "failed"
    assert "no plan of the search space" in found[other.source].remark


# What is kept.


def rule(target: str, mesh: str) -> MeshRule:
    plan = Plan(axes=parse_mesh(mesh, NAMES), knobs=(("remat_policy", "full"),))
    evidence = Evidence(kind="estimated", step_s=1.0)
    return rule_for(plan, selector=target, evidence=evidence, batch_axes=("data", "fsdp"))


def settings(folder: Path) -> Settings:
    return Settings(
        folder=folder, studies=folder / "s", budget="1m", timeout="1m", top=3, workers=1
    )


def test_a_book_is_read_back_with_its_other_targets(tmp_path: Path) -> None:
    book = Book.open(SMALL, tmp_path)
    book.keep("tpu-v6e-64", made(), rule("tpu-v6e-64", "fsdp:64"))
    book.keep("tpu-v5p-64", made(ours=None, reason="why"), None)
    again = Book.open(SMALL, tmp_path)
    again.keep("tpu-v5p-64", made(), rule("tpu-v5p-64", "fsdp:32"))
    kept = read_preset("maxtext/small", tmp_path / "maxtext" / "small.toml")
    assert kept.targets == ("tpu-v5p-64", "tpu-v6e-64")  # as the list of targets has them
    assert kept.rules.select("tpu-v6e-64").mesh_shape.ici_mesh_shape == (1, 64, 1)
    assert kept.records["tpu-v5p-64"] == made()
    text = (tmp_path / "maxtext" / "small.toml").read_text()
    assert text.count(f"# {made().arguments}\n[[rule]]\nmatch = ") == 2


def test_a_book_without_a_rule_can_be_read(tmp_path: Path) -> None:
    Book.open(SMALL, tmp_path).keep("tpu-v6e-64", made(ours=None, reason="why"), None)
    (kept,) = find_presets(folder=tmp_path)
    assert kept.targets == () and kept.records["tpu-v6e-64"].reason == "why"


def test_another_version_of_a_compiler_makes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"jax": "0.0", "libtpu": "0.0", "maxtext": "0.0"}
    monkeypatch.setattr(making, "installed_version", lambda name: installed.get(name, ""))
    asked = made().arguments
    assert is_current(made(), asked)
    assert not is_current(made(), f"{asked} num_vocab_tiling=8")
    installed["libtpu"] = "0.1"
    assert not is_current(made(), asked)
    assert is_current(made(versions={"jax": "0.0"}), asked)


@pytest.mark.parametrize(
    ("kept", "missing", "done"),
    [
        (None, "", ["estimates", "compiles"]),
        (None, "no libtpu", ["estimates"]),
        ({"is_final": False}, "", ["compiles"]),
        ({"is_final": True}, "", []),
        ({"is_final": True, "versions": {"jax": "older"}}, "", ["estimates", "compiles"]),
        ({"is_final": True, "arguments": "of before"}, "", ["estimates", "compiles"]),
    ],
)
def test_only_what_is_missing_is_made(
    kept: dict[str, Any] | None,
    missing: str,
    done: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    def estimates(book: Book, target: str, _: Settings) -> None:
        told.append("estimates")
        book.keep(target, made(is_final=False), rule(target, "fsdp:32"))

    monkeypatch.setattr(command, "estimate", estimates)
    monkeypatch.setattr(command, "compile_best", lambda *_: told.append("compiles"))
    monkeypatch.setattr(command, "has_compiler", lambda _: missing)
    monkeypatch.setattr(making, "installed_version", lambda _: "0.0")
    if kept is not None:
        book = Book.open(SMALL, tmp_path)
        book.keep("tpu-v5p-64", made(**kept), rule("tpu-v5p-64", "fsdp:32"))
    make(SMALL, "tpu-v5p-64", settings(tmp_path), estimates_only=False)
    assert told == done
    told.clear()
    make(SMALL, "tpu-v5p-64", settings(tmp_path), estimates_only=True)
    assert told == []


def test_a_search_that_is_refused_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise UsageError("MaxText refuses its arguments: no attention on gpu")

    monkeypatch.setattr(making, "_search", refused)
    book = Book.open(SMALL, tmp_path)
    making.estimate(book, "gpu-h100-64", settings(tmp_path))
    told: PresetOrigin = book.made["gpu-h100-64"]
    assert told.ours is None and told.is_final and "no attention" in told.reason
    assert book.rules == {}


@pytest.mark.skipif(importlib.util.find_spec("maxtext") is not None, reason="MaxText is installed")
@pytest.mark.plugin("frameworks")
def test_what_this_machine_lacks_takes_nothing_from_what_is_known(tmp_path: Path) -> None:
    """Five pairs lost their estimates to a module that was not installed."""
    book = Book.open(SMALL, tmp_path)
    book.keep("tpu-v5p-64", made(is_final=False, legal=112), rule("tpu-v5p-64", "fsdp:32"))
    before = {path.name: path.read_bytes() for path in book.path.parent.iterdir()}
    with pytest.raises(SystemExit, match="MaxText is not installed"):
        command.main(target=["tpu-v5p-64"], folder=tmp_path)
    assert {path.name: path.read_bytes() for path in book.path.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", ""),
        ("raise UsageError('MaxText needs the module grain, which is not installed')",
         "MaxText needs the module grain, which is not installed"),
        ("raise SystemExit('the interpreter is too old')", "the interpreter is too old"),
    ],
)  # fmt: skip
@pytest.mark.plugin("frameworks")
def test_what_maxtext_prints_while_it_is_imported_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    """No preset was made where MaxText was whole: it prints that its diagnostics are stubs."""
    stand_in = tmp_path / "sitecustomize.py"
    stand_in.write_text(
        "from automesh.errors import UsageError\n"
        "from automesh_frameworks.steps import maxtext\n"
        "def check_installed():\n"
        "    print('[NO-OP] mldiagnostics: dependency missing; using stub.')\n"
        f"    {code or 'return'}\n"
        "maxtext.check_installed = check_installed\n"
    )
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    assert making.missing_of_maxtext() == said


# The index page.


def test_the_page_says_what_is_faster_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset_in(tmp_path)
    monkeypatch.setattr("benchmarks.presets.index.MODELS", (SMALL,))
    text = page(find_presets(folder=tmp_path))
    assert (
        "Of 5 pairs of a model and a target 1 are compiled, 0 estimated only, 2 have no rule"
        in text
    )
    (row,) = [
        line for line in text.splitlines() if line.startswith(f"| tpu-v5p-64 | `{THEIRS.plan}")
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[6] == f"{THEIRS.step_s / OURS.step_s:.3f}" == "1.200"
    assert "the published spends" in cells[7] and "ici data" in cells[7]
    assert "published with remat full" in cells[7]
    assert "none: nothing is estimated to fit" in text
    assert "Not made yet:\n\n* small: tpu-7x-64, tpu-v5litepod-64\n" in text


def test_no_ratio_is_made_of_different_kinds_of_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Book.open(SMALL, tmp_path)
    theirs = replace(THEIRS, kind="estimated")
    book.keep("tpu-v5p-64", made(published=(theirs,)), rule("tpu-v5p-64", "fsdp:32"))
    monkeypatch.setattr("benchmarks.presets.index.MODELS", (SMALL,))
    text = page(find_presets(folder=tmp_path))
    (row,) = [
        line for line in text.splitlines() if line.startswith(f"| tpu-v5p-64 | `{THEIRS.plan}")
    ]
    assert [cell.strip() for cell in row.strip("|").split("|")][6] == ""
