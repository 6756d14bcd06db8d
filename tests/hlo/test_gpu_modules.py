"""Recorded GPU modules: asynchronous starts, cuBLAS and Triton products, copies to the host."""

from __future__ import annotations

import pytest

from automesh.hlo.schedule.nouns import Compute, Done, ScheduledLoop, Start
from tests.support.samples import recorded
from tests.support.samples.recorded import (
    LAYERS,
    TOKENS,
    WIDTH,
    collectives,
    computes,
    counts,
    operations,
    schedule,
)

BF16 = 2
SIXTEEN = ["gpu_fsdp", "gpu_tp", "gpu_cublas"]


@pytest.mark.parametrize("name", SIXTEEN)
def test_flops_are_those_of_the_step_whatever_multiplies(name: str) -> None:
    assert counts(name).flops == recorded.transformer_flops()
    assert counts(name).uncounted == ()


def test_products_are_calls_of_cublas_without_triton() -> None:
    every = computes("gpu_cublas", "matrix")
    assert {one.opcode for one in every} == {"__cublas$lt$matmul"}
    sizes = {(p.batch, p.m, p.n, p.k) for one in every for p in one.matmuls}
    # On a device 8 times the tokens of a sixteenth, an eighth of the hidden width.
    assert (1, 8 * TOKENS, recorded.HIDDEN // 8, WIDTH) in sizes


def test_scratch_memory_of_a_library_is_no_traffic() -> None:
    up = next(
        one
        for one in computes("gpu_cublas", "matrix")
        if [(p.m, p.n, p.k) for p in one.matmuls] == [(8 * TOKENS, recorded.HIDDEN // 8, WIDTH)]
    )
    rows, columns = 8 * TOKENS, recorded.HIDDEN // 8
    assert up.hbm_bytes == BF16 * (rows * WIDTH + WIDTH * columns + rows * columns)


def test_triton_fusions_are_products() -> None:
    every = computes("gpu_tp", "matrix")
    assert {one.opcode for one in every} == {"fusion"}
    assert all(one.flops == sum(2 * p.batch * p.m * p.n * p.k for p in one.matmuls)
               for one in every)  # fmt: skip


@pytest.mark.parametrize("name", SIXTEEN)
def test_layers_loop_as_often_as_stated(name: str) -> None:
    loops = [one for one in schedule(name).body.operations if isinstance(one, ScheduledLoop)]
    assert [one.trips for one in loops] == [LAYERS, LAYERS]


def test_tensor_parallel_layers_sum_their_activations_on_every_product() -> None:
    # Two sums forwards, two again, two backwards, less the last of the forward pass that nothing
    # needs again; and the logits' gradient. Three small ones belong to the softmax.
    found = collectives("gpu_tp")["all-reduce", ("tp",), 8]
    activation = 8 * TOKENS * WIDTH * BF16
    assert found[0] == 5 * LAYERS + 1 + 3
    assert found[1] // activation == 5 * LAYERS + 1


def test_some_starts_are_waited_for_at_once_and_others_are_not() -> None:
    seen = [one for one in operations("gpu_tp") if not isinstance(one, Compute)]
    for one, after in zip(operations("gpu_tp"), operations("gpu_tp")[1:]):
        if isinstance(one, Start) and one.transfer.synchronous:
            assert isinstance(after, Done)
            assert after.lane == one.lane
    kinds = {one.transfer.synchronous for one in seen if isinstance(one, Start)}
    assert kinds == {True, False}


def test_one_gather_hides_behind_one_product() -> None:
    start, first, done, second = operations("gpu_overlapped")
    assert isinstance(start, Start)
    assert isinstance(first, Compute)
    assert isinstance(done, Done)
    assert isinstance(second, Compute)
    assert (start.transfer.kind, start.transfer.synchronous) == ("all-gather", False)
    assert start.transfer.payload_bytes == 4096 * 4096 * BF16
    assert first.flops == second.flops == 2 * (32768 // 8) * 4096 * 4096


@pytest.mark.parametrize("name", ["gpu_offload", "tpu_offload"])
def test_activations_go_to_the_host_and_come_back(name: str) -> None:
    """Of four layers the inputs, which are a device's share of 4096 rows of 1024."""
    copies = recorded.transfers(name, "host")
    assert len(copies) == 2 * 4
    share = 4096 // recorded.MESHES[name][0][0] * 1024 * BF16
    assert {one.payload_bytes for one in copies} == {share}
    assert {one.kind for one in copies} == {"copy"}
    assert not any(one.synchronous for one in copies)
    assert not any(kind == "copy" for kind, _, _ in collectives(name))
