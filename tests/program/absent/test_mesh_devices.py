"""What user code reads off the devices of its mesh is the target's; jax reads what is here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend as extended
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.program.absent.device_queries import answering, attached
from automesh.program.absent.fake_devices import fake_devices
from tests.support.samples.attached_devices import cards, torus_4x4


def target(name: str) -> AbsentDevices:
    absent = parse_target(name, {}).absent
    assert absent is not None
    return absent_devices_of(absent)


V5E, H100 = target("v5e:4x4"), target("gpu-h100-16")


def answered(one: AbsentDevices):
    return answering(one, lambda: fake_devices(one), in_meshes=False)


def mesh() -> Mesh:
    return Mesh(np.array(attached()).reshape(8, 2), ("dp", "tp"))


def test_devices_of_a_mesh_answer_for_the_target() -> None:
    """Before, a model that chose its kernel by them took the one for CPUs."""
    with answered(V5E):
        first, last = mesh().devices.flat[0], mesh().devices.flat[15]
        assert (first.platform, first.device_kind) == ("tpu", "TPU v5 lite")
        assert (first.process_index, last.process_index) == (0, 3)
        assert list(last.coords) == list(fake_devices(V5E)[15].coords)
        assert not hasattr(first, "slice_index")
        assert first.memory_stats()["bytes_limit"] == 16 * 2**30
        array = jax.device_put(jnp.ones(8), first)
        assert array.devices().pop().platform == "tpu"
    with answered(H100):
        first = mesh().devices.flat[0]
        assert (first.platform, first.compute_capability) == ("gpu", "9.0")
        assert not hasattr(first, "core_on_chip")


def test_outside_they_are_what_they_are() -> None:
    device = mesh().devices.flat[0]
    before = set(vars(type(device)))
    with answered(V5E), answered(H100):
        assert device.platform == "gpu"
    assert (device.platform, device.process_index) == ("cpu", 0)
    assert not hasattr(device, "coords")
    assert set(vars(type(device))) == before
    with pytest.raises(KeyError), answered(V5E):
        raise KeyError
    assert device.platform == "cpu"


def test_jax_computes_on_them_as_before() -> None:
    with answered(V5E):
        rows = NamedSharding(mesh(), PartitionSpec("dp", "tp"))
        x = jax.device_put(jnp.ones((16, 4)), rows)
        assert float(jax.jit(lambda x: (x @ x.T).sum())(x)) == 16 * 16 * 4
        assert x.is_fully_addressable
        assert not mesh().is_multi_process


def test_a_kernel_chosen_by_the_mesh_is_the_targets() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16 if mesh().devices.flat[0].platform == "tpu" else jnp.float32)

    with answered(V5E) as answers:
        assert jax.eval_shape(step, jnp.ones(4)).dtype == jnp.bfloat16
    assert [text.partition(" in ")[0] for text in answers.asked] == ["device.platform"]
    assert jax.eval_shape(lambda x: step(x), jnp.ones(4)).dtype == jnp.float32


# Accelerators of this machine, in a process that lowers on virtual devices.

CARD, SLICE = cards(16), torus_4x4()


def test_virtual_devices_speak_for_attached_ones() -> None:
    """An estimate of a step whose kernels are chosen by the device took those for CPUs, or failed:
    for absent devices it was told of them, for attached ones not."""
    with answered(CARD) as answers:
        first = mesh().devices.flat[0]
        assert (first.platform, first.device_kind) == ("gpu", "NVIDIA L4")
        # No configuration of this kind is shipped: it is what the device itself has said.
        assert (first.compute_capability, first.core_count) == ("8.9", 58)
        assert first.memory_stats()["bytes_limit"] == 22 * 2**30
        assert (jax.default_backend(), jax.device_count()) == ("gpu", 16)
        assert extended.get_default_device().compute_capability == "8.9"
    assert any("compute_capability" in text for text in answers.asked)
    with answered(SLICE):
        last = mesh().devices.flat[15]
        assert (last.platform, list(last.coords)[:2], last.process_index) == ("tpu", [3, 3], 0)


@pytest.mark.parametrize("one", [CARD, SLICE])
def test_what_is_put_on_attached_devices_lands_on_virtual_ones(one: AbsentDevices) -> None:
    """A script may make its own mesh of `jax.devices()`, and arrays on it, as it could before."""
    with answered(one) as answers:
        for found in (jax.devices(), jax.devices(one.platform), jax.local_devices()):
            assert [type(device) for device in found] == [type(attached()[0])] * 16
        rows = NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp"))
        x = jax.device_put(jnp.ones((16, 4)), rows)
        assert float(jax.jit(jnp.sum)(x)) == 64
        assert jax.device_put(jnp.ones(8), jax.devices()[3]).devices() == {attached()[3]}
    # Or terms would be taken for those of any number of devices of the platform.
    assert any(text.endswith(f": 16 x {one.device_kind}") for text in answers.asked)
