"""Kauldron's adapter, with a stand-in for Kauldron; `test_real_kauldron.py` has the real one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.axes import format_mesh, parse_mesh
from automesh.plugins.framework import framework_at
from automesh.program.lower.lowering import compile_program, lower
from automesh.program.script.build import build_on
from automesh.program.script.workload import Workload
from automesh.tuner.request import parse_entry, read_request
from automesh_frameworks.steps import kauldron as adapter
from automesh_frameworks.steps.registry import FRAMEWORKS
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"
CONFIG = """
from kauldron.data.py.base import Rows
from kauldron.konfig import ConfigDict
from kauldron.train import Model


def get_config():
    return ConfigDict(
        workdir=None,
        train_ds=Rows(batch_size=64, width=128),
        model=ConfigDict(make=Model, remat=False),
        aux={"layers": 12, "rate": 0.1},
    )
"""
# A strategy of the user's own, which has axes of its own.
OWN = """
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from kauldron.data.py.base import Rows
from kauldron.konfig import ConfigDict
from kauldron.train import Model
from kauldron.utils.sharding_utils import ShardingStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(ShardingStrategy):
    mesh: Any = None
    batch: Any = dataclasses.field(init=False)
    params: Any = dataclasses.field(init=False)

    def __post_init__(self):
        mesh = self.mesh
        batch = params = None
        if mesh is not None:
            batch = NamedSharding(mesh, P("data"))
            params = {
                "up": NamedSharding(mesh, P(None, "model")),
                "down": NamedSharding(mesh, P("model", None)),
            }
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "params", params)


def get_config():
    own = Mesh(np.array(jax.devices()).reshape(8, 2), ("data", "model")) if SIZES else None
    return ConfigDict(
        workdir=None,
        train_ds=Rows(batch_size=64, width=128),
        model=ConfigDict(make=Model, remat=False),
        sharding=Blocks(mesh=own),
    )
"""
FSDP = "FSDPSharding(min_size_to_shard_mb=0)"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget("kauldron", adapter._kauldron, adapter._flag, adapter._element_spec)  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.py").write_text(CONFIG)
    return f"--cfg={tmp_path / 'config.py'}"


def own(folder: Path, *, sizes: bool) -> str:
    (folder / "own.py").write_text(OWN.replace("SIZES", str(sizes)))
    return f"--cfg={folder / 'own.py'}"


def built(monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str, **knobs: Any) -> Workload:
    monkeypatch.setattr(sys, "argv", ["kauldron", *argv])
    return adapter.build(on, **knobs)


def state_of(workload: Workload) -> dict[str, Any]:
    return workload.args[1]


def shardings() -> Any:
    return importlib.import_module("kauldron.utils.sharding_utils").sharding


def test_the_step_is_the_jitted_one_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    workload = built(monkeypatch, mesh(devices=8), config)
    step, state, batch = workload.args
    assert workload.step is type(step).step
    assert workload.kwargs == {"return_losses": True}
    rows = batch["rows"]
    assert (rows.shape, rows.dtype) == ((64, 128), np.float32)  # As jax takes a float64.
    assert rows.sharding.spec == PartitionSpec("devices")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    assert workload.facts == {"batch": 64, "hidden": 512, "layers": 12}


def test_the_mesh_holds_the_devices_that_were_given_in_their_order(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    devices = np.array(jax.devices()[3:11][::-1]).reshape(1, 8, 1)
    given = Mesh(devices, ("dp", "devices", "tp"))
    workload = built(monkeypatch, given, config, params=FSDP)
    for placed in (state_of(workload)["params"]["up"], workload.args[2]["rows"]):
        assert placed.sharding.mesh.axis_names == ("devices",)
        assert list(placed.sharding.mesh.devices) == list(devices.flat)


def test_kauldrons_own_mesh_stays_what_it_was(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    built(monkeypatch, mesh(devices=4), config)
    assert not set(vars(shardings())) & {"DEVICES_MESH", "REPLICATED", "FIRST_DIM"}
    before = shardings().FIRST_DIM
    workload = built(monkeypatch, mesh(devices=2), config)
    assert shardings().FIRST_DIM is before
    assert before.mesh.size == len(jax.devices())
    assert callable(workload.context)
    with workload.context():
        assert shardings().REPLICATED.mesh.size == 2
    assert shardings().DEVICES_MESH is before.mesh


def test_knobs_are_kauldrons_strategies(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    def specs(**knobs: Any) -> list[Any]:
        state = state_of(built(monkeypatch, mesh(devices=8), config, **knobs))
        leaves = (state["params"]["up"], state["opt_state"]["up"])
        return [leaf.sharding and leaf.sharding.spec for leaf in leaves]

    split, whole = PartitionSpec(None, "devices"), PartitionSpec()
    assert specs() == [whole, None]
    assert specs(params=FSDP) == [split, None]
    assert specs(params="FSDPSharding()") == [whole, None]  # Too small for the default.
    assert specs(params="REPLICATED", opt_state=FSDP) == [whole, split]
    assert specs(params=f"kd.sharding.{FSDP}", opt_state="REPLICATED") == [split, whole]
    asked = "--cfg.sharding=py::kd.sharding.ShardingStrategy(opt_state=kd.sharding.REPLICATED)"
    config_of = f"{config}", asked
    workload = built(monkeypatch, mesh(devices=8), *config_of, opt_state="None")
    assert state_of(workload)["opt_state"]["up"].sharding is None
    with pytest.raises(UsageError, match=r"the knob `params` names no sharding: `FSPD\(\)`"):
        specs(params="FSPD()")


@pytest.mark.parametrize("knobs", [{}, {"params": FSDP}, {"opt_state": FSDP}])
def test_plans_are_the_programs_that_their_strategies_make(
    monkeypatch: pytest.MonkeyPatch, config: str, knobs: dict[str, str]
) -> None:
    """The optimizer's state is where the compiler puts it, unless it is told."""
    monkeypatch.setattr(sys, "argv", ["kauldron", config])
    on = parse_mesh("devices:8", ("devices",))
    program, compiled, _ = compile_program(
        lower(build_on(adapter.build, on, knobs=tuple(knobs.items()))), ()
    )
    placed: Any = compiled.input_shardings[0][0]
    is_split = {
        name: not placed[name]["up"].is_fully_replicated for name in ("params", "opt_state")
    }
    assert is_split == {
        "params": "params" in knobs,
        "opt_state": bool(knobs),
    }
    assert program.donated == (True,) * 5 + (False,)
    assert program.carry.lost == ()


def test_any_key_of_the_configuration_is_a_knob(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    knobs: dict[str, Any] = {"model.remat": True, "model.hidden": 256, "aux.layers": 3}
    workload = built(monkeypatch, mesh(devices=2), config, "--cfg.seed=7", **knobs)
    model = workload.args[0].model
    assert (model.remat, model.hidden) == (True, 256)
    # What the arguments say: facts belong to no plan.
    assert (workload.facts["hidden"], workload.facts["layers"]) == (512, 12)
    with pytest.raises(UsageError, match="keyword argument 'sede'") as caught:
        built(monkeypatch, mesh(devices=2), config, sede=5)
    said = "Kauldron's configuration cannot be resolved: Trainer.__init__() got an unexpected"
    assert caught.value.message.startswith(said)  # And not the configuration that it quotes.
    assert caught.value.hint == "the key is unknown there (did you mean `seed`?)"
    with pytest.raises(UsageError, match="Error accessing 'sharding'") as caught:
        built(monkeypatch, mesh(devices=2), config, **{"sharding.opt_state": "py::None"})
    assert "`--cfg.sharding=py::kd.sharding.ShardingStrategy(" in caught.value.hint


@pytest.mark.parametrize(
    ("argv", "knobs"),
    [
        ((), "params=REPLICATED opt_state=None"),
        (
            ("--cfg.sharding=py::kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding())",),
            "params=FSDPSharding() opt_state=None",
        ),
        (
            ("--cfg.sharding=py::kd.sharding.ShardingStrategy(params=lambda tree: None)",),
            "opt_state=None",
        ),
    ],
)
def test_the_baseline_is_the_strategy_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, config: str, argv: tuple[str, ...], knobs: str
) -> None:
    workload = built(monkeypatch, mesh(devices=4), config, *argv)
    assert workload.baseline == f"dcn.devices:-1,devices:-1 {knobs}"
    text, *_ = f"{workload.baseline}".split()
    assert format_mesh(parse_mesh(text, ("devices",), num_devices=8)) == "devices:8"
    parsed = parse_mesh(text, ("devices",), num_devices=64, num_granules=8)
    assert format_mesh(parsed) == "dcn.devices:8,devices:8"


def test_a_strategy_of_the_users_own_is_given_the_mesh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = mesh(model=2, data=4)
    workload = built(monkeypatch, given, own(tmp_path, sizes=True))
    placed = state_of(workload)["params"]["up"].sharding
    assert placed.spec == PartitionSpec(None, "model")
    assert placed.mesh.axis_names == ("data", "model")
    assert placed.mesh.devices[3, 1] == given.devices[1, 3]
    assert workload.args[2]["rows"].sharding.mesh is placed.mesh
    assert workload.baseline == "data:8,model:2 opt_state=None"
    with pytest.raises(UsageError, match="mesh of Blocks has no axis `devices`") as caught:
        built(monkeypatch, mesh(devices=2), own(tmp_path, sizes=True))
    assert caught.value.hint


def test_axes_are_of_the_types_of_the_users_mesh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = own(tmp_path, sizes=True).partition("=")[2]
    text = Path(path).read_text()
    typed = '("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)'
    Path(path).write_text(text.replace('("data", "model"))', typed))
    # As in a training of Kauldron's, whose constraints are for the other type.
    with pytest.raises(ValueError, match="can only refer to Auto axes"):
        built(monkeypatch, mesh(data=2, model=2), f"--cfg={path}")


def test_a_strategy_without_a_mesh_yet_takes_the_axes_of_the_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = built(monkeypatch, mesh(model=2, data=4), own(tmp_path, sizes=False))
    assert state_of(workload)["params"]["down"].sharding.mesh.axis_names == ("model", "data")
    assert workload.baseline is None


def test_an_axis_that_kauldron_has_not_is_named(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    with pytest.raises(UsageError, match="Kauldron's mesh has no axis `fsdp`; its axes are dev"):
        built(monkeypatch, mesh(fsdp=2), config)
    assert built(monkeypatch, mesh(fsdp=1, devices=2), config)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "name no configuration"),
        (("--cfg=absent.py",), "Kauldron refuses its arguments: flag --cfg=absent.py"),
        (("--cfg=CONFIG", "--eval_names=a"), "Unknown command line flag 'eval_names'"),
        (("--cfg=CONFIG", "more"), "`more` is not an argument of Kauldron"),
        (("--cfg=CONFIG", "--cfg.batch=3"), "keyword argument 'batch'"),
        (("--cfg=CONFIG", "--cfg.optimizer=None"), "it evaluates, and has no training step"),
        (("--cfg=CONFIG", "--cfg.train_ds=None"), "`cfg.train_ds` gives no batch"),
    ],
)
def test_arguments_that_kauldron_refuses_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, config: str, argv: tuple[str, ...], said: str
) -> None:
    words = [word.replace("--cfg=CONFIG", config) for word in argv]
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(devices=2), *words)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("width=128", "width=None", r"gives batches whose shape is open: \(None, None\)"),
        ("width=128", "width=128, weight=2", "cannot be resolved: .*'weight'"),
        ("import Model\n", "import Modell\n", "cannot be imported: .*'Modell'"),
        (
            "aux=",
            "trainstep=TrainStep(sharding=ShardingStrategy()), aux=",
            "`cfg.trainstep.sharding` is another strategy than `cfg.sharding`",
        ),
    ],
)
def test_a_configuration_that_gives_no_step_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = "from kauldron.train import TrainStep\n"
    text += "from kauldron.utils.sharding_utils import ShardingStrategy\n" + CONFIG
    (tmp_path / "other.py").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(devices=2), f"--cfg={tmp_path / 'other.py'}")
    assert caught.value.hint


def test_tensorflow_leaves_the_gpus_to_jax(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    built(monkeypatch, mesh(devices=2), config)
    assert importlib.import_module("kauldron.data.py.base").asked == [([], "GPU")]


def test_a_version_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.delattr(importlib.import_module("kauldron.data.utils"), "get_global_elem_spec")
    with pytest.raises(UsageError, match="has no `get_global_elem_spec`") as caught:
        built(monkeypatch, mesh(devices=2), config)
    assert "1.4.4" in str(caught.value.hint)


def test_a_version_with_another_mesh_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    """Before, plans would have been the programs of all devices, without a word."""
    monkeypatch.delattr(type(shardings()), "DEVICES_MESH")
    with pytest.raises(UsageError, match=r"no `DEVICES_MESH` in `kd\.sharding`") as caught:
        built(monkeypatch, mesh(devices=2), config)
    assert "1.4.4" in str(caught.value.hint)


def test_without_kauldron_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="kauldron")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="Kauldron is not installed") as caught:
        built(monkeypatch, mesh(devices=2), "--cfg=config.py")
    assert caught.value.hint == FRAMEWORKS["kauldron"].install


def test_it_is_found_by_its_name_and_has_its_own_space() -> None:
    entry = parse_entry("kauldron", ["--cfg=config.py"])
    assert framework_at(entry.location) == FRAMEWORKS["kauldron"]
    assert read_request("kauldron", {"args": ()}).space == "kauldron"


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path, config: str) -> None:
    command = [sys.executable, "-m", "automesh", "search", "kauldron", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--", config]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == "devices:4 params=REPLICATED opt_state=None"
    plans = {row["plan"] for row in told["candidates"]}
    assert f"devices:4 params={FSDP} opt_state={FSDP}" in plans


@pytest.mark.slow
def test_a_search_of_the_users_own_axes_and_knobs(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        'batch_axes = ["data"]\n[axes]\ndata = {}\nmodel = {}\n'
        '[constraints]\ndata = { divides = "batch" }\n[knobs]\n"model.remat" = [false, true]\n'
    )
    command = [sys.executable, "-m", "automesh", "search", "kauldron", "--target", "cpu:4"]
    command += ["--space", str(tmp_path / "space.toml"), "--dry-run", "--json"]
    command += ["--results", str(tmp_path), "--", own(tmp_path, sizes=False)]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plans = {row["plan"] for row in json.loads(done.stdout)["candidates"]}
    wanted = {"data:4": "False", "data:2,model:2": "True", "model:4": "False"}
    assert plans >= {f"{sizes} model.remat={value}" for sizes, value in wanted.items()}
