"""Names of targets, names of attached devices, the chip table, and launchers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automesh.errors import UsageError
from automesh.hardware import (
    chip_for,
    local_selector,
    parse_target,
    running_under_several_processes,
)
from automesh.hardware import targets as targets_module


def test_virtual_devices():
    target = parse_target("cpu:8", {"JAX_PLATFORMS": "tpu"})
    assert (target.selector, target.platforms, target.cpu_devices) == ("cpu-8", "cpu", 8)


def test_local_follows_the_environment():
    target = parse_target("local", {"JAX_PLATFORMS": "cuda,cpu"})
    assert (target.selector, target.platforms, target.cpu_devices) == ("", "cuda,cpu", 0)


class FakeMachine:
    """A machine with these device files and python packages."""

    def __init__(self, monkeypatch, files, packages):
        monkeypatch.setattr(
            targets_module.importlib.util,
            "find_spec",
            lambda name: object() if name in packages else None,
        )
        fake = lambda path: _FakePath(str(path), files)  # noqa: E731
        monkeypatch.setattr(targets_module, "Path", fake)


class _FakePath:
    def __init__(self, path, files):
        self._path, self._files = path, files

    def exists(self):
        return self._path in self._files

    def glob(self, pattern):
        prefix = f"{self._path}/{pattern.rstrip('*').removesuffix('[0-9]')}"
        return [file for file in self._files if file.startswith(prefix)]


@pytest.mark.parametrize(
    ("files", "packages", "platforms", "noticed"),
    [
        ([], [], "cpu", ""),
        ([], ["libtpu", "jax_cuda12_plugin"], "cpu", ""),
        (["/dev/accel0"], ["libtpu"], "tpu,cpu", ""),
        (["/dev/vfio/0"], ["libtpu"], "tpu,cpu", ""),
        (["/dev/nvidia0"], ["jax_cuda12_plugin"], "cuda,cpu", ""),
        (["/dev/kfd"], ["jax_rocm7_plugin"], "rocm,cpu", ""),
        (["/dev/nvidia0"], [], "cpu", "seems to have a NVIDIA GPU that jax cannot use: install"),
        (["/dev/accel0"], [], "cpu", "seems to have a TPU that jax cannot use: install `jax[tpu]`"),
        (["/dev/vfio/0"], [], "cpu", ""),
    ],
)
def test_local_is_what_is_plugged_in_and_usable(monkeypatch, files, packages, platforms, noticed):
    FakeMachine(monkeypatch, files, packages)
    target = parse_target("local", {})
    assert target.platforms == platforms
    assert bool(target.notices) == bool(noticed)
    assert noticed in "".join(target.notices)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpu:0", "target `cpu:0` asks for 0 devices; 1 to 4096 are possible"),
        ("cpu:5000", "target `cpu:5000` asks for 5000 devices"),
        ("cpu:banana", "target `cpu:banana` does not say how many virtual devices"),
        ("cpu", "does not say how many virtual devices"),
        ("cpu-8", "does not say how many virtual devices"),
        ("lokal", "`lokal` is not a target (did you mean `local`?)"),
        ("", "`` is not a target"),
        ("tpu-v5p-128", "this version searches attached and virtual devices only"),
        ("v5e:4x4", "this version searches attached and virtual devices only"),
        ("v5e:16x16*2", "this version searches attached and virtual devices only"),
        ("gpu-p5.48xlarge-64", "this version searches attached and virtual devices only"),
    ],
)
def test_targets_that_are_not_understood(name, said):
    with pytest.raises(UsageError) as caught:
        parse_target(name, {})
    assert said in caught.value.message
    assert "cpu:" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (("cpu", "cpu", 8), "cpu-8"),
        (("gpu", "NVIDIA H100 80GB HBM3", 16), "gpu-h100-16"),
        (("gpu", "NVIDIA A100-SXM4-40GB", 8), "gpu-a100-40gb-8"),
        (("gpu", "NVIDIA GeForce RTX 4090", 2), "gpu-geforce-rtx-4090-2"),
        (("tpu", "TPU v5 lite", 16), "tpu-v5litepod-16"),
        (("tpu", "TPU v5 lite", 512, 2), "tpu-v5litepod-256-2"),
        # Names of v4 and v5p count TensorCores, two per device.
        (("tpu", "TPU v4", 32), "tpu-v4-64"),
        (("tpu", "TPU v5p", 64), "tpu-v5p-128"),
        (("tpu", "TPU v6 lite", 256, 1), "tpu-v6e-256"),
        (("tpu", "TPU7x", 256), "tpu-7x-256"),
        (("tpu", "TPU v3", 8), "tpu-v3-8"),
    ],
)
def test_attached_devices_are_named_as_people_do(device, expected):
    assert local_selector(*device) == expected


def test_a_device_is_half_a_chip_where_a_chip_is_two_devices():
    # Ironwood: 4614 TFLOP/s fp8 and 192 GiB per chip (Google Cloud, TPU7x), two jax devices.
    chip = chip_for("TPU7x", "tpu")
    assert dict(chip.peak_flops_per_s)["fp8"] == 4614e12 / 2
    assert chip.hbm_bytes == 192 * 2**30 // 2


def test_known_chips_have_figures_and_sources():
    for kind, flops in [("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12)]:
        chip = chip_for(kind, "tpu")
        assert chip.flops_per_s == flops
        assert not chip.rough
        assert chip.source
    assert chip_for("NVIDIA H100 80GB HBM3", "gpu").flops_per_s == 989e12


def test_stand_ins_say_that_they_are_rough():
    for platform in ("cpu", "gpu", "tpu"):
        chip = chip_for("something else", platform)
        assert chip.rough
        assert chip.flops_per_s > 0
    with pytest.raises(UsageError, match="nothing is known about devices of the platform `metal`"):
        chip_for("Apple M4", "metal")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, ""),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8"),
        # An allocation without srun: one process.
        ({"SLURM_NTASKS": "8"}, ""),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES=2"),
        ({"JAX_NUM_PROCESSES": "x"}, ""),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_COORDINATOR_ADDRESS=h:1"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES names 2 hosts"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ""),
    ],
)
def test_several_processes_are_noticed(environ, reason):
    assert running_under_several_processes(environ) == reason


def test_nothing_here_imports_jax():
    modules = [
        "automesh.hardware", "automesh.space.legal", "automesh.space.spec",
        "automesh.mesh.config", "automesh.mesh.rules_file",
    ]  # fmt: skip
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = code.replace("import sys,", "import sys, jax,")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
