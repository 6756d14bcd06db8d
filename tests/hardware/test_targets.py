"""Names of targets, names of attached devices, the chip table, and launchers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.hardware import (
    check_present,
    chip_for,
    parse_target,
    running_under_several_processes,
    selector_of,
)
from automesh.hardware import targets as targets_module
from automesh.hardware.machines import machines
from automesh.hardware.slices import generations, slices_of
from automesh.hardware.targets import local_selector
from automesh.program.nouns import Device


def test_virtual_devices():
    target = parse_target("cpu:8", {"JAX_PLATFORMS": "tpu"})
    assert (target.selector, target.platforms, target.cpu_devices) == ("cpu-8", "cpu", 8)


def test_processes_of_virtual_devices_are_granules():
    target = parse_target("cpu:4*2", {})
    assert (target.selector, target.cpu_devices, target.processes) == ("cpu-4-2", 4, 2)
    assert parse_target("cpu:4*1", {}).selector == "cpu-4"
    here = [
        Device(id=n, platform="cpu", kind="cpu", process_index=n // 4, slice_index=0, coords=())
        for n in range(8)
    ]
    assert selector_of(here) == target.selector
    assert selector_of(here[:4]) == "cpu-4"


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
        ("cpu:4*0", "target `cpu:4*0` asks for 4 devices in each of 0 processes"),
        ("cpu:1*300", "target `cpu:1*300` asks for 300 processes; 256 are the most"),
        ("cpu:banana", "target `cpu:banana` does not say how many virtual devices"),
        ("cpu", "does not say how many virtual devices"),
        ("cpu-8", "does not say how many virtual devices"),
        ("lokal", "`lokal` is not a target (did you mean `local`?)"),
        ("", "`` is not a target"),
        ("neuron-trn2-64", "`neuron-trn2-64` is not a target"),
    ],
)
def test_targets_that_are_not_understood(name, said):
    with pytest.raises(UsageError) as caught:
        parse_target(name, {})
    assert said in caught.value.message
    assert "cpu:" in caught.value.hint


# Shapes, wraps and hosts as Google's and AWS's pages give them.
@pytest.mark.parametrize(
    ("name", "selector", "torus", "wraps", "granules", "devices", "hosts"),
    [
        ("tpu-v4-1024", "tpu-v4-1024", (8, 8, 8), True, 1, 512, 128),
        ("tpu-v5litepod-256-4", "tpu-v5litepod-256-4", (16, 16), True, 4, 256, 256),
        ("tpu-v5litepod-16*4", "tpu-v5litepod-16-4", (4, 4), False, 4, 16, 16),
        ("v5e-8", "tpu-v5litepod-8", (2, 4), False, 1, 8, 1),
        ("tpu-v5p-64", "tpu-v5p-64", (2, 4, 4), False, 1, 32, 8),
        ("TPU-v5p-512", "tpu-v5p-512", (4, 8, 8), True, 1, 256, 64),
        ("tpu-v6e-64", "tpu-v6e-64", (8, 8), False, 1, 64, 16),
        ("tpu-7x-128", "tpu-7x-128", (4, 4, 4), True, 1, 128, 16),
        ("tpu7x-8", "tpu-7x-8", (2, 2, 1), False, 1, 8, 1),
        ("v5e:4x8", "v5e-4x8", (4, 8), False, 1, 32, 8),
        ("v5e:16x16*2", "v5e-16x16-2", (16, 16), True, 2, 256, 128),
        ("v5e-16x16-2", "v5e-16x16-2", (16, 16), True, 2, 256, 128),
        ("v5p:8x4x4", "v5p-8x4x4", (8, 4, 4), True, 1, 128, 32),
        ("gpu-h100-64", "gpu-h100-64", (), None, 8, 8, 8),
        ("h100-4", "gpu-h100-4", (), None, 1, 4, 1),
        ("gpu-a3-megagpu-8g-512", "gpu-a3-megagpu-8g-512", (), None, 64, 8, 64),
        ("gpu-p5.48xlarge-256", "gpu-p5.48xlarge-256", (), None, 32, 8, 32),
    ],
)
def test_absent_devices_by_name(name, selector, torus, wraps, granules, devices, hosts):
    target = parse_target(name, {"JAX_PLATFORMS": "tpu"})
    absent = target.absent
    fabric = absent.fabric
    assert (target.selector, absent.selector) == (selector, selector)
    assert (fabric.torus, fabric.num_granules, fabric.granule_devices) == (torus, granules, devices)
    assert absent.num_hosts == hosts
    assert set(fabric.wraps) == ({wraps} if torus else set())
    # The workers stand in for them on the CPU.
    assert target.platforms == "cpu"
    assert target.cpu_devices == min(granules * devices, 4096)
    with pytest.raises(UsageError, match="names devices that are not here"):
        check_present(target)


def test_devices_that_are_here_are_not_refused():
    for name in ("local", "cpu:8"):
        check_present(parse_target(name, {"JAX_PLATFORMS": "cpu"}))


def test_only_the_long_side_of_a_flat_slice_wraps():
    assert parse_target("v6e-128", {}).absent.fabric.wraps == (False, True)


@pytest.mark.parametrize("slices", [1, 2])
def test_every_slice_on_record(slices):
    names = [name for one in generations() for name in slices_of(one)]
    assert len(names) == len(set(names)) >= 222
    for name in names:
        absent = parse_target(name if slices == 1 else f"{name}-{slices}", {}).absent
        fabric = absent.fabric
        chip = fabric.chip
        per_slice = int(name.rsplit("-", 1)[1]) // chip.counted_per_device
        assert (
            fabric.granule_devices == per_slice == math.prod(fabric.torus) * chip.devices_per_chip
        )
        assert absent.num_hosts * math.prod(absent.host) == slices * math.prod(fabric.torus)
        assert 0.9 < absent.device_memory_bytes / chip.hbm_bytes < 1.01
        # The attached devices would be called the same.
        called = local_selector("tpu", absent.device_kind, absent.num_devices, slices)
        assert called == absent.selector
        # A shape and a number say the same.
        shape = absent.topology.replace("tpu", "").replace("v5:", "v5p:")
        assert parse_target(f"{shape}*{slices}", {}).absent.fabric == fabric


def test_every_machine_on_record():
    for name in machines():
        absent = parse_target(f"gpu-{name}-64", {}).absent
        each = absent.fabric.granule_devices
        assert absent.num_devices == 64 == each * absent.num_hosts
        assert absent.fabric.chip.dcn_bytes_per_s > 1e9
        assert absent.device_memory_bytes > 30e9
        assert absent.device_kind


def test_a_machine_decides_the_network_of_its_chip():
    # 8 x 200 Gb on a3-megagpu, 32 x 100 Gb on p5: bytes per second of one of eight GPUs.
    assert parse_target("gpu-a3-megagpu-8g-16", {}).absent.fabric.chip.dcn_bytes_per_s == 25e9
    assert parse_target("gpu-p5.48xlarge-16", {}).absent.fabric.chip.dcn_bytes_per_s == 50e9
    # NVLink joins up to 72 GPUs of GB200, which are four to a machine.
    assert parse_target("gpu-gb200-72", {}).absent.fabric.chip.dcn_bytes_per_s == 900e9
    assert parse_target("gpu-gb200-144", {}).absent.fabric.chip.dcn_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu-v5p-100", "nearest are tpu-v5p-64, tpu-v5p-128, tpu-v5p-256"),
        ("tpu-v5p-0", "there is no TPU slice `tpu-v5p-0`"),
        ("tpu-v9-8", "names the TPU `v9`, whose slices are not on record"),
        ("tpu-v3-8", "names the TPU `v3`, whose slices are not on record"),
        ("v5e:3x3", "there is no TPU slice `v5e:3x3`: its slices are 1x1, 2x2"),
        ("v5p:4x4", "slices of TPU v5p have 3 dimensions"),
        ("v5p:4x4x6", "larger slices are made of cubes of 4x4x4 chips"),
        ("v5p:4x4x0", "larger slices are made of cubes of 4x4x4 chips"),
        ("v5p:400x400x400", "larger slices are made of cubes of 4x4x4 chips"),
        ("v5e:16x16*0", "has 0 slices; 1 to 1024 are possible"),
        ("gpu-h100-12", "has 12 GPUs; machines of this kind have 8 each"),
        ("gpu-h100-0", "has 0 GPUs"),
        ("gpu-a100-64", "may mean several machines: a100-40gb, a100-80gb"),
        ("gpu-h1000-8", "machine `h1000`, which is not on record (did you mean `h100`?)"),
    ],
)
def test_devices_that_cannot_exist(name, said):
    with pytest.raises(UsageError) as caught:
        parse_target(name, {})
    assert said in caught.value.message
    assert caught.value.hint


@given(st.text(alphabet="tpugv5elihx-:*0124.", max_size=24))
def test_any_text_is_a_target_or_a_sentence(text):
    try:
        target = parse_target(text, {})
    except UsageError as error:
        assert error.hint
    else:
        assert target.absent is not None
        assert parse_target(target.selector, {}).selector == target.selector


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
        "automesh.mesh.config", "automesh.mesh.rules.file",
    ]  # fmt: skip
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = code.replace("import sys,", "import sys, jax,")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


@pytest.mark.parametrize(
    ("platform", "kind", "slices", "each", "expected"),
    [
        ("cpu", "cpu", 1, 4, "cpu-4"),
        ("cpu", "cpu", 1, 8, "cpu-4-2"),  # of two processes
        ("tpu", "TPU v5 lite", 1, 16, "tpu-v5litepod-16"),
        ("tpu", "TPU v5 lite", 4, 256, "tpu-v5litepod-256-4"),
        ("tpu", "TPU v5", 2, 64, "tpu-v5p-128-2"),
        ("gpu", "NVIDIA H100 80GB HBM3", 1, 16, "gpu-h100-16"),
    ],
)
def test_all_devices_of_a_job_are_named_together(platform, kind, slices, each, expected):
    devices = [
        Device(
            id=number,
            platform=platform,
            kind=kind,
            process_index=number // 4,
            slice_index=number // each,
            coords=(),
        )
        for number in range(slices * each)
    ]
    assert selector_of(devices) == expected


@pytest.mark.parametrize(
    ("name", "is_joined"),
    [
        ("gpu-gb200-72", True),
        ("gpu-gb200-16", True),
        ("gpu-gb200-4", False),
        ("gpu-gb200-144", False),
        ("gpu-h100-64", False),
    ],
)
def test_nodes_of_one_nvlink_domain_are_said_to_be_so(name: str, is_joined: bool) -> None:
    """Their meshes have `dcn.` parts, which are those of a network elsewhere."""
    said = parse_target(name, {}).notices
    assert any("NVLink joins all" in one and "not a network" in one for one in said) is is_joined
