"""Recorded TPU modules: slices and DCN, fused and asynchronous collectives, rings, kernels."""

from __future__ import annotations

import itertools

import jaxlib
import numpy as np
import pytest

from automesh.hlo import count
from automesh.hlo.schedule.nouns import Compute, Done, ScheduledLoop, Start
from tests.support.hlo_oracle import assert_agrees, has_groups_that_jaxlib_does_not_know
from tests.support.samples import recorded
from tests.support.samples.recorded import (
    AXES,
    LAYERS,
    MESHES,
    WIDTH,
    collectives,
    computes,
    counts,
    module,
    operations,
    schedule,
    transfers,
)

F32, BF16 = 4, 2
# The perceptron: two layers, each of two matrices.
MATRICES, MATRIX = 2 * 2, 512 * 2048
# A scalar crosses slices in a tile of its own.
TILE = 128 * F32

NAMES = sorted(path.name.removesuffix(".pb.gz") for path in recorded.FOLDER.glob("*.pb.gz"))


def test_every_recorded_module_has_a_mesh() -> None:
    assert sorted(MESHES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_agrees_with_jaxlib(name: str) -> None:
    if has_groups_that_jaxlib_does_not_know(recorded.serialized(name)):
        pytest.skip(f"jaxlib {jaxlib.__version__} does not know the form of these replica groups")
    assert assert_agrees(recorded.serialized(name)) == len(module(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_platform_is_told_from_the_module(name: str) -> None:
    assert schedule(name).platform == name.partition("_")[0]
    assert schedule(name).is_ordered


@pytest.mark.parametrize("name", NAMES)
def test_recorded_modules_are_small_and_name_no_folder(name: str) -> None:
    assert (recorded.FOLDER / f"{name}.pb.gz").stat().st_size < 200_000
    assert b"/tests/" not in recorded.serialized(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_transfer_that_starts_is_finished(name: str) -> None:
    begun: dict[str, int] = {}
    for one in operations(name):
        if isinstance(one, Start):
            begun[one.lane] = begun.get(one.lane, 0) + 1
        elif isinstance(one, Done):
            begun[one.lane] = begun.get(one.lane, 0) - 1
            assert begun[one.lane] >= 0, one
    assert not any(begun.values())


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_whole_and_inside_the_mesh(name: str) -> None:
    devices = int(np.prod(MESHES[name][0]))
    for medium in ("fabric", "dcn"):
        for one in transfers(name, medium):
            assert one.axes, one
            assert one.wire_bytes > 0
            if one.kind == "collective-permute":
                assert {device for pair in one.pairs for device in pair} <= set(range(devices))
            else:
                assert sorted(itertools.chain(*one.groups)) == list(range(devices))


# FLOPs.


@pytest.mark.parametrize("name", ["tpu_fsdp", "tpu_ring"])
def test_flops_of_a_transformer_follow_from_its_sizes(name: str) -> None:
    assert counts(name).flops == recorded.transformer_flops()


def test_products_that_a_tpu_writes_as_convolutions_have_their_sizes() -> None:
    sizes = {(one.batch, one.m, one.n, one.k) for c in computes("tpu_fsdp", "matrix")
             for one in c.matmuls}  # fmt: skip
    tokens = recorded.TOKENS
    assert {(1, tokens, WIDTH, WIDTH), (1, tokens, 4 * WIDTH, WIDTH)} <= sizes
    assert (32, 512, 512, 128) in sizes  # Attention scores: 4 sequences of 8 heads.


@pytest.mark.parametrize("name", ["tpu_fsdp", "tpu_ring", "tpu_dcn_dp"])
def test_products_add_up_to_the_flops_of_their_operation(name: str) -> None:
    every = computes(name, "matrix")
    assert every
    for one in every:
        assert one.flops == sum(2 * p.batch * p.m * p.n * p.k for p in one.matmuls)
        assert one.cycles > 0


@pytest.mark.parametrize(("name", "trips"), [("tpu_fsdp", [4, 4]), ("tpu_dcn_dp", [2])])
def test_trip_counts_are_derived(name: str, trips: list[int]) -> None:
    loops = [one for one in schedule(name).body.operations if isinstance(one, ScheduledLoop)]
    assert [one.trips for one in loops] == trips
    assert all(not one.uncounted for one in loops)
    # The gradient of the embedding sorts what it scatters.
    assert set(schedule(name).uncounted) <= {"arithmetic of `sort`"}


# Collectives inside one slice.


def test_fully_sharded_layers_gather_and_scatter_once_per_matrix() -> None:
    # Every layer has six matrices, gathered forwards and again backwards; the words once.
    found = collectives("tpu_fsdp")
    matrices = 6 * LAYERS
    weights = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * recorded.HIDDEN)
    words = recorded.WORDS * WIDTH
    assert found["all-gather", ("fsdp",), 4] == (2 * matrices + 1, (2 * weights + words) * BF16)
    scattered = found["reduce-scatter", ("fsdp",), 4]
    assert scattered[0] == matrices + 1
    # One matrix of every layer is padded from 1024 to 1056 rows, so that its parts are whole tiles.
    padding = LAYERS * 32 * recorded.HIDDEN
    assert scattered[1] == (weights + words + padding) * BF16
    # What is left after the scatter is summed over dp, all of a layer at once.
    assert found["all-reduce", ("dp",), 4][0] == LAYERS + 1


def test_what_an_asynchronous_fusion_computes_stands_between_its_start_and_done() -> None:
    lanes: dict[str, int] = {}
    for one in operations("tpu_fsdp"):
        if isinstance(one, Start) and one.transfer.kind == "all-gather":
            if not one.transfer.synchronous:
                lanes[one.lane] = 0
        elif isinstance(one, Done):
            if one.lane in lanes:
                assert lanes.pop(one.lane) > 0
        elif isinstance(one, Compute):
            lanes = {lane: flops + one.flops for lane, flops in lanes.items()}
    assert not lanes


def test_one_gather_hides_behind_one_product() -> None:
    seen = [one for one in operations("tpu_overlapped")
            if (isinstance(one, Compute) and one.kind == "matrix")
            or (isinstance(one, Start) and one.transfer.medium == "fabric")
            or (isinstance(one, Done) and one.lane.startswith("channel"))]  # fmt: skip
    start, first, done, second = seen
    assert isinstance(start, Start)
    assert isinstance(first, Compute)
    assert isinstance(done, Done)
    assert isinstance(second, Compute)
    assert start.transfer.payload_bytes == 4096 * 4096 * BF16
    assert start.transfer.wire_bytes == start.transfer.payload_bytes * 15 // 16
    assert first.flops == second.flops == 2 * (32768 // 16) * 4096 * 4096


def test_a_ring_of_permutes_runs_beside_the_products() -> None:
    ring = [one for one in transfers("tpu_ring") if one.kind == "collective-permute"]
    along = [one for one in ring if one.axes == ("fsdp",)]
    assert along
    assert all(one.group_size == 4 and not one.synchronous for one in along)
    # Both ways round: neighbours are four devices apart, since tp is the minor axis.
    steps = {tuple(sorted({(b - a) % 16 for a, b in one.pairs})) for one in along}
    assert {(4,), (12,)} <= steps
    assert counts("tpu_ring").flops == counts("tpu_fsdp").flops


def test_a_sparse_core_runs_collectives_beside_the_products() -> None:
    found = [one for one in transfers("tpu_sparsecore") if one.payload_bytes > TILE]
    assert not any(one.synchronous for one in found)
    # Two layers of two matrices in bfloat16, gathered forwards and backwards; their gradients are
    # summed in float32 over all devices before each takes its part.
    matrix = 2048 * 8192
    assert collectives("tpu_sparsecore") == {
        ("all-gather", ("fsdp",), 4): (8, 8 * matrix * BF16),
        ("all-reduce", ("dp", "fsdp"), 8): (4 + 1, 4 * matrix * F32 + F32),
    }
    assert counts("tpu_sparsecore").uncounted == ()


# Several slices.


def dcn(name: str) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axes) -> payload and wire bytes of what crosses slices."""
    found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for one in transfers(name, "dcn"):
        payload, wire = found.get((one.kind, one.axes), (0, 0))
        found[one.kind, one.axes] = (payload + one.payload_bytes, wire + one.wire_bytes)
    return found


def test_data_parallel_over_dcn_sends_the_gradients_once() -> None:
    # A device holds a sixteenth of each gradient after the scatter inside its slice. Between two
    # slices an all-reduce sends 2 * (2 - 1) / 2 of it.
    part = MATRICES * MATRIX * F32 // 16 + TILE
    assert dcn("tpu_dcn_dp") == {("all-reduce", ("dp",)): (part, part)}


def test_fully_sharded_over_dcn_sends_weights_twice_and_gradients_once() -> None:
    # A device holds a 32nd of each matrix and gathers it with the other slice, forwards and
    # backwards: it sends its own part. The gradient comes as a sixteenth, as above.
    parts = 2 * MATRICES * MATRIX * F32 // 32
    gradients = MATRICES * MATRIX * F32 // 16 + TILE
    assert dcn("tpu_dcn_fsdp") == {
        ("all-gather", ("fsdp",)): (2 * parts, parts),
        ("all-reduce", ("fsdp",)): (gradients, gradients),
    }


def test_an_axis_inside_a_slice_changes_nothing_between_slices() -> None:
    # Data parallel inside the slices: what each of the eight devices of fsdp there sends grows.
    parts = 2 * MATRICES * MATRIX * F32 // 16
    gradients = MATRICES * MATRIX * F32 // 16 + TILE
    assert dcn("tpu_dcn_inner") == {
        ("all-gather", ("fsdp",)): (2 * parts, parts),
        ("all-reduce", ("fsdp",)): (gradients, gradients),
    }


def test_two_axes_over_four_slices() -> None:
    parts = 2 * MATRICES * MATRIX * F32 // 8
    gradients = MATRICES * MATRIX * F32 // 8 + TILE
    assert dcn("tpu_dcn_four") == {
        ("all-gather", ("fsdp",)): (2 * parts, parts),
        # Between four slices, 2 * (4 - 1) / 4 of what a device holds.
        ("all-reduce", ("dp", "fsdp")): (gradients, gradients * 3 // 2),
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("tpu_dcn")])
def test_only_transfers_over_dcn_cross_slices(name: str) -> None:
    sizes, outer = MESHES[name]
    coordinates = np.array(np.unravel_index(np.arange(np.prod(sizes)), sizes)).T
    slices = [tuple(where // (np.array(sizes) // outer)) for where in coordinates]
    for medium in ("fabric", "dcn"):
        for one in transfers(name, medium):
            for group in [*one.groups, *one.pairs]:
                spanned = {slices[device] for device in group}
                assert len(spanned) == (1 if medium == "fabric" else len(group))


def test_every_kind_of_collective_crosses_slices_by_its_name() -> None:
    held = 1024 * 1024 * F32
    assert {
        one.kind: (one.payload_bytes, one.wire_bytes)
        for one in transfers("tpu_dcn_kinds", "dcn")
    } == {
        "all-reduce": (held, held),
        "reduce-scatter": (held, held // 2),
        "all-gather": (2 * held, held),
        "all-to-all": (2 * held, held // 2),
        "collective-permute": (held, held),
    }  # fmt: skip
    assert all(one.axes == ("dp",) for one in transfers("tpu_dcn_kinds", "dcn"))


def test_counts_name_the_axes_that_cross_slices() -> None:
    found = collectives("tpu_dcn_dp")
    assert found["all-reduce", ("dp",), 2] == (
        MATRICES + 1,
        MATRICES * MATRIX * F32 // 16 + TILE,
    )


@pytest.mark.parametrize("outer", [(), (1, 1, 1), (4, 1, 1)])
def test_a_program_of_one_slice_needs_to_know_the_others(outer: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the program runs on 16 devices of a slice"):
        count(module("tpu_dcn_dp"), list(zip(AXES, (2, 16, 1))), outer)


def test_a_device_of_a_slice_that_is_not_there_is_refused() -> None:
    # Four slices in the program, two in the mesh.
    with pytest.raises(ValueError, match="outside the mesh"):
        count(module("tpu_dcn_four"), list(zip(AXES, (2, 8, 1))), (2, 1, 1))


# Kernels and the host.


def test_a_kernel_counts_as_its_author_estimates_it() -> None:
    (kernel,) = computes("tpu_pallas", "kernel")
    assert (kernel.flops, kernel.hbm_bytes, kernel.dtype) == (3 * 512 * 512, 123456, "f32")
    remark = "custom call `tpu_custom_call` counted as its author estimates it"
    assert counts("tpu_pallas").uncounted == (remark,)
    assert counts("tpu_pallas").flops == 2 * 2 * 512**3 + kernel.flops


def test_a_kernel_without_an_estimate_is_named() -> None:
    (kernel,) = computes("tpu_pallas_bare", "kernel")
    assert kernel.flops == 0
    assert counts("tpu_pallas_bare").uncounted == ("custom call `tpu_custom_call`",)
    assert counts("tpu_pallas_bare").flops == 2 * 2 * 512**3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_names_of_axes_do_not_matter_for_bytes(order: tuple[int, ...]) -> None:
    named = [(AXES[position], size) for position, size in zip(order, MESHES["tpu_fsdp"][0])]
    again = count(module("tpu_fsdp"), named)
    assert sorted((c.kind, c.count, c.wire_bytes) for c in again.collectives) == sorted(
        (c.kind, c.count, c.wire_bytes) for c in counts("tpu_fsdp").collectives
    )
    assert (again.flops, again.hbm_bytes) == (
        counts("tpu_fsdp").flops,
        counts("tpu_fsdp").hbm_bytes,
    )
