"""User code that asks for devices is told of the target's; jax itself is not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.extend import backend as extended

from automesh.cost.terms import value_of
from automesh.hardware.absent import AbsentDevices
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.mesh.axes import MeshAxis
from automesh.program.absent.client import devices_of
from automesh.program.absent.device_queries import answering, attached, install
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.lower.lowered import canonical_text
from automesh.program.lower.lowering import lower
from automesh.program.nouns import StepRef
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from automesh.worker.handlers import jobs
from automesh.worker.handlers.scripts import Scripts, showing_devices
from automesh.worker.handlers.stages import StageReporter
from automesh.worker.messages import InspectJob, PropagateJob
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]

AXES = (MeshAxis(name="dp", ici=8), MeshAxis(name="tp", ici=2))
ASKS = script(SCRIPTS / "asks_devices.py")
PLATFORMS = {"tpu": ("tpu",), "gpu": ("cuda",)}


def target(name: str) -> AbsentDevices:
    absent = parse_target(name, {}).absent
    assert absent is not None
    return absent_devices_of(absent)


V5E, V6E, H100 = (target(name) for name in ("v5e:4x4", "v6e:4x4", "gpu-h100-16"))


def answered(one: AbsentDevices, *, in_meshes: bool = False):
    return answering(one, lambda: fake_devices(one), in_meshes=in_meshes)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    install()
    yield
    assert jax.devices() == attached()


def test_every_public_query_answers_for_the_target() -> None:
    with answered(V5E):
        assert len(jax.devices()) == jax.device_count() == 16
        assert {device.device_kind for device in jax.devices()} == {"TPU v5 lite"}
        assert jax.devices("tpu")[3].platform == jax.default_backend() == "tpu"
        assert jax.process_count() == 4
        assert jax.process_index() == 0
        assert list(jax.process_indices()) == [0, 1, 2, 3]
        assert jax.local_device_count() == len(jax.local_devices()) == 4
        assert {device.process_index for device in jax.local_devices(2)} == {2}
        with pytest.raises(ValueError, match="Unknown process_index 4"):
            jax.local_devices(process_index=4)
    with answered(H100):
        assert jax.default_backend() == jax.devices("cuda")[0].platform == "gpu"
        assert jax.devices("gpu")[9].compute_capability == "9.0"
        assert jax.process_count() == 2
    assert (jax.default_backend(), jax.device_count()) == ("cpu", 16)


def test_other_platforms_are_what_they_are() -> None:
    here = attached()
    with answered(V5E):
        assert jax.devices("cpu") == here
        assert jax.device_count(backend="cpu") == len(here)
        assert jax.local_devices(backend="cpu") == here
        with pytest.raises(RuntimeError, match="gpu"):
            jax.devices("gpu")
        with pytest.raises(TypeError, match="colour"):
            jax.devices(colour="red")  # pyright: ignore[reportCallIssue]


def test_names_that_were_imported_before_answer_too() -> None:
    from jax import default_backend, devices

    assert default_backend() == "cpu"
    with answered(V5E):
        assert default_backend() == "tpu"
        assert devices()[0].device_kind == "TPU v5 lite"
    assert devices() == attached()


def test_jax_itself_goes_on_with_the_devices_that_are_here() -> None:
    with answered(V5E, in_meshes=True):
        assert jnp.arange(8).sum() == 28
        assert jax.jit(lambda x: x + 1)(jnp.ones(3)).devices() == {attached()[0]}
        assert jax.random.key(0).shape == ()
        with jax.default_device(jax.devices("cpu")[1]):
            assert jnp.ones(2).devices() == {attached()[1]}


def test_the_default_device_is_one_of_the_target() -> None:
    """Libraries of kernels choose by it what they take."""
    original = attached()[0]
    with answered(H100) as answers:
        assert extended.get_default_device().compute_capability == "9.0"
        assert extended.get_default_device().platform == "gpu"
        assert any("get_default_device" in question for question in answers.asked)
        with jax.default_device(attached()[1]):
            assert extended.get_default_device() == attached()[1]
    with answered(V6E):
        assert extended.get_default_device().device_kind == "TPU v6 lite"
    assert extended.get_default_device() == original


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "arch"),
    [("gpu-h100-16", "9.0"), ("gpu-a100-80gb-16", "8.0"), ("gpu-gb200-72", "10.0"), ("new", "8.0")],
)
def test_triton_kernels_are_lowered_for_gpus_that_are_not_here(name: str, arch: str) -> None:
    a100 = target("gpu-a100-80gb-16")
    one = replace(a100, device_kind="NVIDIA X1") if name == "new" else target(name)

    def double(x: Any, y: Any) -> None:
        y[...] = x[...] * 2

    def step(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        params = triton.CompilerParams(num_warps=4)
        return pl.pallas_call(double, out_shape=shape, compiler_params=params)(x)

    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    with answered(one):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        if jax.__version_info__ >= (0, 11):  # Before, Pallas asked by public names.
            info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
            assert info.get_gpu_info().arch_name == arch
    assert "__gpu$xla.gpu.triton" in text


def test_meshes_are_made_of_the_target_only_where_it_is_compiled_for() -> None:
    with answered(V5E, in_meshes=True):
        square = mesh_utils.create_device_mesh((4, 4))
        assert {device.device_kind for device in square.flat} == {"TPU v5 lite"}
        four = mesh_utils.create_device_mesh((2, 2), attached()[:4])
        assert set(four.flat) == set(attached()[:4])
    with answered(V5E):
        made = jax.make_mesh((8, 2), ("a", "b"))
        assert set(made.devices.flat) == set(attached())


def test_what_was_asked_is_written_down_once(capfd: pytest.CaptureFixture[str]) -> None:
    with answered(V5E) as answers:
        for _ in range(3):
            jax.default_backend()
        jax.devices()
    asked = [re.sub(r":\d+", "", text, count=1) for text in answers.asked]
    assert asked == [
        "jax.default_backend() in test_device_queries.py: tpu",
        "jax.devices() in test_device_queries.py: 16 x TPU v5 lite",
    ]
    log = capfd.readouterr().err
    assert log.count("jax.default_backend()") == 1


def test_answers_nest_and_end_with_an_error() -> None:
    with answered(V5E):
        with pytest.raises(KeyError), answered(H100):
            assert jax.default_backend() == "gpu"
            raise KeyError
        assert jax.default_backend() == "tpu"
    assert jax.default_backend() == "cpu"


def lowered_for(one: AbsentDevices) -> str:
    """The step, built on the devices that are here, and told of others."""
    stages = StageReporter(lambda event: {})
    with showing_devices(one, "build") as answers:
        loaded = Scripts().load(ASKS, stages, one, answers)
        built = build_on(loaded.build, AXES, devices=attached())
        return canonical_text(lower(built, platforms=PLATFORMS[one.platform]).lowered)


def lowered_by_jax(platform: str, kind: str, processes: int) -> str:
    """The same step by jax alone, where its public queries give mock devices."""
    device = SimpleNamespace(platform=platform, device_kind=kind, process_index=0, id=0)
    mocks = {
        "devices": lambda: [device] * 16,
        "device_count": lambda: 16,
        "default_backend": lambda: platform,
        "process_count": lambda: processes,
    }
    mesh = jax.sharding.Mesh(np.array(attached()).reshape(8, 2), ("dp", "tp"))
    with mock.patch.multiple(jax, **mocks):
        step, args = load_entry(ASKS)(mesh)
        lowered = jax.jit(step).trace(*args).lower(lowering_platforms=PLATFORMS[platform])
        return canonical_text(lowered)


@pytest.mark.parametrize(
    ("one", "platform", "kind", "processes"),
    [
        (V5E, "tpu", "TPU v5 lite", 4),
        (V6E, "tpu", "TPU v6 lite", 4),
        (H100, "gpu", "NVIDIA H100 80GB HBM3", 2),
    ],
    ids=["v5e", "v6e", "h100"],
)
def test_the_program_is_that_of_mock_devices(
    own_process: object, one: AbsentDevices, platform: str, kind: str, processes: int
) -> None:
    with mock.patch("automesh.worker.handlers.scripts._shown", fake_devices):
        ours = lowered_for(one)
    forget()
    assert ours == lowered_by_jax(platform, kind, processes)


def test_the_programs_of_kinds_differ(own_process: object) -> None:
    with mock.patch("automesh.worker.handlers.scripts._shown", fake_devices):
        texts = []
        for one in (V5E, V6E, H100):
            texts.append(lowered_for(one))
            forget()
    assert len(set(texts)) == 3
    assert ["bf16" in text for text in texts] == [True, True, False]


def forget() -> None:
    sys.modules.pop("asks_devices", None)


def test_a_script_is_loaded_anew_for_other_devices(own_process: object) -> None:
    scripts, stages = Scripts(), StageReporter(lambda event: {})
    dtypes = []
    for one in (V5E, V5E, H100):
        shown = mock.patch("automesh.worker.handlers.scripts._shown", fake_devices)
        with shown, showing_devices(one, "build") as answers:
            loaded = scripts.load(ASKS, stages, one, answers)
            dtypes.append(loaded.build.__globals__["DTYPE"])
            assert loaded.asked == (f"jax.default_backend() in asks_devices.py:11: {one.platform}",)
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert scripts.load(ASKS, stages).asked == ()


ATTRIBUTES = (
    "id",
    "platform",
    "device_kind",
    "process_index",
    "coords",
    "core_on_chip",
    "slice_index",
    "num_cores",
    "core_count",
    "compute_capability",
    "shared_memory_per_block_optin",
    "partition_index",
    "fabric_uuid",
    "device_vendor",
)


def public(device: object) -> dict[str, object]:
    return {name: getattr(device, name) for name in ATTRIBUTES if hasattr(device, name)}


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name",
    [
        "v5e:4x4",
        "v5e:2x4",
        "v5e:1x1",
        "v5e:4x4*2",
        "v4:2x2x4",
        "v5p:4x4x4",
        "v6e:2x2*3",
        "tpu-7x-16",
    ],
)
def test_stand_ins_look_like_what_libtpu_gives(name: str) -> None:
    one = target(name)
    real = [public(device) for device in devices_of(one)]
    assert [public(device) for device in fake_devices(one)] == real


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["gpu-h100-16", "gpu-a100-80gb-8", "gpu-b200-8", "gpu-gb200-16", "gpu-gb200-144"]
)
def test_stand_ins_look_like_what_the_cuda_plugin_gives(name: str) -> None:
    one = target(name)
    real = [public(device) for device in devices_of(one)]
    assert [public(device) for device in fake_devices(one)] == real


FRESH = """
from automesh.program.absent.device_queries import install
before = __import__("jax").devices
install()
install()
import jax
assert jax.devices is not before and jax.devices.__name__ == "devices"
assert jax.devices() == before()
print("same")
"""


def test_installing_changes_no_answer_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def test_terms_are_those_of_the_target(own_process: object) -> None:
    """An inspection and a propagation need no compile-only client, kernels for TPUs included."""
    products: list[float] = []
    for name, one in (("asks_devices", V5E), ("asks_devices", V6E), ("kernel", V5E)):
        entry = script(SCRIPTS / f"{name}.py")
        step = StepRef(entry=entry, absent=one)
        common = {"axis_names": ("dp", "tp"), "platform": "tpu"}
        with mock.patch("automesh.worker.handlers.scripts._shown", fake_devices):
            seen = jobs.handle(InspectJob(step=step, **common), lambda event: {})
            answer = jobs.handle(
                PropagateJob(
                    **common,
                    step=replace(step, axis_types=seen.axis_types, facts=seen.facts),
                    knobs=(),
                    sizes=(("dp", 4),),
                    probes=(),
                ),
                lambda event: {},
            )
        assert {device.platform for device in seen.devices} == {"cpu"}
        assert f"jax.default_backend() in {name}.py:" in " ".join(answer.asked)
        products.append(
            sum(value_of(one.count, {"dp": 4}) * len(one.matmuls) for one in answer.terms.kernels)
        )
    # For each of four hosts, four in a row on one kind of TPU, two on the other.
    assert products == [16, 8, 0]
