"""Compiling for devices that are not here: what can go wrong, and what comes of it."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from automesh.errors import UsageError
from automesh.hardware.absent import AbsentDevices
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.hlo import store
from automesh.hlo.read import read_module
from automesh.hlo.schedule.nouns import Branch, DeviceTransfer, ScheduledBlock, ScheduledLoop, Start
from automesh.hlo.schedule.read import read_schedule
from automesh.hlo.store import ModuleStore
from automesh.mesh.axes import parse_mesh
from automesh.mesh.layout.devices import create_mesh_for
from automesh.outcomes import Failed, Memory, OutOfMemory
from automesh.platforms import platform_named
from automesh.program.absent import client
from automesh.program.absent import compile as compile_module
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.lower.compiled import count_serialized, read_memory, serialized
from automesh.program.lower.compiler_options import known
from automesh.program.lower.lowering import lower
from automesh.program.nouns import Attachment, CompileAnswer, StepRef
from automesh.program.refused import StepRefused
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from automesh.worker.blame import OutcomeError
from automesh.worker.environment import surroundings_for
from automesh.worker.handlers import jobs
from automesh.worker.messages import CompileJob, DevicesJob, InspectJob
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import Worker, own_process, script

__all__ = ["own_process"]

GIB = 2**30


def target(name: str) -> AbsentDevices:
    absent = parse_target(name, {}).absent
    assert absent is not None
    return absent_devices_of(absent)


def changed(one: AbsentDevices, **fields: Any) -> AbsentDevices:
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return AbsentDevices(**{**values, **fields})


def refusal(one: AbsentDevices) -> Failed:
    with pytest.raises(StepRefused) as caught:
        client.devices_of(one)
    failed = caught.value.outcome
    assert isinstance(failed, Failed)
    assert failed.stage == "start"
    assert "\n" not in failed.reason
    return failed


# What can go wrong


@pytest.mark.parametrize(
    ("name", "missing"), [("v5e:2x2", "libtpu"), ("gpu-h100-8", "the CUDA plugin of jax")]
)
def test_the_extra_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.setattr(client, "_is_there", lambda module: False)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    client._devices.cache_clear()
    one = target(name)
    failed = refusal(one)
    assert missing in failed.reason
    assert f"pip install 'jax-automesh[{one.platform}]'" in failed.hint


def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_is_there", lambda module: True)
    monkeypatch.setattr(client, "_installed", lambda platform: None)
    client._devices.cache_clear()


def raises(text: str) -> Any:
    return mock.patch.object(
        client.topologies,
        "get_topology_desc",
        side_effect=jax.errors.JaxRuntimeError(text),
    )


@pytest.mark.parametrize(
    ("text", "reason", "hint"),
    [
        (
            "ABORTED: The TPU is already in use by another process probably owned by another user. "
            "Run `$ sudo lsof -w /dev/accel0`; multi-process lockfile /tmp/libtpu_lockfile",
            "another process uses libtpu, and its lock file keeps this one out",
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        ),
        (
            "INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API version (0.40) and framework "
            "PJRT API version 0.98.",
            "does not fit jaxlib",
            "pip install 'jax-automesh[tpu]'",
        ),
        ("INVALID_ARGUMENT: no such chip\nat a.cc", "does not know `v5e:2x2`", "automesh targets"),
    ],
    ids=["locked", "misfit", "unknown"],
)
def test_what_libtpu_says_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str, hint: str
) -> None:
    pretend_installed(monkeypatch)
    with raises(text):
        failed = refusal(target("v5e:2x2"))
    assert reason in failed.reason
    assert hint in failed.hint


@pytest.mark.parametrize(
    ("name", "package", "wanted"),
    [
        ("v5e:2x2", "libtpu", "==0.0.42.*"),
        ("gpu-h100-8", "jax-cuda12-plugin", "<=0.10.2,>=0.10.2"),
    ],
)
def test_a_compiler_that_is_too_old_is_not_even_tried(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, wanted: str
) -> None:
    one = target(name)
    monkeypatch.setattr(client, "_is_there", lambda module: True)
    monkeypatch.setattr(client, "wanted_by_jax", lambda platform: SpecifierSet(wanted))
    monkeypatch.setattr(client, "_installed", lambda platform: (package, "0.0.21"))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    client._devices.cache_clear()
    failed = refusal(one)
    assert failed.reason.startswith(f"{package} 0.0.21 is too old for jax")
    assert f"pip install 'jax-automesh[{one.platform}]'" in failed.hint


def test_a_gpu_without_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    one = changed(target("gpu-h100-8"), gpu="", device_kind="AMD MI300X")
    failed = refusal(one)
    assert "no target configuration for AMD MI300X" in failed.reason
    assert "h100" in failed.reason
    assert "--dry-run" in failed.hint


def test_a_topology_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    description = mock.Mock(devices=jax.devices()[:3])
    with mock.patch.object(client.topologies, "get_topology_desc", return_value=description):
        assert "makes 3 devices of `v5e:2x2`" in refusal(target("v5e:2x2")).reason
    client._devices.cache_clear()


def test_an_executable_for_the_devices_that_are_here_is_refused() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(2)).compile()
    with pytest.raises(StepRefused) as caught:
        client.check_compiled_for(target("v5e:2x2"), compiled)
    failed = caught.value.outcome
    assert isinstance(failed, Failed)
    assert "not for TPU v5 lite" in failed.reason


@pytest.mark.tpu
def test_topologies_that_libtpu_does_not_know() -> None:
    one = target("v5e:4x4")
    for wrong in (
        changed(one, topology="v5e:4x5", torus=(4, 5), num_devices=20),
        changed(one, topology="v9x:4x4"),
        changed(one, host=(3, 1, 1)),
    ):
        failed = refusal(wrong)
        assert wrong.topology in failed.reason
        assert "automesh targets" in failed.hint


BROKEN = """
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.program.absent.client import devices_of
from automesh.program.refused import StepRefused
try:
    devices_of(absent_devices_of(parse_target("v5e:2x2", {}).absent))
except StepRefused as refused:
    print(refused.outcome.reason)
    print(refused.outcome.hint)
"""


@pytest.mark.tpu
def test_a_libtpu_that_is_none(tmp_path: Path) -> None:
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"not a library")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        env={**os.environ, "TPU_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    reason, hint = done.stdout.splitlines()
    assert "does not fit jaxlib" in reason
    assert "pip install 'jax-automesh[tpu]'" in hint


# What the clients give


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "gib"),
    [("v4:2x2x1", 30.75), ("v5e:2x2", 15.75), ("v5p:2x2x1", 95.74), ("v6e:2x2", 31.25)],
)
def test_the_limit_of_memory_is_probed(name: str, gib: float) -> None:
    # What the runtime keeps for itself differs between versions of libtpu by megabytes.
    assert client.usable_bytes(target(name)) == pytest.approx(gib * GIB, rel=1e-3)


def test_gpus_have_what_their_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.usable_bytes(target("gpu-h100-8")) == 84929347584


@pytest.mark.tpu
def test_only_the_dcn_axis_crosses_slices() -> None:
    one = target("v5e:4x4*2")
    names = ("dp", "fsdp", "tp")
    mesh = create_mesh_for(
        parse_mesh("dcn.dp:2,fsdp:4,tp:4", names), devices=client.devices_of(one)
    )
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.axis_names == names
    assert slices.shape == (2, 4, 4)
    assert (slices[0] == 0).all()
    assert (slices[1] == 1).all()
    inside = create_mesh_for(
        parse_mesh("dp:4,dcn.fsdp:2,tp:4", names), devices=client.devices_of(one)
    )
    slices = np.vectorize(lambda device: device.slice_index)(inside.devices)
    assert (np.diff(slices, axis=0) == 0).all()
    assert (slices[:, 0] == 0).all()
    assert (slices[:, 1] == 1).all()
    assert (np.diff(slices, axis=2) == 0).all()


@pytest.mark.tpu
def test_a_compiled_step_talks_across_slices_over_the_dcn_axis_alone() -> None:
    one = target("v5e:2x2*2")
    mesh = create_mesh_for(
        parse_mesh("dcn.dp:2,tp:4", ("dp", "tp")), devices=client.devices_of(one)
    )

    def sharded(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    def step(weights: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return weights - grads, loss

    weights, batch = sharded((512, 512), None, "tp"), sharded((64, 512), "dp", None)
    lowered = jax.jit(step, out_shardings=(weights.sharding, None)).lower(weights, batch)
    module = serialized(
        lowered.compile(
            compiler_options=dict(
                known(platform_named("tpu").low_effort_options, mesh.devices.flat[0])
            )
        ),
        {},
    )
    schedule = read_schedule(read_module(module), (("dp", 2), ("tp", 4)), dcn=(2, 1))
    transfers = list(transfers_in(schedule.body))
    across = [one for one in transfers if one.medium == "dcn"]
    assert {one.axes for one in across} == {("dp",)}
    assert {one.axes for one in transfers if one.medium == "fabric"} <= {("tp",)}
    # The gradients of a quarter of the weights, at least.
    assert sum(one.payload_bytes for one in across) >= 512 * 512 * 4 // 4
    counts = count_serialized(module, (("dp", 2), ("tp", 4)), dcn=(2, 1))
    assert {one.axes for one in counts.collectives} <= {("dp",), ("tp",)}


def transfers_in(block: ScheduledBlock) -> Iterator[DeviceTransfer]:
    for operation in block.operations:
        match operation:
            case Start():
                yield operation.transfer
            case ScheduledLoop():
                yield from transfers_in(operation.body)
            case Branch():
                for inner in operation.blocks:
                    yield from transfers_in(inner)
            case _:
                pass


# Jobs


class Ahead(Worker):
    """Sends jobs about a script for devices that are not here."""

    def __init__(
        self, entry: Any, one: AbsentDevices, folder: Path, names: Any = ("dp", "tp")
    ) -> None:
        super().__init__(entry, folder / "cache", names=names)
        self.one, self.store = one, ModuleStore(folder / "store")

    def step(self, **found: Any) -> StepRef:
        return StepRef(entry=self.entry, absent=self.one, **found)

    def inspect(self) -> Any:
        if self._inspection is None:
            job = InspectJob(step=self.step(), axis_names=self.names, platform=self.one.platform)
            self._inspection = jobs.handle(job, self._emit)
        return self._inspection

    def compile(self, mesh: str, knobs: Any = (), options: Any = (), effort: Any = "low") -> Any:
        job = CompileJob(
            plan=self.plan(mesh, knobs, options),
            effort=effort,
            store_dir=str(self.store.folder),
            **self._common(),
        )
        return jobs.handle(job, self._emit)


@pytest.fixture
def ahead(own_process: Path) -> Any:
    def start(name: str, one: str, function: str = "build", names: Any = ("dp", "tp")) -> Ahead:
        entry = script(SCRIPTS / f"{name}.py", function)
        return Ahead(entry, target(one), own_process, names=names)

    return start


def compiles() -> Any:
    """Counts calls of the compiler."""
    from automesh.program.absent import compile as module

    return mock.patch.object(module, "compile_lowered", wraps=module.compile_lowered)


@pytest.mark.tpu
@pytest.mark.long
def test_what_a_compiler_for_tpus_accepts_with_temporaries_on_the_host_fits(ahead: Any) -> None:
    """Published recipes that ran were said not to fit."""
    worker = ahead("steps/offloads_layers", "v5e:2x2")
    limit = client.usable_bytes(target("v5e:2x2"))
    answer = worker.compile("dp:2,tp:2", knobs=(("rows", 4 * 262144),), effort="default")
    assert answer.memory.total_bytes > 1.1 * limit
    assert answer.memory.peak_bytes == limit
    with pytest.raises(OutcomeError, match=r"exceeds|Ran out"):
        worker.compile("dp:2,tp:2", knobs=(("rows", 4 * 294912),), effort="default")
    small = worker.compile("dp:2,tp:2", knobs=(("rows", 4 * 8192),), effort="default").memory
    assert small.peak_bytes == small.total_bytes < limit


@pytest.mark.tpu
def test_a_compiler_for_tpus_counts_arguments_among_what_must_fit() -> None:
    """It calls all of it temporaries."""
    one = target("v5e:2x2")
    everywhere = NamedSharding(Mesh(np.array(client.devices_of(one)), ("all",)), PartitionSpec())

    def compiled(gib: float) -> Any:
        rows = int(gib * 2**30) // (4 * 8192)
        step = jax.jit(lambda x: x.sum(axis=0), in_shardings=everywhere, out_shardings=everywhere)
        return step.lower(jax.ShapeDtypeStruct((rows, 8192), jnp.float32)).compile()

    usable = client.usable_bytes(one) / 2**30
    memory = read_memory(compiled(usable - 0.1), platform="tpu")
    assert memory.temporary_bytes < 2**20 and memory.peak_bytes >= memory.argument_bytes
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds|Ran out") as raised:
        compiled(usable + 0.1)
    assert "HLO temporaries" in str(raised.value)


@pytest.mark.parametrize(
    ("one", "peak", "stated"),
    [
        ("v5e:2x2", 40, 31),  # A sum: there are temporaries on the host.
        ("v5e:2x2", 30, 30),  # A peak.
        ("gpu-h100-8", 40, 40),  # Its compiler accepts everything.
    ],
)
def test_a_sum_of_bytes_is_no_more_than_what_the_compiler_accepts(
    one: str, peak: int, stated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "usable_bytes", lambda _: 31)
    memory = Memory(
        argument_bytes=20, output_bytes=15, alias_bytes=15, temporary_bytes=20, peak_bytes=peak
    )
    order = SimpleNamespace(one=target(one))
    found = compile_module._within_limit(memory, cast(Any, order))
    assert found == replace(memory, peak_bytes=stated)


@pytest.mark.tpu
def test_a_step_that_asks_is_compiled_for_what_it_was_told(ahead: Any) -> None:
    worker = ahead("asks_devices", "v5e:2x2")
    with compiles() as calls:
        answer = worker.compile("dp:2,tp:2")
        assert calls.call_count == 1
        again = worker.compile("dp:2,tp:2")
        assert calls.call_count == 1, "found in the store"
    assert isinstance(answer, CompileAnswer)
    assert again == answer
    assert answer.effort == "low"
    # Four matrix products of bfloat16 in each of the forward and twice in the backward pass.
    assert answer.counts.flops == 4 * 2 * 64 * 32 * 32 // 4
    kept = worker.store.find(answer.stored)
    assert kept is not None
    assert (kept.label, kept.target) == ("dp:2,tp:2", "tpu v5e:2x2")
    assert kept.module
    asked = " ".join(answer.asked)
    assert "jax.default_backend() in asks_devices.py" in asked
    assert "jax.devices() in asks_devices.py" in asked
    assert "jax.process_count() in asks_devices.py" in asked


@pytest.mark.tpu
def test_what_is_estimated_is_what_is_compiled(ahead: Any) -> None:
    """The inspection and the compile lower the same program, but for the devices of its mesh."""
    from automesh.program.lower import lowering
    from automesh.sharding.passes import plain
    from automesh.sharding.programs import text_of

    texts = []

    def lower(*args: Any, **keywords: Any) -> Any:
        program = real(*args, **keywords)
        texts.append(text_of(plain(program.lowered.compiler_ir("stablehlo"))))
        return program

    real = lowering.lower
    worker = ahead("asks_devices", "v5e:2x2")
    seen = worker.inspect()
    with mock.patch("automesh.worker.handlers.compile_absent.lower", lower):
        worker.compile("dp:2,tp:2")
    assert texts == [text for text, _ in seen.seen][:1]


@pytest.mark.tpu
def test_efforts_are_kept_apart(ahead: Any) -> None:
    worker = ahead("asks_devices", "v5e:2x2")
    with compiles() as calls:
        low, default = (worker.compile("dp:4", effort=effort) for effort in ("low", "default"))
        assert calls.call_count == 2
    assert (low.effort, default.effort) == ("low", "default")
    assert low.stored != default.stored
    assert low.fingerprint == default.fingerprint
    assert low.counts.flops == default.counts.flops


@pytest.mark.tpu
def test_a_program_under_other_names_is_found_and_counted_by_its_own(ahead: Any) -> None:
    one = ahead("asks_devices", "v5e:2x2")
    with compiles() as calls:
        first = one.compile("dp:4")
        other = ahead("asks_devices", "v5e:2x2", names=("dp", "sp", "tp"))
        second = other.compile("dp:4")
        assert calls.call_count == 1
    assert first.stored == second.stored


@pytest.mark.tpu
def test_state_that_comes_back_otherwise_is_compiled_as_it_settles(ahead: Any) -> None:
    worker = ahead("unsettled", "v5e:2x2")
    with compiles() as calls:
        low = worker.compile("dp:4")
        assert efforts(calls) == ["low", "low"]
        default = worker.compile("dp:4", effort="default")
        assert efforts(calls)[2:] == ["low", "low", "default"]
        alone = ahead("unsettled", "v5e:2x2")
        alone.store = ModuleStore(worker.store.folder / "another")
        apart = alone.compile("dp:4", effort="default").memory
        # Its first step was compiled with the low effort in one, with the default one in the other.
        assert apart.peak_bytes == pytest.approx(default.memory.peak_bytes, rel=0.01)
        of_first = {"peak_bytes": 0, "first_bytes": 0}
        assert replace(apart, **of_first) == replace(default.memory, **of_first)
        assert efforts(calls)[5:] == ["default", "low", "default"]
        assert worker.compile("dp:4", effort="default") == default
        assert len(efforts(calls)) == 8
    # A quarter of the weights, and of the batch.
    assert low.memory.argument_bytes == default.memory.argument_bytes == 2 * 256 * 256 * 4 // 4
    kept = worker.store.find(default.stored)
    assert kept is not None
    assert not kept.is_settled


@pytest.mark.tpu
def test_state_that_comes_back_as_it_went_is_compiled_once(ahead: Any) -> None:
    worker = ahead("adamw", "v5e:2x2", names=("dp", "fsdp", "tp"))
    with compiles() as calls:
        worker.compile("dp:2,tp:2")
        worker.compile("dp:2,tp:2", effort="default")
        assert efforts(calls) == ["low", "default"]


@pytest.mark.tpu
def test_state_without_shardings_gets_those_of_init_as_on_devices(own_process: Path) -> None:
    build = load_entry(script(SCRIPTS / "unsharded_state.py"))
    axes = parse_mesh("fsdp:2,tp:2", ("dp", "fsdp", "tp"))
    there = client.devices_of(target("v5e:2x2"))
    placed = [
        [leaf.sharding for leaf in jax.tree.leaves(lower(build_on(build, axes, devices=on)).args)]
        for on in (jax.devices(), there)
    ]
    assert [sharding.spec for sharding in placed[0]] == [sharding.spec for sharding in placed[1]]
    assert all(sharding.device_set == set(there) for sharding in placed[1])


def efforts(calls: Any) -> list[str]:
    device = client.devices_of(target("v5e:2x2"))[0]
    low = dict(known(platform_named("tpu").low_effort_options, device)).items()
    return [
        "low" if low <= dict(call.args[1]).items() else "default" for call in calls.call_args_list
    ]


@pytest.mark.tpu
def test_a_kernel_is_compiled_for_the_kind_of_tpu(ahead: Any) -> None:
    for one in ("v5e:2x2", "v6e:2x2"):
        worker = ahead("kernel", one)
        answer = worker.compile("dp:4")
        kept = worker.store.find(answer.stored)
        assert kept is not None
        assert b"tpu_custom_call" in kept.module
        jobs._MEMORY.scripts.loaded.clear()


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("columns", [2**15, 2**16], ids=["both", "each"])
def test_a_kernel_with_blocks_that_are_too_large_fails_with_a_sentence(
    ahead: Any, columns: int
) -> None:
    worker = ahead("kernel", "v5e:2x2")
    with pytest.raises(OutcomeError) as caught:
        worker.compile("dp:4", knobs=[("columns", columns), ("whole", True)])
    failed = caught.value.outcome
    assert isinstance(failed, Failed), "the memory of the device is not what is missing"
    assert re.fullmatch(r"a kernel needs \d+ MiB of vmem, .* has 128 MiB", failed.reason)
    assert "blocks" in failed.hint


@pytest.mark.tpu
@pytest.mark.parametrize("function", ["placed", "computed", "created", "from_callback", "on_one"])
def test_real_arrays_on_absent_devices_are_refused_with_a_sentence(
    ahead: Any, function: str
) -> None:
    worker = ahead("real_arrays", "v5e:2x2", function)
    seen = ahead("real_arrays", "v5e:2x2", "on_the_host").inspect()
    worker._inspection = seen
    with pytest.raises(UsageError, match=f"`{function}`, .* puts arrays on devices") as caught:
        worker.compile("dp:4")
    assert "jax.ShapeDtypeStruct" in caught.value.hint


@pytest.mark.parametrize(
    "shown", [pytest.param(client.devices_of, marks=pytest.mark.tpu, id="libtpu"), fake_devices]
)
def test_an_array_on_a_device_that_was_asked_for_ends_the_inspection_with_a_sentence(
    ahead: Any, monkeypatch: pytest.MonkeyPatch, shown: Any
) -> None:
    monkeypatch.setattr("automesh.worker.handlers.scripts._shown", shown)
    with pytest.raises(UsageError, match=r"`on_one`, .* puts arrays on devices"):
        ahead("real_arrays", "v5e:2x2", "on_one").inspect()


@pytest.mark.tpu
def test_arrays_that_nobody_places_are_compiled(ahead: Any) -> None:
    assert ahead("real_arrays", "v5e:2x2", "on_the_host").compile("dp:4").memory.peak_bytes > 0


@pytest.mark.tpu
def test_an_over_sized_plan_is_out_of_memory_and_stays_so(ahead: Any) -> None:
    worker = ahead("asks_devices", "v5e:2x2")
    with compiles() as calls:
        verdicts = []
        for _ in range(2):
            with pytest.raises(OutcomeError) as caught:
                worker.compile("dp:4", knobs=[("width", 2**17)])
            verdicts.append(caught.value.outcome)
        assert calls.call_count == 1
    first, second = verdicts
    assert isinstance(first, OutOfMemory)
    assert first == second
    assert first.limit_bytes == client.usable_bytes(target("v5e:2x2"))
    # The two largest arrays have 2^34 elements of two bytes: some libtpu name the first one alone.
    assert first.needed_bytes >= 2 * 2**34


@pytest.mark.tpu
def test_an_option_that_libtpu_does_not_have(ahead: Any) -> None:
    with pytest.raises(OutcomeError) as caught:
        ahead("asks_devices", "v5e:2x2").compile("dp:4", options=[("xla_tpu_go_faster", True)])
    assert isinstance(caught.value.outcome, Failed)
    assert "no option `xla_tpu_go_faster`" in caught.value.outcome.reason


@pytest.mark.tpu
def test_a_store_that_cannot_be_written(ahead: Any, tmp_path: Path) -> None:
    worker = ahead("asks_devices", "v5e:2x2")
    (tmp_path / "file").write_text("in the way")
    worker.store = ModuleStore(tmp_path / "file" / "store")
    with pytest.raises(OutcomeError) as caught:
        worker.compile("dp:4")
    assert isinstance(caught.value.outcome, Failed)
    assert caught.value.outcome.stage == "start"
    assert "AUTOMESH_CACHE" in caught.value.outcome.hint


@pytest.mark.gpu
def test_a_plan_is_compiled_for_gpus(ahead: Any) -> None:
    worker = ahead("asks_devices", "gpu-h100-8")
    with compiles() as calls:
        answer = worker.compile("dp:4,tp:2")
        assert worker.compile("dp:4,tp:2") == answer
        assert calls.call_count == 1
    assert answer.effort == "default", "their compiler is quick at any effort"
    assert answer.counts.flops > 0
    assert ("tp",) in {one.axes for one in answer.counts.collectives}
    kept = worker.store.find(answer.stored)
    assert kept is not None
    assert kept.target == "gpu h100 1x1x8"


@pytest.mark.gpu
@pytest.mark.skipif(
    Version(jaxlib.__version__) < Version("0.12"), reason="says nothing of its own kernels"
)
def test_the_compiler_of_gpus_knows_which_nodes_nvlink_does_not_join() -> None:
    """XLA makes kernels of its own of small sums inside NVLink's domain, and none between them."""
    mesh = jax.sharding.Mesh(
        np.array(client.devices_of(target("gpu-h100-64"))).reshape(8, 8), ("node", "gpu")
    )
    numbers = jax.ShapeDtypeStruct(
        (8, 8), "int32", sharding=NamedSharding(mesh, PartitionSpec("node", "gpu"))
    )

    def strategies(*axes: str) -> set[str]:
        total = jax.shard_map(
            lambda mine: jax.lax.psum(mine[0, 0], axes),
            mesh=mesh,
            in_specs=PartitionSpec("node", "gpu"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        options: Any = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        text = jax.jit(total, compiler_options=options).lower(numbers).compile().as_text()
        return set(re.findall(r"KERNEL_STRATEGY_(\w+)", text))

    assert strategies("node", "gpu") == {"DEFAULT"}
    assert "TRITON_ONE_SHOT" in strategies("gpu")


@pytest.mark.gpu
def test_sums_over_64_gpus_of_one_domain_are_compiled(ahead: Any) -> None:
    """jaxlib 0.12.0.1 dies of its own kernel for them."""
    assert target("gpu-gb200-64").topology == "1x16x4"
    answer = ahead("asks_devices", "gpu-gb200-64").compile("dcn.dp:16,dp:4")
    summed = [one for one in answer.counts.collectives if one.kind == "all-reduce"]
    assert ("dp",) in {one.axes for one in summed}


@pytest.mark.gpu
def test_an_over_sized_plan_is_out_of_memory_on_gpus_by_our_own_count(ahead: Any) -> None:
    worker = ahead("asks_devices", "gpu-h100-8")
    with compiles() as calls:
        for _ in range(2):
            with pytest.raises(OutcomeError) as caught:
                worker.compile("dp:8", knobs=[("width", 2**18)])
        assert calls.call_count == 1
    verdict = caught.value.outcome
    assert isinstance(verdict, OutOfMemory)
    assert verdict.limit_bytes == 84929347584
    assert verdict.needed_bytes > 2**38


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [
        pytest.param("v5e:4x4*2", 32, 8, marks=pytest.mark.tpu),
        pytest.param("gpu-h100-16", 16, 2, marks=pytest.mark.gpu),
    ],
)
def test_absent_devices_are_described(name: str, devices: int, hosts: int) -> None:
    one = target(name)
    answer = jobs.handle(DevicesJob(absent=one), lambda event: {})
    assert isinstance(answer, Attachment)
    assert len(answer.devices) == devices
    assert answer.process_count == hosts
    assert len({device.process_index for device in answer.devices}) == hosts
    assert answer.device_memory_bytes == client.usable_bytes(one)


@pytest.mark.tpu
def test_several_workers_compile_side_by_side(tmp_path: Path) -> None:
    one = target("v5e:2x2")
    with Pool(
        size=2,
        surroundings=surroundings_for(one),
        log_dir=tmp_path,
        memory_limit_bytes=4 * GIB,
    ) as pool:
        tickets = [pool.submit(DevicesJob(absent=one), 120) for _ in range(2)]
        answers = {}
        while len(answers) < len(tickets):
            for finished in pool.wait():
                answers[finished.ticket] = finished.result
    assert all(isinstance(answer, Attachment) for answer in answers.values()), answers


def test_the_environment_of_a_compile_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = client.settings()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
    assert client.settings() != before
    assert dict(client.versions_for("tpu"))["jaxlib"]
    told = client.compiler_input(target("gpu-h100-8"))
    assert "memory_bandwidth" in told[1]


def test_programs_that_former_versions_have_stored_are_found() -> None:
    assert client.compiler_input(target("v5e:2x4"))[0] == (
        "Elsewhere(platform='tpu', device_kind='TPU v5 lite', num_devices=8, num_granules=1, "
        "num_hosts=1, topology='v5e:2x4', torus=(2, 4), wraps=(False, False), devices_per_chip=1, "
        "chip_config='default', host=(2, 4, 1), gpu='', memory_bytes=0)"
    )


def test_what_is_kept_of_memory_was_read_as_it_is_read_now() -> None:
    """A program in the store has its memory as `read_memory` gave it: where that is changed, a new
    `_FORMAT` lets nothing be found that was read in the former way."""
    read = hashlib.sha256(inspect.getsource(read_memory).encode()).hexdigest()
    assert (store._FORMAT, read[:16]) == (3, "7ace8f0a5e89233c")  # pyright: ignore[reportPrivateUsage]
