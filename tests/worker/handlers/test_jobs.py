"""Jobs on real scripts, as a worker does them: inspect, compile, visit."""

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import pytest

from automesh.errors import UsageError
from automesh.hlo import read_module
from automesh.hlo.schedule.nouns import executed
from automesh.hlo.schedule.read import read_schedule
from automesh.hlo.store import ModuleStore
from automesh.jsonio import from_json, to_json
from automesh.outcomes import Failed, OutOfMemory
from automesh.program.lower.compiled import out_of_memory
from automesh.program.nouns import CompileAnswer, Entry, Inspection, Lowered, StepRef, VisitAnswer
from automesh.worker.blame import OutcomeError
from automesh.worker.handlers import jobs, visits
from automesh.worker.handlers.memory import WorkerMemory
from automesh.worker.messages import DevicesJob, InspectJob
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import Worker, own_process, script
from tests.support.worker_jobs import surroundings

__all__ = ["own_process"]

MESHES = ("dp:1", "dp:8", "dp:2,tp:4")


@pytest.fixture
def worker(own_process):
    def start(name, names=("dp", "fsdp", "tp")):
        return Worker(script(SCRIPTS / f"{name}.py"), own_process / "cache", names=names)

    return start


def close(first, second, tolerance=1e-5):
    assert len(first) == len(second) > 0
    assert all(abs(a - b) <= tolerance * max(abs(a), 1e-3) for a, b in zip(first, second))


@pytest.mark.slow
def test_adamw_with_synthetic_state(worker):
    adamw = worker("adamw")
    seen = adamw.inspect()
    assert from_json(to_json(seen, Inspection), Inspection) == seen
    assert [device.id for device in seen.devices] == list(range(16))
    assert seen.knobs == (("donate", True),)
    assert seen.used_axes == ("dp", "fsdp", "tp")
    assert not seen.has_init
    # Three trees of two matrices, a counter, the batch: all float32.
    assert seen.argument_bytes == 4 * (3 * (32 * 64 + 64 * 16) + 1 + 16 * (32 + 16))
    visits = [adamw.visit(mesh, steps=2, samples=3) for mesh in MESHES]
    for answer in visits:
        assert answer.values == "synthetic"
        assert answer.loss_dtype == "float32"
        assert len(answer.samples_s) == 3
        assert all(0 < sample < 10 for sample in answer.samples_s)
        assert len(answer.losses) == 2 * 3, "a loss and a norm for each of three steps"
        assert len(set(answer.losses)) == 6, "the state moves on"
        close(answer.losses, visits[0].losses)
    again = adamw.visit("dp:8")
    assert again.losses == visits[1].losses, "state is rebuilt at every visit"
    assert from_json(to_json(again, VisitAnswer), VisitAnswer) == again


def test_a_program_is_kept_where_it_is_asked_for(worker, own_process):
    adamw = worker("adamw")
    assert adamw.compile("dp:2,tp:4").stored == ""
    adamw.store_dir = str(own_process / "modules")
    answer = adamw.compile("dp:2,tp:4")
    kept = ModuleStore(own_process / "modules").find(answer.stored)
    assert kept is not None
    assert (kept.memory, kept.label) == (answer.memory, "dp:2,tp:4")
    schedule = read_schedule(read_module(kept.module), [("dp", 2), ("fsdp", 1), ("tp", 4)], [1] * 3)
    assert sum(times for _, times in executed(schedule.body)) > 3


def test_a_program_that_cannot_be_kept_is_compiled_all_the_same(worker, own_process, capfd):
    (own_process / "modules").write_text("no folder")
    adamw = worker("adamw")
    adamw.store_dir = str(own_process / "modules")
    assert adamw.compile("dp:8").stored == ""
    assert "cannot be kept" in capfd.readouterr().err


@pytest.mark.slow
def test_the_plan_visited_longest_ago_makes_room_for_the_next(worker, monkeypatch):
    """Loaded programs hold memory maps, of which a process may have so many and no more."""
    monkeypatch.setattr(visits, "MOST_READY", 2)
    jobs._MEMORY.ready.clear()
    adamw = worker("adamw")
    first = {mesh: adamw.visit(mesh).losses for mesh in ("dp:1", "dp:8")}
    adamw.visit("dp:1")
    adamw.visit("dp:2,tp:4")
    shapes = [{axis.name: axis.size for axis in plan.axes} for _, plan, _ in jobs._MEMORY.ready]
    assert [(one["dp"], one["tp"]) for one in shapes] == [(1, 1), (2, 4)]
    assert adamw.visit("dp:8").losses == first["dp:8"]


def test_what_a_process_spends_once_is_told_apart_from_what_a_plan_takes(written, monkeypatch):
    """A fresh process loads the script anew, while a plan that comes later finds it loaded."""
    slow = written("""
import time

time.sleep(0.5)

def build(mesh):
    return jax.jit(lambda w, x: (x @ w).sum()), (struct(mesh, (16, 16)), struct(mesh, (8, 16)))
""")
    slow.inspect()
    monkeypatch.setattr(jobs, "_MEMORY", WorkerMemory())  # as in another process
    begun_s = time.perf_counter()
    first = slow.visit("dp:2")
    took_s = time.perf_counter() - begun_s
    assert first.start_s >= 0.5
    assert first.setup_s + first.start_s <= took_s
    assert slow.visit("dp:4").start_s == first.start_s


@pytest.mark.slow
def test_a_visit_is_not_credited_with_what_a_failed_one_has_loaded(written, monkeypatch):
    slow = written("""
import time

time.sleep(2.0)

def build(mesh):
    if mesh.shape["dp"] == 4:
        raise MemoryError
    return jax.jit(lambda w, x: (x @ w).sum()), (struct(mesh, (16, 16)), struct(mesh, (8, 16)))
""")
    slow.inspect()
    monkeypatch.setattr(jobs, "_MEMORY", WorkerMemory())  # as in another process
    with pytest.raises(MemoryError):
        slow.visit("dp:4")
    begun_s = time.perf_counter()
    second = slow.visit("dp:2")
    assert time.perf_counter() - begun_s - second.setup_s < 1.9  # Credited, it would be over 2.
    assert second.start_s >= 2.0


def test_compile_reads_memory_and_counts(worker):
    adamw = worker("adamw")
    one, data, both = (adamw.compile(mesh) for mesh in MESHES)
    assert from_json(to_json(data, CompileAnswer), CompileAnswer) == data
    assert data.counts.flops == one.counts.flops / 8
    assert not one.counts.collectives
    assert {part.axes for part in data.counts.collectives} == {("dp",)}
    assert {part.axes for part in both.counts.collectives} == {("dp",), ("tp",)}
    for answer in (one, data, both):
        memory = answer.memory
        assert memory.peak_bytes == (
            memory.argument_bytes
            + memory.output_bytes
            - memory.alias_bytes
            + memory.temporary_bytes
        )
        assert memory.temporary_bytes > 0
        assert answer.compile_s > 0
    # Donated state comes back in place.
    assert one.memory.alias_bytes == 4 * (3 * (32 * 64 + 64 * 16) + 1)
    assert adamw.compile("dp:1", knobs=[("donate", False)]).memory.alias_bytes == 0


def test_parent_can_stop_a_duplicate_before_it_is_compiled(worker):
    adamw = worker("adamw")
    adamw.inspect()
    adamw.events.clear()
    adamw.go = False
    answer = adamw.compile("dp:8")
    assert isinstance(answer, Lowered)
    lowered = [event for event in adamw.events if event["event"] == "lowered"]
    assert lowered == [{"event": "lowered", "fingerprint": answer.fingerprint, "reply": True}]
    assert adamw.stages() == ["load", "build", "lower"]
    adamw.go = True
    adamw.events.clear()
    assert adamw.compile("dp:8").fingerprint == answer.fingerprint
    assert adamw.stages() == ["load", "build", "lower", "compile"]
    adamw.events.clear()
    assert adamw.visit("dp:8").fingerprint == answer.fingerprint
    assert adamw.stages() == ["load", "build", "lower", "compile", "materialize", "run"]


@pytest.mark.slow
def test_optimizer_state_without_shardings(worker):
    state = worker("unsharded_state")
    seen = state.inspect()
    assert seen.has_init
    assert (seen.baseline, seen.tokens_per_step) == ("dp:-1", 16)
    # All state is sharded, moments included: a quarter of it (tp) and half of the batch (dp).
    placed = state.compile("dp:2,tp:4").memory.argument_bytes
    assert placed == 4 * (3 * (32 * 64 + 64 * 16) // 4 + 1 + 16 * (32 + 16) // 2)
    visits = [state.visit(mesh) for mesh in MESHES]
    for answer in visits:
        assert answer.values == "user"
        close(answer.losses, visits[0].losses)
    assert state.visit("dp:1").losses == visits[0].losses


def test_references_under_explicit_axes_that_return_metrics_alone(worker):
    refs = worker("refs_explicit")
    seen = refs.inspect()
    assert seen.axis_types == ("explicit",) * 3
    assert seen.facts == (("batch", 16), ("width", 32))
    visits = [refs.visit(mesh, steps=2, samples=1) for mesh in MESHES]
    for answer in visits:
        assert len(set(answer.losses)) == 3, "references are updated from step to step"
        close(answer.losses, visits[0].losses)
    assert refs.visit("dp:8").losses == visits[1].losses, "references are made anew at every visit"
    assert refs.compile("dp:8").memory.alias_bytes == 2 * 4 * 32 * 32
    assert jax.sharding.get_mesh().empty


def test_static_config_argument_and_keywords(worker):
    static = worker("static_config")
    assert static.inspect().facts == (("layers", 2),)
    visits = [static.visit(mesh) for mesh in MESHES]
    for answer in visits:
        close(answer.losses, visits[0].losses)
    # Facts may follow knobs: only those at default knobs are compared.
    assert len(static.visit("dp:8", knobs=[("layers", 3)]).losses) == 3
    with pytest.raises(UsageError, match="`build` takes no knob `depth`; its knobs are: `layers`"):
        static.compile("dp:8", knobs=[("depth", 3)])


def test_function_of_a_package_with_a_context(own_process, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    entry = Entry(kind="module", location="shaped.steps", function="make_step")
    shaped = Worker(entry, own_process / "cache", names=("dp", "tp"))
    assert shaped.inspect().used_axes == ("dp", "tp")
    visits = [shaped.visit(mesh, steps=2, samples=2) for mesh in ("dp:1", "dp:4", "dp:2,tp:2")]
    for answer in visits:
        assert answer.losses[0] > answer.losses[1] > answer.losses[2], (
            "`advance` carries the weights"
        )
        close(answer.losses, visits[0].losses)


def test_missing_psum_shows_under_tp_alone(worker):
    wrong = worker("missing_psum", names=("dp", "tp"))
    one, data, tensor = (wrong.visit(mesh).losses for mesh in ("dp:1", "dp:8", "dp:2,tp:4"))
    close(data, one)
    assert abs(tensor[0] - one[0]) > 0.2 * one[0]


WRITTEN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from automesh import Workload
def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    return w - 0.1 * grad, loss
"""


@pytest.fixture
def written(own_process):
    def start(text, names=("dp", "tp")):
        path = own_process / f"written_{len(list(own_process.glob('written_*')))}.py"
        path.write_text(WRITTEN + text)
        return Worker(script(path), own_process / "cache", names=names)

    return start


def test_traced_step(written):
    traced = written("""
def build(mesh):
    jitted = jax.jit(step, donate_argnums=0)
    return jitted.trace(struct(mesh, (16, 16), None, "tp"), struct(mesh, (8, 16), "dp"))
""")
    assert traced.inspect().used_axes == ("dp", "tp")
    one, both = traced.visit("dp:1"), traced.visit("dp:2,tp:2")
    close(one.losses, both.losses)
    assert one.losses[0] > one.losses[2]


def test_real_arrays_are_the_users_values_and_survive_donation(written):
    arrays = written("""
SHARED = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
KEPT = jnp.asarray(SHARED)
def build(mesh):
    x = jax.device_put(SHARED[:8], NamedSharding(mesh, P("dp")))
    return jax.jit(step, donate_argnums=0), (KEPT, x)
""")
    first = arrays.visit("dp:8", steps=1, samples=1)
    assert first.values == "user"
    assert arrays.visit("dp:8").losses == first.losses
    close(arrays.visit("dp:1").losses, first.losses)
    assert all(
        not isinstance(leaf, jax.Array)
        for ready in jobs._MEMORY.ready.values()
        for leaf in jax.tree.leaves((ready.tree, ready.workload.args))
    )


def test_replicated_state_settles_into_the_shardings_of_the_outputs(written):
    settling = written("""
def build(mesh):
    def spread(w, x):
        w, loss = step(w, x)
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P("tp"))), loss
    return spread, (struct(mesh, (16, 16)), struct(mesh, (8, 16), "dp"))
""")
    close(settling.visit("tp:4", steps=3, samples=1).losses, settling.visit("dp:1").losses)
    # The second iteration's program is the one that is compiled: weights come in sharded.
    memory = settling.compile("tp:4").memory
    assert memory.argument_bytes == 4 * (16 * 16 // 4 + 8 * 16)


def test_real_references_of_the_script_keep_their_values(written):
    shared = written("""
REF = jax.new_ref(jnp.eye(16) * 0.5)
def build(mesh):
    def update(ref, x):
        ref[...], loss = step(ref[...], x)
        return loss
    return update, (REF, jnp.ones((8, 16)))
""")
    first = shared.visit("dp:1", steps=2, samples=1)
    assert first.values == "user"
    assert first.losses[0] == 0.25
    assert shared.visit("dp:1").losses == first.losses


def test_real_state_that_settles_elsewhere_keeps_its_values(written):
    settling = written("""
def build(mesh):
    def spread(w, x):
        w, loss = step(w, x)
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P("tp"))), loss
    w = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
    return spread, (jax.device_put(w, NamedSharding(mesh, P())), w[:8])
""")
    answer = settling.visit("tp:4", steps=2, samples=1)
    assert answer.values == "user"
    close(answer.losses, settling.visit("dp:1").losses)
    assert settling.visit("tp:4").losses == answer.losses


def test_init_leaves_static_arguments_out(written):
    static = written("""
def build(mesh):
    def configured(w, mode, x):
        return step(w, x) if mode == "train" else None
    def init(mesh):
        return jnp.eye(16) * 0.5, jnp.ones((8, 16))
    args = jax.ShapeDtypeStruct((16, 16), jnp.float32), "train", struct(mesh, (8, 16), "dp")
    return Workload(configured, args, static_argnums=1, init=init)
""")
    answer = static.visit("dp:4")
    assert answer.values == "user"
    assert answer.losses[0] == 0.25


def test_donated_argument_that_nothing_replaces_is_made_anew(written):
    lost = written("""
def build(mesh):
    def evaluate(w, x):
        return jnp.mean((x @ w) ** 2), jnp.sum(w + 1)
    args = struct(mesh, (16, 16)), struct(mesh, (8, 16), "dp")
    return Workload(evaluate, args, donate_argnums=(0, 1))
""")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        answer = lost.visit("dp:4", steps=3, samples=2)
    assert len(answer.samples_s) == 2
    assert answer.losses[0:2] == answer.losses[2:4] == answer.losses[4:6]


def test_loss_before_state_is_carried_when_donated(written):
    turned = written("""
def build(mesh):
    def turned(w, x):
        w, loss = step(w, x)
        return loss, w
    return jax.jit(turned, donate_argnums=0), (struct(mesh, (16, 16)), struct(mesh, (8, 16), "dp"))
""")
    losses = turned.visit("dp:4").losses
    assert losses[0] > losses[1] > losses[2]


def test_keys_integers_and_unused_arguments(written):
    mixed = written("""
def build(mesh):
    def noisy(w, tokens, key, mask, unused):
        noise = jax.random.normal(key, w.shape)
        x = w[tokens] * mask[:, None]
        return w - 0.01 * noise, jnp.mean(x**2) + 0 * noise.sum()
    key = jax.eval_shape(lambda: jax.random.key(0))
    return noisy, (struct(mesh, (16, 16), "tp"), struct(mesh, (8,), "dp", dtype=jnp.int32), key,
                   struct(mesh, (8,), dtype=jnp.bool_), struct(mesh, (3, 5)))
""")
    close(mixed.visit("dp:2,tp:2").losses, mixed.visit("dp:1").losses, 1e-4)


def test_default_advance_is_the_users_when_given(written):
    own = written("""
CALLS = []
def advance(outputs, args):
    CALLS.append(len(args))
    return outputs[0], args[1], args[2]
def build(mesh):
    def configured(w, mode, x):
        return step(w, x) if mode == "train" else None
    args = struct(mesh, (16, 16)), "train", struct(mesh, (8, 16), "dp")
    return Workload(configured, args, advance=advance)
""")
    losses = own.visit("dp:4").losses
    assert losses[0] > losses[1] > losses[2]
    bad = written("""
def build(mesh):
    args = struct(mesh, (16, 16)), struct(mesh, (8, 16), "dp")
    return Workload(step, args, advance=lambda o, a: o[0])
""")
    with pytest.raises(UsageError, match="`advance` returned an ArrayImpl, not the 2 arguments"):
        bad.visit("dp:4")


def test_fact_that_depends_on_the_mesh(written):
    facts = written("""
def build(mesh):
    size = mesh.shape["dp"]
    args = struct(mesh, (16, 16)), struct(mesh, (8, 16), "dp")
    return Workload(step, args, facts={"batch": 8 // size})
""")
    with pytest.raises(UsageError, match="it is 8 on one device and 2 on `dp:4`"):
        facts.compile("dp:4")


def test_axis_that_cannot_be_lowered_at_one_size_counts_as_used(written, capfd):
    picky = written("""
def build(mesh):
    if mesh.shape["tp"] == 2:
        raise ValueError("tp must be 1 or 4")
    return step, (struct(mesh, (16, 16)), struct(mesh, (8, 16)))
""")
    assert picky.inspect().used_axes == ("tp",)
    assert "`tp:2` cannot be lowered (ValueError: tp must be 1 or 4)" in capfd.readouterr().err


def test_jax_that_cannot_start_is_the_fault_of_neither_script_nor_plan(written, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu': libtpu is in use\nby another")

    scripts = [
        written("def build(mesh): return step, (struct(mesh, (16, 16)), struct(mesh, (8, 16)))\n"),
        written("jax.devices()\n"),
    ]
    with monkeypatch.context() as broken:
        broken.setattr(jax, "devices", devices)
        # Another test of this process may have put functions of ours under jax's names.
        broken.setattr("automesh.worker.handlers.scripts.attached", devices)
        for one in scripts:
            with pytest.raises(OutcomeError) as caught:
                one.inspect()
            outcome = caught.value.outcome
            assert isinstance(outcome, Failed)
            assert outcome.stage == "start"
            assert outcome.reason == (
                f"jax could not start on `{jax.config.jax_platforms}`: RuntimeError: "
                "Unable to initialize backend 'tpu': libtpu is in use"
            )
            assert one.stages() == ["load", "start"]
        with pytest.raises(OutcomeError):
            jobs.handle(DevicesJob(), lambda _: {})
    assert scripts[0].inspect().used_axes == ()


def test_a_script_may_configure_jax_before_its_devices_are_there(own_process):
    path = own_process / "configures.py"
    path.write_text(
        'import jax\njax.config.update("jax_num_cpu_devices", 3)\n'
        + WRITTEN
        + "def build(mesh): return step, (struct(mesh, (16, 16)), struct(mesh, (8, 16)))\n"
    )
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=own_process / "logs",
        memory_limit_bytes=2**31,
    ) as pool:
        answer = pool.run(InspectJob(step=StepRef(entry=script(path)), axis_names=("dp",)), 60)
    assert isinstance(answer, Inspection), answer
    assert len(answer.devices) == 3


def test_arrays_that_build_makes_are_not_kept_for_good(written, monkeypatch):
    frozen = []
    monkeypatch.setattr(visits.gc, "freeze", lambda: frozen.append(len(jax.live_arrays())))
    described = written("""
def build(mesh):
    return step, (struct(mesh, (16, 16)), struct(mesh, (8, 16)))
""")
    before = len(jax.live_arrays())
    described.visit("dp:4")
    assert frozen == [before]
    real = written("""
def build(mesh):
    return step, (jnp.eye(16), jnp.ones((8, 16)))
""")
    real.visit("dp:4")
    assert frozen == [before]


def test_what_build_raises_reaches_the_worker_as_it_is(written):
    raising = written("def build(mesh): raise ZeroDivisionError('in build')\n")
    with pytest.raises(ZeroDivisionError, match="in build"):
        raising.inspect()
    assert raising.stages() == ["load", "start", "build"]


@pytest.mark.slow
def test_source_hash_follows_the_script_and_what_lies_beside_it(own_process, monkeypatch):
    def digest():
        before = set(sys.modules)
        found = Worker(script(own_process / "main_script.py"), own_process / "cache").inspect()
        jobs._MEMORY.scripts.loaded.clear()
        for name in set(sys.modules) - before:
            del sys.modules[name]
        shutil.rmtree(own_process / "__pycache__", ignore_errors=True)
        return found.source_hash

    (own_process / "beside_it.py").write_text("SIZE = 16\n")
    (own_process / "not_imported.py").write_text("SIZE = 16\n")
    text = "import beside_it\n" + WRITTEN
    text += "def build(mesh): return step, (struct(mesh, (16, 16)), struct(mesh, (8, 16)))\n"
    (own_process / "main_script.py").write_text(text)
    first = digest()
    (own_process / "not_imported.py").write_text("SIZE = 32\n")
    assert digest() == first
    (own_process / "beside_it.py").write_text("SIZE = 32\n")
    second = digest()
    (own_process / "main_script.py").write_text(text + "# changed\n")
    assert len({first, second, digest()}) == 3


def test_wrong_compiler_options_are_outcomes(worker):
    adamw = worker("adamw")
    reasons = []
    for options in ([("xla_no_such_option", 1)], [("xla_cpu_enable_fast_math", "fast")]):
        with pytest.raises(OutcomeError) as caught:
            adamw.compile("dp:2", options=options)
        assert isinstance(caught.value.outcome, Failed)
        reasons.append((caught.value.outcome.stage, caught.value.outcome.reason))
    assert reasons == [
        ("compile", "this compiler has no option `xla_no_such_option`"),
        (
            "compile",
            "the compiler option `xla_cpu_enable_fast_math` is wrong: "
            "'fast' is not a valid bool value",
        ),
    ]
    option = [("xla_backend_optimization_level", 0)]
    plain, with_option = adamw.compile("dp:2"), adamw.compile("dp:2", options=option)
    assert plain.fingerprint != with_option.fingerprint


GIB = 2**30
OOM_MESSAGES = {
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(17.03G) exceeds available HBM (15.75G).": (17.03 * GIB, 15.75 * GIB),
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.": (21.95 * GIB, 15.48 * GIB),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.": (64 * GIB, 0),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB.": (4 * GIB, 0),
    "RESOURCE_EXHAUSTED: no figures here": (0, 0),
}


@pytest.mark.parametrize("text", OOM_MESSAGES)
def test_out_of_memory_messages_are_read(text):
    outcome = out_of_memory(jax.errors.JaxRuntimeError(text), stage="compile")
    needed, limit = OOM_MESSAGES[text]
    assert (outcome.needed_bytes, outcome.limit_bytes) == (int(needed), int(limit))
    assert outcome.detail == text.removeprefix("RESOURCE_EXHAUSTED: ")


def test_running_out_of_memory_is_an_outcome_that_names_the_stage(written):
    hungry = written("""
def build(mesh):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes.")
""")
    with pytest.raises(OutcomeError) as caught:
        hungry.inspect()
    assert caught.value.outcome == OutOfMemory(
        stage="build",
        needed_bytes=1024,
        limit_bytes=0,
        detail="Out of memory allocating 1024 bytes.",
    )


def entries(cache):
    return {path: path.read_bytes() for path in Path(cache).glob("*-cache")}


def test_visit_hits_what_was_compiled_and_a_torn_entry_is_replaced(worker):
    adamw = worker("adamw")
    fresh = adamw.compile("dp:2,tp:4")
    cached = entries(adamw.cache_dir)
    assert cached
    jax.clear_caches()
    again = adamw.compile("dp:2,tp:4")
    assert (again.memory, again.counts) == (fresh.memory, fresh.counts)
    assert entries(adamw.cache_dir) == cached, "nothing was compiled again"
    for damage in (lambda blob: blob[: len(blob) // 2], lambda blob: b""):
        for path, blob in cached.items():
            path.write_bytes(damage(blob))
        jax.clear_caches()
        torn = adamw.compile("dp:2,tp:4")
        assert (torn.memory, torn.counts) == (fresh.memory, fresh.counts)
        assert not entries(adamw.cache_dir), "what cannot be read is removed"
        jax.clear_caches()
        adamw.compile("dp:2,tp:4")
        assert entries(adamw.cache_dir).keys() == cached.keys()


def test_other_warnings_of_a_compilation_are_passed_on(written):
    donating = written("""
def build(mesh):
    args = struct(mesh, (16, 16)), struct(mesh, (8, 16))
    return jax.jit(lambda w, x: (x @ w).sum(), donate_argnums=0), args
""")
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        donating.compile("dp:2")


KILLED = """
import sys
from tests.support.program_jobs import Worker, script
import automesh.program.lower.compilation_cache as cache
worker = Worker(script(sys.argv[1]), sys.argv[2])
worker.inspect()
print("ready", flush=True)
for k in range(1000):
    worker.compile("dp:2,tp:4", options=[("xla_llvm_disable_expensive_passes", bool(k % 2))])
"""


@pytest.mark.slow
def test_killing_a_compiling_worker_costs_a_recompile_at_most(own_process):
    command = [sys.executable, "-c", KILLED, str(SCRIPTS / "adamw.py"), str(own_process / "cache")]
    root = str(SCRIPTS.parents[1])
    for wait in (0.3, 0.9):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root}
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    worker = Worker(script(SCRIPTS / "adamw.py"), own_process / "cache")
    assert worker.compile("dp:2,tp:4").counts.flops > 0
    worker.visit("dp:2,tp:4")


@pytest.mark.slow
def test_a_long_chain_of_collectives_does_not_starve_the_devices(worker):
    # 3,000 such steps without a wait hang XLA's CPU devices, which then abort the process.
    seen = worker("missing_psum", names=("dp", "tp")).visit("dp:4,tp:2", steps=3000, samples=1)
    assert len(seen.samples_s) == 1
