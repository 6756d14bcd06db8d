"""Scripts without `build` are run without their arrays for devices that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.program.capture import discover
from automesh.program.capture.abstract import record
from automesh.program.capture.abstract.record import ValueNeeded
from automesh.program.capture.nouns import Discovery, SourceLine
from automesh.program.capture.world import told
from automesh.program.nouns import Entry
from tests.program.capture.test_run_script import FOUND, SCRIPTS, SPLIT, environment, searched
from tests.support.paths import GOLDEN, ROOT

VALUES = GOLDEN / "capture" / "values.txt"
ENTRY = Entry(kind="script", location="train.py", function="")
# Its step computes for ever.
NEVER_COMPUTED = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))


def loss(w, x):
    return ((x @ w) ** 2).mean()


@jax.jit
def train_step(w, x):
    w = jax.lax.while_loop(lambda w: jnp.all(w == w), lambda w: w * 1.0, w)
    return w - 0.1 * jax.grad(loss)(w, x)


w = jnp.ones((8, 8))
for _ in range(3):
    w = train_step(w, x)
    jax.block_until_ready(w)
    open("computed", "w").close()
"""
# In CI the one whose state is made by eager operations, and the one with Explicit axes.
QUICK = ("optax_example.py", "decorated_step.py")


def bare(script: Path, *argv: str, meshes: str = "", split: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.jobs.abstract_script",
            meshes,
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


def assert_same_steps(seen: dict[str, Any]) -> None:
    assert "error" not in seen, seen
    assert seen["same"], "the same step is found on the same mesh"
    for real, made in seen["meshes"].values():
        assert made["real"] == 0
        assert made["leaves"] == real["leaves"]
        assert made["program"] == real["program"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in FOUND if name not in QUICK)],
)
def test_without_arrays_a_script_has_the_same_step(script: str) -> None:
    first, *_, last = (part.partition(":")[0] for part in FOUND[script][0].split(","))
    assert_same_steps(bare(SCRIPTS / script, meshes=f"{first}:4/{first}:2,{last}:2"))


@pytest.mark.long
@pytest.mark.parametrize("script", SPLIT)
def test_without_arrays_a_split_axis_gives_the_same_step(script: str) -> None:
    split, meshes = SPLIT[script]
    assert_same_steps(bare(SCRIPTS / script, meshes="/".join(meshes), split=split))


# Where Python needs a value, between two steps.
NEEDED = {
    "a-decision": "if (w > 0).all():\n    print('fine')",
    "an-end": "if not loss > 0:\n    break",
    "an-integer": "best = int(loss)",
    "a-numpy-array": "kept = np.asarray(w)",
    "a-list": "kept = w.tolist()",
    "an-index": "kept = [1, 2, 3][jnp.argmax(w[0])]",
}
STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
@jax.jit
def train_step(w, state, x):
    loss = jnp.mean((x @ w) ** 2)
    return w * 0.9, {"count": state["count"] + 1}, loss
w = jax.random.normal(jax.random.key(0), (ROWS, 128))
state = {"count": jnp.zeros((), jnp.int32)}
for step in range(5):
    x = jax.device_put(np.ones((16, ROWS), np.float32), NamedSharding(mesh, P("data")))
    w, state, loss = train_step(w, state, x)
"""


def script_that(needs: str, folder: Path, *, rows: int = 64) -> Path:
    script = folder / "train.py"
    script.write_text(STEP.lstrip().replace("ROWS", str(rows)) + textwrap.indent(needs, "    "))
    return script


def large_script_that(needs: str, folder: Path) -> Path:
    script = script_that(needs, folder, rows=2**24)
    script.write_text(script.read_text().replace("np.ones(", "jnp.ones("))
    return script


def sentence(needs: str, folder: Path) -> str:
    seen = bare(large_script_that(needs, folder))
    assert "\n" not in seen["error"] + seen["hint"]
    return f"{seen['error']}\n  {seen['hint']}\n"


def write_sentences() -> None:
    """Writes them anew.

    python -c "from tests.program.capture import test_abstract_arrays as t; t.write_sentences()"
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [f"[{name}]\n{sentence(text, Path(folder))}" for name, text in NEEDED.items()]
    VALUES.write_text("\n".join(said))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NEEDED)
def test_a_value_that_is_not_there_is_asked_for_at_a_line(name: str, tmp_path: Path) -> None:
    parts = (part.partition("\n") for part in VALUES.read_text().split("\n["))
    kept = {key.strip("[]"): said for key, _, said in parts}
    assert kept[name].strip() == sentence(NEEDED[name], tmp_path).strip()


# Each line holds with arrays, too.
COMPUTED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"), (AxisType.KIND,) * 2)
jax.set_mesh(mesh)
split, rows = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("data"))
host = np.arange(64 * 128, dtype=np.float32).reshape(64, 128) / 8192
x = jax.device_put(host, split)
big = jnp.asarray(np.full((512, 512), 3.0, np.float32))
host[:] = -1  # What the script has put is what it was then.
assert abs(np.asarray(x)[5, 7] - (5 * 128 + 7) / 8192) < 1e-6
assert np.asarray(big).sum() == 3 * 512 * 512
count = jnp.sum(x > 0.5)
assert int(count) == count.item() == 64 * 128 // 2 - 1, int(count)
assert (x >= 0).all() and not (x > 2).any()
doubled = jax.jit(lambda x: x * 2, out_shardings=rows, donate_argnums=0)
y = doubled(x + 0)
z = doubled(y)
assert np.allclose(np.asarray(z), 4 * np.asarray(y) / 2) and np.asarray(z).max() > 3.9
assert len(y.tolist()) == 64 and [1, 2, 3][count // 2000] == 3
on_abstract = NamedSharding(mesh.abstract_mesh, P("data"))
spread = jax.jit(lambda x: x * 3, out_shardings=on_abstract)(x)
assert abs(np.asarray(spread).max() - 3) < 0.01
table = np.ones((512, 512), np.float32)
summed = jax.jit(lambda x: x + table)(big)
table[:] = 5  # Jit has taken it as it was.
assert np.asarray(summed).max() == 4
three = jnp.asarray(np.full((512, 512), 3))
assert np.asarray(three).dtype == np.int32 and not np.asarray(three).flags.writeable
labels = jnp.arange(2**17) % 10
few = labels[labels > 6]
assert few.shape == (39321,) and jnp.unique(labels).shape == (10,)
assert jnp.unique(jnp.round(x * 4)).shape == (5,) and jnp.nonzero(labels == 3)[0].shape == (13107,)
large = np.asarray(jax.random.normal(jax.random.key(1), (512, 512)) + big)
assert abs(large.mean() - 3) < 0.01
w = jax.device_put(jnp.ones((128, 128)), NamedSharding(mesh, P("model")))
@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, loss
for step in range(5):
    w, loss = train_step(w, x)
    print(f"{loss:.3f}")
    ok = loss > 0
    assert ok and not jnp.logical_not(ok)
    assert 0 < np.asarray(w).mean() < 1, np.asarray(w).mean()
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_values_that_a_script_cannot_do_without_are_computed(kind: str, tmp_path: Path) -> None:
    """The script was started again with its arrays."""
    script = tmp_path / "train.py"
    text = COMPUTED.replace("KIND", kind)
    if kind == "Explicit":
        text = text.replace("x @ w", "jnp.einsum('bi,ij->bj', x, w, out_sharding=P('data', None))")
    script.write_text(text)
    seen = bare(script)
    assert seen.get("step") == "train_step", seen
    assert len(seen["printed"]) == 1, "a loss is not computed to be shown"


MADE_OF_PARTS = (
    "made = jax.make_array_from_callback((64, 64), NamedSharding(mesh, P('data')), "
    "lambda index: np.ones((64, 64), np.float32)[index]); is_zero = np.asarray(made).sum() == 0\n"
    "if is_zero: raise SystemExit('zeros')"
)


def test_unknown_values_stay_unknown(tmp_path: Path) -> None:
    """An array of a callback is not of zeros."""
    said = bare(script_that(MADE_OF_PARTS, tmp_path))
    assert "train.py:13 needs the value of `made`" in said["error"]


# Each is asked for a value that it must not make up.
NOT_KNOWN = {
    # What Python answers may be another thing later.
    "callback": "made = jax.pure_callback(lambda: np.ones((512, 512), np.float32), "
    "jax.ShapeDtypeStruct((512, 512), jnp.float32))",
    # It is made of the nan that stands for a loss.
    "nan": "made = jnp.asarray(1 / float(loss)) * jnp.ones((512, 512))",
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_cannot_be_computed_later_is_not_made_up(name: str, tmp_path: Path) -> None:
    asked = f"{NOT_KNOWN[name]}; kept = np.asarray(made)"
    said = bare(script_that(asked, tmp_path))
    assert "train.py:13 needs the value of `made`" in said["error"]


LIMITS = """
from automesh.program.capture.abstract import deferred
from automesh.program.capture.abstract import record
from automesh.program.capture.abstract.record import ValueNeeded
counts = [jnp.sum(jax.random.normal(jax.random.key(seed), (512, 512)) > 0) for seed in range(2)]
jnp.stack(counts), jnp.asarray(counts[0]), counts[0].astype(jnp.float32), jnp.ones(9)[counts[0]]
assert deferred._ALIVE.result_bytes == 0, "nobody has asked for a value"
deferred.MOST_BYTES = 3 * 2**20
split = NamedSharding(mesh, P("data"))
kept = [jax.device_put(jax.random.normal(jax.random.key(n), (512, 512)), split) for n in range(4)]
made = 0
for one in kept:
    try:
        made += np.asarray(one).size
    except ValueNeeded:
        break
assert made == 3 * 2**18, made
del kept, one
assert deferred._ALIVE.result_bytes == 0
"""


def test_only_what_is_asked_for_is_computed_and_kept_within_a_limit(tmp_path: Path) -> None:
    script = script_that("pass", tmp_path)
    head, loop, rest = script.read_text().partition("for step in")
    script.write_text(head + LIMITS.lstrip() + loop + rest)
    assert bare(script).get("step") == "train_step"


@pytest.mark.slow
def test_a_script_that_decides_by_a_cheap_number_has_its_value(tmp_path: Path) -> None:
    """It was started again with its arrays, since it had ended with nan."""
    seen = bare(script_that("if not loss > 0: break\nassert not loss < 0", tmp_path))
    assert (seen["step"], seen["printed"]) == ("train_step", [])
    large = large_script_that("assert not loss > 0", tmp_path)
    assert bare(large)["step"] == "train_step"


def test_numbers_that_are_shown_are_nan_and_their_lines_are_told(tmp_path: Path) -> None:
    shown = (
        "print(loss, f'{loss:.3f}', float(loss), loss.item(), w)\n"
        "print(np.mean([jax.device_get(loss), multihost_utils.process_allgather(loss)[0]]))\n"
        "print(loss.addressable_data(0), loss.tolist(), round(loss, 3))\n"
        "if jnp.isnan(loss) or jnp.isinf(loss) or jnp.isnan(float(loss)) or loss > 1e9: exit()\n"
        "assert math.isfinite(loss) and np.isfinite(jax.device_get(loss)) and not loss < 0\n"
        "assert not math.isnan(sum([float(loss), 1.0]) / 2), 'it diverges'\n"
        "order = jax.random.permutation(jax.random.key(step), 100_000).reshape(-1, 50)\n"
        "for rows, _ in zip(order, range(2)):\n"
        "    assert len({int(row) for row in rows} | set(np.arange(100_000)[rows])) == 50\n"
        "assert w.is_ready() and w.on_device_size_in_bytes() >= w.nbytes, w.format\n"
    )
    script = script_that(shown, tmp_path)
    imported = "import math; from jax.experimental import multihost_utils\n"
    script.write_text(imported + script.read_text())
    seen = bare(script)
    assert seen["step"] == "train_step"
    assert seen["printed"] == [f"train.py:{line}" for line in range(14, 20)], seen


# A constraint under `vmap` leaves a dimension to the compiler.
TRACED_ONCE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
at, traced = NamedSharding(mesh, P(None, "data")), []
w = jax.vmap(lambda w: jax.lax.with_sharding_constraint(w, at))(jnp.ones((3, 64, 64)))
w = jax.jit(lambda w: w[0], out_shardings=at)(w)
@jax.jit
def train_step(w, x):
    traced.append("once")
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, loss
for step in range(5):
    x = jax.device_put(np.ones((16, 64), np.float32), NamedSharding(mesh, P("data")))
    if step == 0:
        print(train_step.lower(w, x).compile().memory_analysis())
    w, loss = train_step(w, x)
    assert traced == ["once"], f"{len(traced)} traces"
"""


@pytest.mark.slow
def test_a_step_is_traced_once_though_it_is_described_compiled_and_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRACED_ONCE)
    assert bare(script).get("step") == "train_step"


def test_small_arrays_are_made_here_if_a_script_cannot_do_without(tmp_path: Path) -> None:
    script = script_that(MADE_OF_PARTS, tmp_path)
    done = searched(script, tmp_path, "--target", "tpu-v5e-16", "--dry-run")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "the arrays of the script are made on this machine, because train.py:13 needs" in said


@pytest.mark.slow
def test_large_arrays_are_not_made_and_the_line_is_told(tmp_path: Path) -> None:
    script = large_script_that(NEEDED["a-decision"], tmp_path)
    done = searched(script, tmp_path, "--target", "tpu-v5e-16", "--dry-run")
    assert done.returncode == 2
    assert "train.py:13 needs the value of" in " ".join(done.stderr.split())


@pytest.mark.long
def test_a_model_that_no_machine_here_holds_is_estimated(tmp_path: Path) -> None:
    script = SCRIPTS / "large_model.py"
    seen = bare(script)
    assert seen["peak"] > 200e9
    assert seen["live"] < 1e6
    assert seen["resident"] < 600e6
    limit = ("--worker-memory", "3GiB")
    done = searched(script, tmp_path, *("--target", "tpu-v5e-256", "--dry-run", "--json"), *limit)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["evidence"] for one in found["candidates"]} == {"estimated"}
    assert found["baseline"] == "fsdp:256"
    assert any("with 576 GiB of arguments" in notice for notice in found["notices"])


@pytest.mark.slow
# Of two nodes, the batch alone spans both.
@pytest.mark.parametrize(
    ("target", "meshes"),
    [("tpu-v5e-16", 5), pytest.param("gpu-h100-16", 4, marks=pytest.mark.long)],
)
def test_a_script_is_estimated_for_devices_that_are_not_here(
    target: str, meshes: int, tmp_path: Path
) -> None:
    options = ("--target", target, "--dry-run", "--json")
    done = searched(SCRIPTS / "optax_example.py", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["candidates"]) == meshes
    said = " ".join(found["notices"])
    assert "the script's mesh is made of 4 of 16 devices" in said
    assert (
        "run without its arrays, the script reads its numbers as nan: optax_example.py:46" in said
    )


LARGE_HERE = """
import json, sys
from dataclasses import replace
from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import Entry, StepRef
from automesh.worker.handlers import jobs
from automesh.worker.messages import DiscoverJob, InspectJob, VisitJob
jobs.surroundings.device_memory_bytes = lambda: 1000
emit = lambda event: {}
entry = Entry(kind="script", location=sys.argv[1], function="")
capture = jobs.handle(DiscoverJob(step=StepRef(entry=entry)), emit).capture
entry = replace(entry, function=capture.step.name, capture=capture)
step = StepRef(entry=entry)
inspection = jobs.handle(InspectJob(step=step, axis_names=capture.mesh.names), emit)
visit = VisitJob(step=step, plan=Plan(axes=parse_mesh("data:2,model:2", capture.mesh.names)),
                 cache_dir="", steps=1, samples=1, loss_steps=3)
seen = jobs.handle(visit, emit)
print(json.dumps([capture.without_arrays, inspection.used_axes, seen.losses, seen.values]))
"""


def test_what_no_single_device_holds_has_arrays_only_where_it_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE_HERE, str(SCRIPTS / "compiled_step.py")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    is_bare, axes, losses, values = json.loads(done.stdout.splitlines()[-1])
    assert is_bare
    assert axes == ["data", "model"]
    assert len(set(losses)) == 3
    assert values == "user"


def test_who_fails_with_arrays_too_is_told_why_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second error alone would seem to come from nowhere."""

    def fails(*_: object, bare: bool = False, **__: object) -> Discovery:
        if bare:
            raise ValueNeeded("train.py:7 needs the value of `x`")
        raise UsageError("the kernel cannot run here", hint="choose another one")

    monkeypatch.setattr(discover, "discover", fails)
    starts: list[str] = []
    with pytest.raises(
        UsageError, match=r"cannot run here; .* because train\.py:7 needs"
    ) as caught:
        discover.discover_for_absent(ENTRY, again=starts.append)
    assert (caught.value.hint, starts) == ("choose another one", ["with its arrays"])


@dataclass
class Found:
    notices: tuple[str, ...] = ()


def test_a_dry_run_makes_no_arrays_unless_the_script_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a dry run for attached devices made the arrays and ran the first step."""
    ran: list[bool] = []

    def finds(*_: object, bare: bool = False, **__: object) -> Discovery:
        ran.append(bare)
        if bare and asks:
            raise ValueNeeded("train.py:7 needs the value of `x`")
        return found

    found: Any = Found()
    monkeypatch.setattr(discover, "discover", finds)
    starts: list[str] = []
    asks: list[str] = []
    for _ in range(2):
        again = discover.discover_here(
            ENTRY, device_memory_bytes=lambda: 0, again=starts.append, measures_nothing=True
        )
        assert ("because train.py:7" in str(again.notices)) is bool(asks)
        asks.append("a value")
    assert (ran, starts) == ([True, True, False], ["with its arrays"])
    monkeypatch.setattr(told, "wanted_devices", lambda: 4)
    with pytest.raises(ValueNeeded):  # A run with its arrays would want other devices, too.
        discover.discover_here(ENTRY, device_memory_bytes=lambda: 0, measures_nothing=True)
    assert ran == [True, True, False, True]


@pytest.mark.slow
def test_a_dry_run_does_not_compute_the_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NEVER_COMPUTED)
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:4", "--dry-run"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "data:4" in done.stdout
    assert not (tmp_path / "computed").exists()


def test_a_line_that_waits_for_a_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`while True: ... if error < 0.1: break` does not end with nan."""
    line = SourceLine(file="train.py", line=7)
    monkeypatch.setattr(record, "asking_line", lambda: line)
    monkeypatch.setattr(record, "_MOST_READS", 3)
    monkeypatch.setattr(record, "STATE", record.ArraysState())
    for _ in range(3):
        record.note_read()
    with pytest.raises(ValueNeeded, match=r"train\.py:7 reads a number more than 3 times"):
        record.note_read()
