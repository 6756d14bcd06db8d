"""Scripts without `build` are run up to their step: unmodified, on any mesh over their axes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from automesh.tuner.request import UNMODIFIED, defines, parse_entry
from tests.support import paths
from tests.support.paths import GOLDEN, ROOT

SCRIPTS = paths.SCRIPTS / "capture"
# Script -> its mesh on four devices, its step, the leaves that are carried, axes of the batch.
FOUND = {
    "compiled_step.py": ("data:2,model:2", "train_step", 2, ["data"]),
    "decorated_step.py": ("dp:2,tp:2", "train_step", 2, ["dp"]),
    "flax_mnist.py": ("data:4,model:1", "train_step", 13, ["data"]),
    "haliax_loop.py": ("data:4,model:1", "train_step", 7, ["data"]),
    "nnx_step.py": ("fsdp:2,tensor:2", "train_step", 14, ["fsdp"]),
    "optax_example.py": ("batch:2,hidden:2", "step", 7, ["batch"]),
    "trainer_class.py": ("replica:2,shard:2", "train_step", 2, ["replica", "shard"]),
    "lm1b/main.py": ("data:1,fsdp:4,tensor:1", "train_step", 17, ["data", "fsdp"]),
}
IN_CI = ("trainer_class.py",)


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    return {**kept, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "COLUMNS": "100"}


def captured(
    script: Path, *argv: str, meshes: str = "", step: str = "", split: str = ""
) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.jobs.captured_script",
            meshes,
            step,
            split,
            str(script),
            *argv,
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in FOUND],
)
def test_the_step_of_a_script_gives_the_same_losses_on_every_mesh(script: str) -> None:
    mesh, step, carried, batch_axes = FOUND[script]
    first, last = mesh.partition(":")[0], mesh.rpartition(",")[2].partition(":")[0]
    meshes = [f"{first}:4", f"{first}:2,{last}:2", f"{first}:1"]
    seen = captured(SCRIPTS / script, meshes="/".join(meshes))
    assert seen["mesh"] == mesh
    assert seen["step"] == step
    assert seen["carried"] == carried
    assert seen["batch_axes"] == batch_axes
    assert list(seen["losses"]) == meshes
    reference = seen["losses"][meshes[-1]][0]
    assert len(set(reference)) > 1, "state is carried on"
    for visits in seen["losses"].values():
        for losses in visits:
            assert losses == pytest.approx(reference, rel=2e-4)


# Scripts that cannot be captured, by what is wrong with them.
HOPELESS = {
    "no-jit": "print('nothing to do')",
    "exits-early": "import sys\nif len(sys.argv) < 2:\n    sys.exit(2)",
    "error-before-the-step": "x = 1\nraise ValueError('no data')",
    "asks-for-input": "name = input('which data set? ')",
    "missing-module": "import no_such_module",
    "missing-part-of-a-module": "import jax.no_such_module",
    "asks-for-gpus": "import jax\ndevices = jax.devices('gpu')",
    "missing-file": "text = open('tokens.txt').read()",
    "step-called-once": "import jax\nprint(jax.jit(lambda x: x + 1)(1.0))",
    "pmap": """
        import jax, jax.numpy as jnp
        f = jax.pmap(lambda x: x + 1)
        f(jnp.ones((4, 2)))
    """,
    "other-shapes-every-time": """
        import jax, jax.numpy as jnp
        mesh = jax.make_mesh((4,), ("data",))
        f = jax.jit(lambda x: x.sum())
        for length in range(1, 5):
            f(jnp.ones(length))
    """,
    "donated-output-is-read": """
        import functools, jax, jax.numpy as jnp
        mesh = jax.make_mesh((4,), ("data",))
        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(w, x):
            return w + x.sum(0), x.sum()
        w, x = jnp.ones(8), jnp.ones((4, 8))
        first = w
        for _ in range(3):
            w, loss = train_step(w, x)
            print(float(first.sum()))
    """,
    "values-decide-a-shape": """
        import jax, jax.numpy as jnp
        @jax.jit
        def train_step(w, x):
            kept = x[x[:, 0] > 0]
            return w - jax.grad(lambda w: jnp.mean((kept @ w) ** 2))(w)
        w = jnp.ones((4, 2))
        for _ in range(5):
            w = train_step(w, jnp.ones((8, 4)))
    """,
    "only-a-function": "def make_step(mesh):\n    ...",
    "functions-without-a-mesh": """
        import jax
        def set_flags():
            return jax.make_mesh((4,), ("data",))
        mesh = set_flags()
    """,
    "trained_already": """
        import jax
        mesh = jax.make_mesh((4,), ("data",))
        @jax.jit
        def train_step(w):
            return w - jax.grad(lambda w: (w ** 2).sum())(w)
        w, done = jax.numpy.ones(8), 60  # As read from a checkpoint.
        for step in range(done, 60):
            w = train_step(w)
    """,
}
REFUSALS = GOLDEN / "capture" / "refusals.txt"


def refusal(text: str, folder: Path) -> str:
    """What is said of a script, its sentence and its hint."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text).lstrip())
    seen = captured(script)
    assert "\n" not in seen["error"] + seen["hint"], "one sentence"
    return f"{seen['error']}\n  {seen['hint']}\n"


def read_refusals() -> dict[str, str]:
    """By what is wrong with the script; kept as `[NAME]`, the sentence, the hint."""
    parts = REFUSALS.read_text().split("\n[")
    return {name.strip("[]"): said for name, _, said in (part.partition("\n") for part in parts)}


def write_refusals() -> None:
    """Writes them anew.

    python -c "from tests.program.capture import test_run_script as t; t.write_refusals()"
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [f"[{name}]\n{refusal(text, Path(folder))}" for name, text in HOPELESS.items()]
    REFUSALS.write_text("\n".join(said))


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", HOPELESS)
def test_what_cannot_be_captured_says_why_in_one_sentence(name: str, tmp_path: Path) -> None:
    said = refusal(HOPELESS[name], tmp_path)
    assert read_refusals()[name].strip() == said.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["import jax\ntwice = jax.tree_map", "from jax.experimental import no_such_name"]
)
def test_a_name_that_the_installed_package_lacks_is_told_without_a_second_run(
    text: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    hint = captured(script)["hint"]
    assert re.fullmatch(r"the jax [\d.]+ that is installed here has no such name: .*", hint)


@pytest.mark.slow
def test_a_name_that_a_module_of_the_users_own_lacks_is_not_told_so(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import helpers\nhelpers.train()")
    assert "fails by itself, too" in captured(script)["hint"]


CLOSES_OVER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
rows = jax.device_put(np.ones((64, 16), np.float32), NamedSharding(mesh, P("data")))
@jax.jit
def train_step(w):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(w)
    return w - 0.1 * g, loss
w = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P()))
for _ in range(4):
    w, loss = train_step(w)
"""


@pytest.mark.slow
def test_an_array_that_the_step_closes_over_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLOSES_OVER)
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "check-script", "train.py", "--target", "cpu:4"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^closed_over\[0\] +f32\[64,16\] +P\(data\)", done.stdout, re.M)
    assert "~held" not in done.stdout


TWO_STEPS = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("dp",), (jax.sharding.AxisType.Auto,))
split = jax.jit(lambda key: tuple(jax.random.split(key)))
def big(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
def small(w):
    return w * 0.5
big, small = jax.jit(big), jax.jit(small)
key = jax.random.key(0)
for _ in range(5):
    key, sub = split(key)  # Comes back, too, before there is any step.
w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("dp")))
v = jnp.ones((8,))
for _ in range(4):
    key, sub = split(key)
    w = big(w, jax.random.normal(sub, (16, 64)))
    v = small(v)
"""


@pytest.mark.slow
def test_the_largest_of_several_steps_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_STEPS)
    usual = captured(script)
    assert usual["step"] == "big"
    assert "small" in usual["others"]
    assert captured(script, step="small")["step"] == "small"
    wrong = captured(script, step="smal")
    assert "calls no jitted function `smal` (did you mean `small`?)" in wrong["error"]


# Script -> what is split, meshes of the parts and of the other axes, the script's own among them.
SPLIT = {
    "split_data.py": ("data=dp,fsdp", ["dp:4", "fsdp:4", "dp:2,fsdp:2"]),
    "optax_example.py": ("batch=dp,fsdp", ["dp:2,hidden:2", "fsdp:2,hidden:2", "dp:2,fsdp:2"]),
    "lm1b/main.py": ("data=dp,zero", ["fsdp:4", "zero:2,fsdp:2", "dp:2,zero:2"]),
    "decorated_step.py": ("dp=data,fsdp", ["data:2,tp:2", "fsdp:2,tp:2", "data:2,fsdp:2"]),
}


@pytest.mark.parametrize(
    "script",
    [
        "split_data.py",
        *(pytest.param(name, marks=pytest.mark.long) for name in SPLIT if name != "split_data.py"),
    ],
)
def test_a_split_axis_gives_the_losses_of_the_script_itself(script: str) -> None:
    split, meshes = SPLIT[script]
    seen = captured(SCRIPTS / script, meshes="/".join(meshes), split=split)
    reference = seen["losses"][meshes[0]][0]
    assert len(set(reference)) > 1
    for visits in seen["losses"].values():
        for losses in visits:
            assert losses == pytest.approx(reference, rel=2e-4)


def searched(script: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "automesh", "search", str(script), *options),
            *("--rules", str(folder / "mesh_rules.toml"), "--results", str(folder / "results")),
        ],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )


# What a pipeline of one stage would do is not written.
PIPELINE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "stage"))
stages = mesh.shape["stage"]
if stages < 2:
    raise ValueError("a pipeline has two stages or more")
def run(w, x):
    ring = [(i, (i + 1) % stages) for i in range(stages)]
    for _ in range(stages):
        x = jax.lax.ppermute(jnp.tanh(x @ w[0]), "stage", ring)
    return jax.lax.pmean(jnp.mean(x**2), ("data", "stage"))
split = jax.shard_map(run, mesh=mesh, in_specs=(P("stage"), P("data")), out_specs=P())
@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(split)(w, x)
    return w - grad, loss
w = jax.device_put(np.ones((4, 64, 64), np.float32), NamedSharding(mesh, P("stage")))
for step in range(5):
    x = jax.device_put(np.ones((16, 64), np.float32), NamedSharding(mesh, P("data")))
    w, loss = train_step(w, x)
"""


@pytest.mark.slow
def test_a_script_of_one_axis_that_refuses_one_device_is_searched(tmp_path: Path) -> None:
    """jax refuses to send from a device to itself twice."""
    script = tmp_path / "train.py"
    text = PIPELINE.replace('.reshape(-1, 2), ("data", "stage")', ', ("stage",)')
    text = text.replace('("data", "stage")', '"stage"').replace('P("data")', "P()")
    script.write_text(text)
    done = searched(script, tmp_path, "--target", "cpu:4", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert [one["mesh"] for one in json.loads(done.stdout)["candidates"]] == ["stage:4"]


@pytest.mark.slow
def test_a_script_that_refuses_one_device_is_searched(tmp_path: Path) -> None:
    """The whole search ended with its failure on a mesh that nobody had asked for."""
    script = tmp_path / "train.py"
    script.write_text(PIPELINE)
    done = searched(script, tmp_path, "--target", "cpu:4", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    made = {one["mesh"]: one["evidence"] for one in found["candidates"]}
    assert {"data:2,stage:2", "stage:4"} <= made.keys()
    assert any(
        "`data:4` cannot be built" in one and "two stages" in one for one in found["notices"]
    )


@pytest.mark.long
def test_what_a_split_axis_left_whole_is_split_by_its_second_part(tmp_path: Path) -> None:
    options = ("--target", "cpu:4", "--split", "data=dp,fsdp", "--dry-run", "--json")
    done = searched(SCRIPTS / "split_data.py", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["axes"] == ["dp", "fsdp"]
    assert found["split"] == "data=dp,fsdp"
    assert found["baseline"] == "dp:4"
    memory = {one["mesh"]: one["peak_bytes"] for one in found["candidates"]}
    assert memory["fsdp:4"] < memory["dp:2,fsdp:2"] < memory["dp:4"]
    said = " ".join(found["notices"])
    assert 'write P(("dp", "fsdp")) for P("data") in the script' in said
    assert 'put its state on NamedSharding(mesh, P(..., "fsdp"))' in said


@pytest.mark.long
def test_a_split_axis_is_searched_to_a_measured_rule_that_says_so(tmp_path: Path) -> None:
    options = ("--target", "cpu:4", "--split", "data=dp,fsdp", "--budget", "3m")
    done = searched(SCRIPTS / "split_data.py", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())
    assert written["axes"] == ["dp", "fsdp"]
    assert written["rule"][0]["evidence"]["kind"] == "measured"
    assert written["rule"][0]["evidence"]["split"] == "data=dp,fsdp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "message", "hint"),
    [
        ("dat=dp,fsdp", "has no axis `dat` (did you mean `data`?)", "its axes are data"),
        ("data=dp", "replaces one axis by one other", "--split data=dp,fsdp"),
        ("data", "does not name an axis and the axes that replace it", "--split data=dp,fsdp"),
        ("data=data,fsdp", "keeps the name `data` for one of its parts", "new names"),
        ("data=dp,dp", "names the axis `dp` twice", "once"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    split: str, message: str, hint: str, tmp_path: Path
) -> None:
    done = searched(
        SCRIPTS / "split_data.py", tmp_path, *("--target", "cpu:4", "--split", split, "--dry-run")
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert message in said
    assert hint in said


@pytest.mark.long
@pytest.mark.parametrize("script", FOUND)
def test_a_script_is_searched_to_a_measured_rule(script: str, tmp_path: Path) -> None:
    rules = tmp_path / "mesh_rules.toml"
    done = searched(SCRIPTS / script, tmp_path, "--target", "cpu:4", "--budget", "3m")
    assert done.returncode == 0, done.stderr
    mesh, step, _, _ = FOUND[script]
    written = tomllib.loads(rules.read_text())
    assert written["axes"] == [part.partition(":")[0] for part in mesh.split(",")]
    assert written["rule"][0]["evidence"]["kind"] == "measured"
    said = " ".join(done.stdout.split())
    assert f"run up to its step `{step}`" in said
    assert f"its mesh {mesh} is made at" in said
    assert not re.search(r"\d failed", done.stdout)
    own = ",".join(part for part in mesh.split(",") if not part.endswith(":1"))
    assert f"{own} (script)" in said, "the script's own mesh is measured, too"
    for line in done.stderr.splitlines():
        if line.startswith("note: "):
            assert done.stderr.count(line) == 1


GUIDE = (ROOT / "docs" / "porting.md").read_text().partition("## Scripts without build")[2]
COMMANDS = re.findall(r"^automesh search train.py.*$", GUIDE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    # One in CI: that for devices that are not here.
    [one if "--dry-run" in one else pytest.param(one, marks=pytest.mark.long) for one in COMMANDS],
)
def test_a_command_of_the_guide_works(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    options = shlex.split(command)[3:]
    source = "large_model.py" if "--target" in options else "split_data.py"
    script.write_text((SCRIPTS / source).read_text())
    options = options[: options.index("--")] if "--" in options else options
    here = [] if "--target" in options else ["--target", "cpu:4"]
    done = searched(
        script, tmp_path, *here, *options, *([] if "--dry-run" in options else ["--dry-run"])
    )
    assert done.returncode == 0, done.stderr
    assert "run up to its step `train_step`" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("def build(mesh): ...", True),
        ("build = 1", True),
        ("from steps import build", True),
        ("import steps as build", True),
        ("from steps import *", True),
        ("if True:\n    def build(mesh): ...", True),
        ("try:\n    from fast import build\nexcept ImportError:\n    build = None", True),
        ("def main():\n    def build(mesh): ...", False),
        ("class Trainer:\n    def build(self): ...", False),
        ("print('build')", False),
        ("xs = [build for build in range(3)]", False),
        ("this is no python", True),
        ("def build(config): ...\nmodel = build({'width': 8})", False),
        ("def build(m): ...\nif __name__ == '__main__':\n    step = build(make_mesh(8))", True),
        ("def build(config): ...", True),
        ("from json import *", False),
    ],
)
def test_a_build_is_seen_in_the_text_of_a_script(text: str, there: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    assert defines(script, "build") == there
    assert (parse_entry(str(script)).function == UNMODIFIED) == (not there)
    # Who names a function means that one.
    assert parse_entry(f"{script}:build").function == "build"


def test_a_build_is_looked_for_in_files_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("from layers import *\ndef build(width): ...\n")
    (tmp_path / "layers.py").write_text("from models import *\ndef dense(x): ...\n")
    (tmp_path / "steps.py").write_text("def build(mesh): ...\n")
    script = tmp_path / "script.py"
    for text, there in (
        ("from models import *\nmodel = build(8)", False),
        ("from models import build\nmodel = build(8)", False),
        ("from layers import dense", False),
        ("from steps import *", True),
        ("from steps import build\nbuild(mesh)", True),
    ):
        script.write_text(text)
        assert defines(script, "build") == there, text
