"""Clusters of the user's own: `--hardware FILE`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from automesh.cli.targets import HELP as TARGETS_HELP
from automesh.errors import UsageError
from automesh.hardware import absent_devices_of, check_compilable, clusters_file, parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.clusters import Clusters
from automesh.hardware.clusters_file import clusters_in, read_clusters
from automesh.hardware.compilers import has_compiler
from automesh.program.absent.layout import lay_out
from automesh.worker.messages import LayoutJob
from tests.support.cases import bad_inputs_run
from tests.support.cases.bad_inputs import GOOD

LAB = """\
[clusters.lab]
chip = "h100"
nodes = 16
devices_per_node = 8
network_bytes_per_s = 400e9
"""
POD = """\
[clusters.pod]
chip = "v5p"
torus = [4, 4, 8]
slices = 2
"""
OWN_GPU = """\
[chips.x1]
platform = "gpu"
flops_per_s = { bf16 = 1e15 }
hbm_bytes = 100e9
hbm_bytes_per_s = 4e12
link_bytes_per_s = 500e9
[clusters.x]
chip = "x1"
nodes = 4
devices_per_node = 4
network_bytes_per_s = 100e9
"""
OWN_TPU = """\
[chips.t1]
platform = "tpu"
flops_per_s = { bf16 = 1e15 }
hbm_bytes = 64e9
hbm_bytes_per_s = 4e12
link_bytes_per_s = 100e9
link_latency_s = 2e-6
[clusters.t]
chip = "t1"
torus = [6, 4]
wraps = [true, false]
host = [2, 2]
slices = 3
network_bytes_per_s = 50e9
"""


def read(text: str, folder: Path) -> Clusters:
    path = folder / "our.toml"
    path.write_text(text)
    return read_clusters(path)


def test_nodes_of_a_chip_on_record(tmp_path: Path) -> None:
    clusters = read(LAB, tmp_path)
    target = parse_target("lab", {}, clusters)
    found = target.absent
    assert (target.selector, target.platforms, target.cpu_devices) == ("lab", "cpu", 128)
    assert (found.num_devices, found.num_hosts, found.fabric.num_granules) == (128, 16, 16)
    assert found.fabric.kind == "switch"
    assert found.fabric.chip.dcn_bytes_per_s == 50e9
    # All else is as of the same machines by another name.
    known = parse_target("gpu-h100-128", {}).absent
    assert found.fabric == known.fabric
    assert found.device_memory_bytes == known.device_memory_bytes
    assert absent_devices_of(found) == absent_devices_of(known)
    # A part of it; alone, a node needs no network.
    part = parse_target("lab-32", {}, clusters)
    assert (part.selector, part.absent.num_hosts, part.absent.num_devices) == ("lab-32", 4, 32)
    assert parse_target("LAB-4", {}, clusters).absent.fabric.granule_devices == 4


def test_a_torus_of_a_chip_on_record(tmp_path: Path) -> None:
    clusters = read(POD, tmp_path)
    found = parse_target("pod", {}, clusters).absent
    known = parse_target("v5p:4x4x8*2", {}).absent
    assert found.fabric == known.fabric
    assert absent_devices_of(found) == absent_devices_of(known)
    assert found.selector == "pod"
    assert parse_target("pod-1", {}, clusters).absent.fabric.num_granules == 1
    # What the file says goes before what is usual.
    more = "wraps = [false, true, true]\nhost = [2, 1, 1]\nnetwork_bytes_per_s = 10e9\n"
    other = parse_target("pod", {}, read(POD + more, tmp_path)).absent
    assert other.fabric.wraps == (False, True, True)
    assert (other.host, other.num_hosts) == ((2, 1, 1), 128)
    assert other.fabric.chip.dcn_bytes_per_s == 5e9
    # The compiler would refuse links that Google does not make; its programs are the same.
    assert absent_devices_of(other).wraps == ()


def test_a_chip_like_one_on_record(tmp_path: Path) -> None:
    own = (
        '[chips.nvl]\nlike = "h100"\nhbm_bytes = 94e9\nhbm_bytes_per_s = 3.9e12\n'
        'link_bytes_per_s = 300e9\ndevice_kind = "NVIDIA H100 NVL"\nflops_per_s = {bf16 = 835e12}\n'
    )
    clusters = read(own + LAB.replace("h100", "nvl"), tmp_path)
    found = parse_target("lab", {}, clusters).absent
    chip = found.fabric.chip
    assert (chip.name, chip.flops_per_s, chip.link_bytes_per_s) == ("nvl", 835e12, 300e9)
    assert (found.device_memory_bytes, found.device_kind) == (94 * 10**9, "NVIDIA H100 NVL")
    # It is compiled as an H100, with its own memory, and what it achieves is that of an H100.
    told = absent_devices_of(found)
    assert (told.gpu, told.memory_bytes) == ("h100", 94 * 10**9)
    assert has_compiler(found)
    usual = parse_target("gpu-h100-8", {}).absent.fabric
    speeds = [datasheet_speeds(one.chip, one).achieved for one in (found.fabric, usual)]
    assert speeds[0] == speeds[1]


def test_a_link_is_shared_by_the_devices_of_a_chip(tmp_path: Path) -> None:
    own = '[chips.fast]\nlike = "7x"\nlink_bytes_per_s = 200e9\n'
    pod = '[clusters.pod]\nchip = "fast"\ntorus = [4, 4, 4]\n'
    found = parse_target("pod", {}, read(own + pod, tmp_path)).absent
    assert (found.num_devices, found.fabric.chip.link_bytes_per_s) == (128, 100e9)
    assert absent_devices_of(found).topology == "tpu7x:4x4x4"
    assert found.device_memory_bytes == parse_target("7x:4x4x4", {}).absent.device_memory_bytes


@pytest.mark.parametrize(
    ("text", "name", "devices", "dcn"),
    [(OWN_GPU, "x", 16, 25e9), (OWN_TPU, "t", 72, 12.5e9)],
)
def test_a_chip_like_none_can_be_estimated_for_alone(
    text: str, name: str, devices: int, dcn: float, tmp_path: Path
) -> None:
    target = parse_target(name, {}, read(text, tmp_path))
    found = target.absent
    assert (found.num_devices, found.fabric.chip.dcn_bytes_per_s) == (devices, dcn)
    assert found.device_memory_bytes == found.fabric.chip.hbm_bytes > 60e9
    assert not found.fabric.chip.rough
    assert not has_compiler(found)
    with pytest.raises(UsageError, match="no compiler knows the devices of target") as caught:
        check_compilable(target)
    assert "--dry-run" in caught.value.hint
    assert datasheet_speeds(found.fabric.chip, found.fabric).memory_bytes_per_s > 1e12


def test_the_torus_of_ones_own_chip(tmp_path: Path) -> None:
    found = parse_target("t", {}, read(OWN_TPU, tmp_path)).absent
    assert (found.fabric.torus, found.fabric.wraps) == ((6, 4), (True, False))
    assert (found.fabric.num_granules, found.num_hosts, found.host) == (3, 18, (2, 2, 1))


def test_gpus_that_nvlink_joins_over_nodes(tmp_path: Path) -> None:
    text = LAB.replace("h100", "gb200").replace("_per_node = 8", "_per_node = 4")
    clusters = read(text + "joined_devices = 32\n", tmp_path)
    inside, across = (parse_target(name, {}, clusters).absent for name in ("lab-32", "lab"))
    assert inside.fabric.chip.dcn_bytes_per_s == inside.fabric.chip.link_bytes_per_s
    assert across.fabric.chip.dcn_bytes_per_s == 100e9


def test_the_figures_of_a_cluster_are_part_of_what_a_study_is_about(tmp_path: Path) -> None:
    first, same = (parse_target("lab", {}, read(LAB, tmp_path)).figures for _ in range(2))
    other = parse_target("lab", {}, read(LAB.replace("400e9", "200e9"), tmp_path)).figures
    assert first == same != other
    assert parse_target("gpu-h100-8", {}, read(LAB, tmp_path)).figures == ""


def test_a_name_with_a_number_may_be_a_cluster_beside_the_one_without(tmp_path: Path) -> None:
    two = LAB.replace("lab", "lab-32").replace("nodes = 16", "nodes = 2")
    clusters = read(LAB + two, tmp_path)
    assert parse_target("lab-32", {}, clusters).absent.num_devices == 16
    assert parse_target("lab-64", {}, clusters).absent.num_devices == 64


def test_what_is_on_record_still_is(tmp_path: Path) -> None:
    clusters = read(LAB, tmp_path)
    for name in ("local", "cpu:8", "tpu-v5p-128", "gpu-h100-64"):
        assert parse_target(name, {"JAX_PLATFORMS": "cpu"}, clusters).name == name
    assert clusters_in("") is None


@pytest.mark.parametrize("text", [TARGETS_HELP, clusters_file.__doc__])
def test_the_example_in_the_documentation_is_one(text: str, tmp_path: Path) -> None:
    lines = text.split("[clusters.lab]")[1].splitlines()
    kept = [line.strip() for line in lines if "=" in line or line.strip().startswith("[")]
    toml = "[clusters.lab]\n" + "\n".join(line for line in kept if "--" not in line)
    assert len(tomllib.loads(toml)["clusters"]) == 2
    clusters = read(toml, tmp_path)
    assert clusters.names == ("lab", "pod")
    assert parse_target("lab", {}, clusters).absent.num_devices == 128
    assert parse_target("pod", {}, clusters).absent.num_devices == 256


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`clusters` is missing"),
        ("clusters = {}", "`clusters` must not be empty"),
        ("[cluster.lab]\n", "`cluster` is not a known key (did you mean `clusters`?)"),
        (LAB + "node = 3\n", "`clusters.lab.node` is not a known key (did you mean `nodes`?)"),
        (LAB.replace("16", '"16"'), "`clusters.lab.nodes` must be an integer"),
        (LAB.replace("16", "0"), "`clusters.lab.nodes` must be greater than 0"),
        (LAB.replace("400e9", "-1"), "`clusters.lab.network_bytes_per_s` must be greater than 0"),
        (LAB.replace("400e9", "inf"), "`clusters.lab.network_bytes_per_s`"),
        (
            LAB.replace("h100", "h1000"),
            "`clusters.lab.chip` is `h1000`, which is neither on record",
        ),
        (LAB.replace("nodes = 16\n", ""), "`clusters.lab.nodes` is missing"),
        (LAB.replace("network_bytes_per_s = 400e9\n", ""), "`clusters.lab.network_bytes_per_s` is"),
        (LAB.replace("16", "100000"), "has 800000 devices; at most 131072 are possible"),
        (LAB + "torus = [2, 2]\n", "`clusters.lab.torus` does not go with `h100`, a GPU"),
        (LAB + "joined_devices = 12\n", "`clusters.lab.joined_devices` is 12, not a multiple of"),
        (LAB.replace("clusters.lab", "clusters.Lab"), "`clusters.Lab` is not a name for targets"),
        (LAB.replace("lab", "cpu"), "`clusters.cpu` has the name of a target that exists"),
        (LAB.replace("lab", "local"), "`clusters.local` has the name of a target that exists"),
        (LAB.replace("lab", "h100-8"), "`clusters.h100-8` has the name of a target"),
        (LAB.replace("lab", "v5e-16"), "`clusters.v5e-16` has the name of a target"),
        (
            POD.replace("4, 4, 8", "4, 4, 6"),
            "`clusters.pod.torus` is 4x4x6: larger slices are made",
        ),
        (POD.replace("4, 4, 8", "4, 4"), "is 4x4: slices of TPU v5p have 3 dimensions"),
        (POD.replace("4, 4, 8", "8"), "`clusters.pod.torus` has 1 dimensions"),
        (POD.replace("= 2", "= 2000"), "`clusters.pod.slices` is 2000; at most 1024"),
        (POD + "wraps = [true]\n", "`clusters.pod.wraps` has 1 values, but the torus 3 dimensions"),
        (POD + "host = [3, 1, 1]\n", "`clusters.pod.host` is 3x1x1, of which no torus of 4x4x8"),
        (POD + "nodes = 3\n", "`clusters.pod.nodes` does not go with `v5p`, a TPU"),
        (OWN_GPU.replace('platform = "gpu"\n', ""), "`chips.x1.platform` is missing"),
        (OWN_GPU.replace("hbm_bytes = 100e9\n", ""), "`chips.x1.hbm_bytes` is missing"),
        (OWN_GPU.replace("bf16", "fp8"), "`chips.x1.flops_per_s` has no `bf16`"),
        (OWN_GPU.replace("1e15", "0"), "`chips.x1.flops_per_s.bf16` must be greater than 0"),
        (OWN_GPU.replace('"gpu"', '"npu"'), "`chips.x1.platform` must be 'gpu', 'tpu'"),
        ('[chips.x]\nlike = "h10"\n' + LAB, "`chips.x.like` is `h10`, which is not on record"),
        ('[chips.x]\nlike = "h100"\nplatform = "tpu"\n' + LAB, "`chips.x.platform` is `tpu`, but"),
        (OWN_TPU.replace("wraps = [true, false]\n", ""), "`clusters.t.wraps` is missing"),
        (
            OWN_TPU.replace("network_bytes_per_s = 50e9\n", ""),
            "`clusters.t.network_bytes_per_s` is",
        ),
        ("[clusters.lab\n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_told_by_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(text, tmp_path)
    assert said in caught.value.message
    assert str(tmp_path / "our.toml") in caught.value.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lab-129", "target `lab-129` asks for 129 devices of `lab`, which has 128"),
        ("lab-0", "target `lab-0` asks for 0 devices of `lab`, which has 128"),
        ("lab-12", "target `lab-12` has 12 GPUs; machines of this kind have 8 each"),
        ("pod-3", "target `pod-3` asks for 3 slices of `pod`, which has 2"),
        ("lap", "`lap` is not a target, nor one of"),
    ],
)
def test_parts_that_there_are_not(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(name, {}, read(LAB + POD, tmp_path))
    assert said in caught.value.message
    assert caught.value.hint


def test_the_links_of_a_cluster_are_those_that_layouts_are_worked_out_with() -> None:
    def links(*wraps: bool) -> float:
        job = LayoutJob(
            platform="tpu",
            device_kind="TPU v5 lite",
            torus=(2, 4),
            devices_per_chip=1,
            shapes=((4, 2),),  # jax winds the eight chips up into a ring.
            wraps=wraps,
        )
        return {one.axes: one.reach.links for one in lay_out(job).crooked}[0, 1]

    assert links() == links(False, False) < links(True, True)


@pytest.mark.slow
def test_a_search_for_a_cluster_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    (tmp_path / "our.toml").write_text(OWN_TPU.replace("6, 4", "2, 4"))
    ran = bad_inputs_run.run(
        "search train.py --target t-1 --hardware our.toml --dry-run --json", tmp_path
    )
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["target"], found["device"], found["device_count"]) == ("t-1", "t1", 8)
    assert "data sheet of t1" in found["speeds"]
    assert any(one["mesh"] == "dp:4,tp:2" for one in found["candidates"])
