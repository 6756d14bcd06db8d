"""Names of devices as others publish them (tests/data/targets.json), and what they mean here."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.hardware import absent_devices_of, chip_for, parse_target
from automesh.hardware.absent import Absent
from automesh.hardware.slices import generations, slices_of
from tests.support import paths

DATA = json.loads((paths.DATA / "targets.json").read_text())
ALIASES = DATA["aliases"]["v5litepod"]
SLICES = [name for one in generations() for name in slices_of(one)]


def absent(name: str) -> Absent:
    found = parse_target(name, {}).absent
    assert found is not None
    return found


def dims(topology: str) -> tuple[int, ...]:
    return tuple(map(int, topology.split(":")[1].split("x")))


def test_the_data_is_all_there() -> None:
    assert len(DATA["topologies"]) == 222
    assert len(DATA["accelerators"]) == 224
    assert DATA["sources"]["topologies"].startswith("apple/axlearn@")


@pytest.mark.parametrize("row", DATA["topologies"], ids=lambda row: row[1])
def test_every_slice_in_the_catalogue(row: list) -> None:
    for slices in (1, 2, 3):
        check_slice(row, slices)


def check_slice(row: list, slices: int) -> None:
    name, selector, topology, chips, devices, per_chip, config, host = row
    more = f"-{slices}" if slices > 1 else ""
    found = absent(selector + more)
    fabric = found.fabric
    assert found.selector == selector + more
    assert fabric.torus == dims(topology)
    assert math.prod(fabric.torus) == chips
    assert (fabric.granule_devices, fabric.devices_per_chip) == (devices, per_chip)
    assert (fabric.num_granules, found.num_devices) == (slices, slices * devices)
    if name not in ("v5e-8",):  # Of it the documentation of v5e says more: see the aliases.
        assert found.host == tuple(host)
    assert found.num_hosts * math.prod(found.host) == slices * chips
    told = absent_devices_of(found)
    assert (told.platform, told.chip_config) == ("tpu", config)
    # `v5` is what the compiler calls v5p, too.
    assert told.topology.replace("v5p:", "v5:") == topology
    assert (told.num_devices, told.num_granules) == (found.num_devices, slices)
    assert (told.num_hosts, told.torus, told.wraps) == (found.num_hosts, fabric.torus, fabric.wraps)
    assert (told.devices_per_chip, told.host) == (per_chip, found.host)
    # By its other name, and by its shape.
    assert absent(name + more).fabric == fabric
    shaped = absent(f"{topology}*{slices}")
    assert (shaped.fabric, shaped.num_hosts, shaped.host) == (fabric, found.num_hosts, found.host)


@pytest.mark.parametrize("row", DATA["accelerators"], ids=lambda row: row[0])
def test_every_accelerator_of_maxtext(row: list) -> None:
    name, topology, devices, wraps = row
    if topology is None:
        assert name == "a3"
        assert absent(f"gpu-{name}-{devices}").num_devices == devices
        return
    found = absent(name)
    assert found.num_devices == devices
    assert found.fabric.torus == dims(topology)
    # Theirs have three values for two dimensions as well.
    flat = len(found.fabric.torus)
    assert found.fabric.wraps == tuple(wraps[:flat])
    assert not any(wraps[flat:])


@pytest.mark.parametrize("name", ALIASES)
def test_every_alias_of_v5e(name: str) -> None:
    known = ALIASES[name]
    for text in (name, f"tpu-{name}", known["same_as"], f"v5e:{known['topology']}"):
        found = absent(text)
        assert found.num_devices == known["chips"]
        assert found.num_hosts == known["hosts"]
        assert found.fabric.wraps == tuple(known["wrap"])
        assert found.fabric.torus == tuple(map(int, known["topology"].split("x")))


def test_machines_of_google_are_not_slices() -> None:
    for written, generation in DATA["aliases"]["gke_machine_types"].items():
        first, *more = written.split("/")
        stem = first.removesuffix(first[-2:])
        for machine in (first, *(stem + one for one in more)):
            for name in (machine, f"tpu-{machine}", f"{machine}-16"):
                with pytest.raises(UsageError) as caught:
                    parse_target(name, {})
                wanted = generation.replace("v7x", "7x")
                assert f"of which slices of TPU {wanted} are made, not a slice" in str(caught.value)
                example = re.findall("`([^`]*)`", caught.value.hint)
                assert all(absent(one).fabric.torus for one in example)


def expanded(pattern: str) -> list[str]:
    """The names that a selector of AXLearn's means, for those of its forms that are finite."""
    parts = re.split(r"\(([^)]*)\)", pattern)
    return ["".join(one) for one in itertools.product(*(part.split("|") for part in parts))]


def test_every_selector_of_axlearn() -> None:
    seen = 0
    for pattern in DATA["axlearn"]:
        if pattern.startswith("neuron-"):
            for name in expanded(pattern):
                with pytest.raises(UsageError, match="AWS Neuron devices are not on record"):
                    parse_target(name, {})
            continue
        names = expanded(pattern.replace("|...", ""))
        if ".*" in pattern:
            names = [name for name in SLICES if re.fullmatch(pattern, name)]
        for name in names:
            found = absent(name)
            # A rule that is written for the pattern serves the target.
            assert found.selector == name
            assert re.fullmatch(pattern.replace("|...", ""), found.selector)
            seen += 1
    assert seen > 130
    gpus = absent("gpu-p5.48xlarge-256")
    assert (gpus.num_hosts, gpus.num_devices) == (32, 256)


def test_every_rule_of_axlearn_serves_a_target() -> None:
    for pattern in DATA["axlearn_rules"]:
        regex = pattern.replace("-*", "-.*")
        sample = [*SLICES, "gpu-p5.48xlarge-512"]
        assert any(re.fullmatch(regex, name) for name in sample), pattern


def test_every_gpu_instance() -> None:
    chips = {"a100-40": "A100-SXM4-40GB", "a100-80": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB"}
    chips |= {"h200": "H200-SXM-141GB", "b200": "B200-SXM", "gb200": "GB200 NVL72 (per GPU)"}
    for names, row in DATA["gpu_instances"].items():
        each = row["gpus_per_node"]
        for name in names.lower().split("/"):
            name = "dgx-a100" if name == "dgx-a100" else name
            for machines in (1, 2, 128):
                found = absent(f"gpu-{name}-{machines * each}")
                fabric = found.fabric
                assert found.selector == f"gpu-{name}-{machines * each}"
                assert (fabric.num_granules, found.num_hosts) == (machines, machines)
                assert (fabric.granule_devices, fabric.kind) == (each, "switch")
                assert fabric.chip.name == chips[row["chip"]]
            # More than NVLink joins, even of GB200.
            share = row["node_network_bytes_per_s"] / each
            assert absent(f"gpu-{name}-{128 * each}").fabric.chip.dcn_bytes_per_s == share


# Wraps: MaxText's table and Google's pages on v4, v5e, v5p, v6e and 7x.
@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e:8x16", (False, True)),
        ("v6e:16x8", (True, False)),
        ("v5e:8x8", (False, False)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("7x:2x2x4", (False, False, False)),
        ("v4:8x8x12", (True, True, True)),
    ],
)
def test_wraps(name: str, wraps: tuple[bool, ...]) -> None:
    assert absent(name).fabric.wraps == wraps


@given(
    st.sampled_from(generations()).flatmap(
        lambda one: st.tuples(
            st.just(one),
            st.lists(st.integers(1, 20), min_size=one.dimensions, max_size=one.dimensions),
        )
    )
)
def test_any_shape_is_a_slice_or_a_sentence_that_names_two(case: tuple) -> None:
    generation, sizes = case
    name = f"{generation.aliases[0]}:{'x'.join(map(str, sizes))}"
    try:
        found = absent(name)
    except UsageError as error:
        assert f"there is no TPU slice `{name}`" in error.message
        near = re.findall("`([^`]*)`", error.hint)
        assert len(near) == 2
        assert all(absent(one).fabric.chip.platform == "tpu" for one in near)
    else:
        assert found.fabric.torus == tuple(sizes)
        assert found.num_hosts >= 1
        assert found.num_hosts * math.prod(found.host) == math.prod(sizes)


@given(st.sampled_from(generations()), st.integers(0, 40000))
def test_any_number_is_a_slice_or_a_sentence_that_names_the_nearest(generation, number) -> None:
    name = f"tpu-{generation.slug}-{number}"
    try:
        found = absent(name)
    except UsageError as error:
        near = re.findall(rf"tpu-{generation.slug}-([0-9]+)", error.message.split("nearest")[1])
        known = [int(one) for one in generation.slices]
        assert number not in known
        below, above = [n for n in known if n < number], [n for n in known if n > number]
        assert not below or str(max(below)) in near or str(min(above or [0])) in near
        assert all(absent(f"tpu-{generation.slug}-{one}") for one in near)
    else:
        counted = chip_for(generation.device_kind, "tpu").counted_per_device
        assert found.num_devices * counted == number


@given(st.sampled_from(["h100", "gb200", "a3-megagpu-8g", "p5.48xlarge"]), st.integers(0, 3000))
def test_any_number_of_gpus_fills_machines_or_the_sentence_says_which_does(name, number) -> None:
    each = absent(f"gpu-{name}-4").fabric.granule_devices if name == "gb200" else 8
    try:
        found = absent(f"gpu-{name}-{number}")
    except UsageError as error:
        assert number == 0 or (number > each and number % each)
        assert f"has {number} GPUs; machines of this kind have {each} each" in error.message
        near = [absent(one).num_devices for one in re.findall("`([^`]*)`", error.hint)]
        assert len(near) == 2
        assert near[0] <= max(number, 1) <= near[1]
    else:
        assert found.num_devices == number


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5p:4x4x4_twisted", "is a twisted torus, whose links are not on record"),
        ("gpu-h100", "target `gpu-h100` does not say how many GPUs"),
        ("h200", "target `h200` does not say how many GPUs"),
        ("gpu-h100-200000", "has 200000 GPUs; at most 131072 are possible"),
        ("tpu-v5-8", "names the TPU `v5`, whose slices are not on record (did you mean `v5p`?)"),
        ("neuron-trn2.48xlarge-64", "AWS Neuron devices are not on record"),
        ("v5p:3x3x3", "larger slices are made of cubes of 4x4x4 chips"),
    ],
)
def test_what_cannot_be(name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(name, {})
    assert said in caught.value.message
    assert caught.value.hint


def test_a_torus_that_is_not_twisted_may_say_so() -> None:
    assert absent("v5p:4x4x8_untwisted").fabric == absent("v5p:4x4x8").fabric
