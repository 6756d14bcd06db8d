"""A step that is a pipeline: recognised, compiled stage by stage, described, and run in visits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from automesh.cost.pipeline.outcome import busiest_counts, schedule_of, worst_memory
from automesh.errors import UsageError
from automesh.hardware.absent import AbsentDevices
from automesh.mesh.axes import MeshAxis, Scalar
from automesh.outcomes import PipelineOutcome
from automesh.pipeline import simulate
from automesh.program.absent.compile import CompileOrder
from automesh.program.execute.team import Alone
from automesh.program.execute.timed_loop import KeptLoops, visit
from automesh.program.lower.any_step import lower_any
from automesh.program.nouns import Entry
from automesh.program.script.build import Built, build_on
from automesh.program.script.load import load_entry
from automesh_pipeline.search.absent import fingerprint_of_part
from automesh_pipeline.search.attached import compile_here, count_here, prepare_pipeline
from automesh_pipeline.search.lower import (
    StagedProgram,
    lower_pipeline,
    pipeline_of,
)
from automesh_pipeline.search.lower_absent import first_devices, first_granules, moved_to
from automesh_pipeline.search.stage_needs import device_bytes
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "pipelined.py"
WIDTH, LAYERS, ROWS = 16, 4, 32


def built(pp: int, dp: int = 1, tp: int = 1, **knobs: Scalar) -> Built:
    entry = Entry(kind="script", location=str(SCRIPT))
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    axes = [MeshAxis(name=name, ici=size) for name, size in sizes.items()]
    return build_on(load_entry(entry), axes, knobs=tuple(knobs.items()))


def lowered(pp: int, dp: int = 1, tp: int = 1, **knobs: Scalar) -> StagedProgram:
    program = lower_any(built(pp, dp, tp, **knobs))
    assert isinstance(program, StagedProgram)
    return program


def described(program: StagedProgram) -> PipelineOutcome:
    return count_here(program, compile_here(program, ()))


def losses(program: StagedProgram, built: Built) -> tuple[tuple[float, ...], str]:
    """Of three steps, and where the arguments came from."""
    ready = prepare_pipeline(
        program, compile_here(program, ()), fingerprint="", build_again=lambda: built
    )
    seen = visit(
        ready,
        kept=KeptLoops(),
        key=(),
        keep=False,
        steps=1,
        samples=1,
        loss_steps=3,
        warmup_s=0.0,
        since_s=time.perf_counter(),
        started=lambda: None,
        team=Alone(),
    )
    assert len(seen.samples_s) == 1 and seen.samples_s[0] > 0
    return seen.losses, ready.values


def losses_alone() -> list[float]:
    workload = built(1).workload
    assert workload.init is not None
    state, batch = workload.init(None)
    found: list[float] = []
    for _ in range(3):
        state, metrics = workload.step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def test_a_step_is_a_pipeline_by_its_type() -> None:
    assert pipeline_of(built(1)) is None
    assert pipeline_of(built(2)) is not None


def test_the_fingerprint_tells_apart_what_is_run_in_another_way() -> None:
    one = lowered(2, 2).fingerprint(())
    assert lowered(2, 2).fingerprint(()) == one
    others = [
        lowered(2, 2, schedule="gpipe"),
        lowered(2, 2, microbatches=8),
        lowered(2, 1, 2),
    ]
    assert len({one, *(other.fingerprint(()) for other in others)}) == 4
    assert lowered(2, 2).fingerprint((("xla_cpu_enable_fast_math", True),)) != one


def test_the_axes_that_stages_name_and_the_one_that_cuts_them() -> None:
    names = ("pp", "dp", "tp", "sp")
    assert lowered(2, 2, 2).named_axes(names) == ("pp", "dp", "tp")


def test_stages_say_what_their_programs_and_the_schedule_need() -> None:
    found = described(lowered(2, 2, schedule="gpipe"))
    weights = 4 * WIDTH * WIDTH * (LAYERS // 2)
    rows = 4 * WIDTH * ROWS // 4 // 2  # of one microbatch on one of two devices
    for stage in found.stages:
        # Parameters, Adam's two moments and its count, the sums of gradients.
        assert stage.lasting_bytes == 4 * weights + 4
    first, last = found.stages
    assert (first.next_bytes, first.previous_bytes) == (rows, 0)
    assert (last.next_bytes, last.previous_bytes) == (0, rows)
    assert first.activation_bytes == rows
    assert last.activation_bytes == 2 * rows  # its input, and the rows that it compares with
    live = simulate(schedule_of(found)).peak_live
    assert live == (4, 4)
    for stage, count in zip(found.stages, live, strict=True):
        wanted = stage.lasting_bytes + max(
            count * stage.activation_bytes + stage.working_bytes, stage.finishing_bytes
        )
        assert stage.peak_bytes == wanted
    assert worst_memory(found).peak_bytes == max(stage.peak_bytes for stage in found.stages)


def test_1f1b_holds_less_than_gpipe_by_the_activations_that_it_does_not_hold() -> None:
    eager, usual = (
        described(lowered(2, schedule=name, microbatches=8)).stages for name in ("gpipe", "1f1b")
    )
    saved = [one.peak_bytes - other.peak_bytes for one, other in zip(eager, usual, strict=True)]
    assert saved == [
        (8 - held) * stage.activation_bytes for held, stage in zip((2, 1), usual, strict=True)
    ]


@pytest.mark.long
def test_the_busiest_rank_is_counted_as_often_as_its_actions_run() -> None:
    found = described(lowered(2))
    per_rows = 2 * ROWS * WIDTH * WIDTH * (LAYERS // 2)
    # The last stage computes its layers once, and twice that going back; the first one computes
    # them again then, and needs no gradient of the batch.
    last = 3 * per_rows
    first = per_rows + per_rows + 2 * per_rows - per_rows // 2
    assert busiest_counts(found).flops == max(first, last)


@pytest.mark.parametrize(
    ("sizes", "knobs"),
    [
        ((2, 2, 2), {}),
        pytest.param((4, 1, 2), {"schedule": "zb_h1"}, marks=pytest.mark.long),
        pytest.param((4, 2, 1), {"schedule": "gpipe", "microbatches": 8}, marks=pytest.mark.long),
    ],
)
def test_visits_run_the_real_pipeline(
    sizes: tuple[int, int, int], knobs: dict[str, Scalar]
) -> None:
    found, values = losses(lowered(*sizes, **knobs), built(*sizes, **knobs))
    assert values == "user"
    assert found == pytest.approx(losses_alone(), rel=1e-5)


@pytest.mark.long
def test_what_no_init_gives_is_made_up_and_the_optimizer_starts_its_own_state() -> None:
    found, values = losses(lowered(2, 2, with_init=False), built(2, 2, with_init=False))
    again, _ = losses(lowered(4, 1, 2, with_init=False), built(4, 1, 2, with_init=False))
    assert values == "synthetic"
    assert found == pytest.approx(again, rel=1e-5)
    assert found[2] < found[0]


def test_arguments_that_are_none_of_a_pipelines_are_refused_in_one_sentence() -> None:
    one = built(2)
    step = pipeline_of(one)
    assert step is not None
    for args, said in (
        ((one.workload.args[0],), "takes a state and a batch"),
        (({}, {}), "the first argument of a pipeline's step is its state, got a dict"),
    ):
        wrong = replace(one, workload=replace(one.workload, args=args))
        with pytest.raises(UsageError, match=said):
            lower_pipeline(wrong, step)
    donated = replace(one, workload=replace(one.workload, donate_argnums=0))
    with pytest.raises(UsageError, match="mean nothing"):
        lower_pipeline(donated, step)


def test_bytes_are_those_of_the_device_that_holds_most() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    structs: list[Any] = [
        jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding),
        jax.ShapeDtypeStruct((3,), np.int8),
    ]
    assert device_bytes(structs) == 4 * 4 * 4 + 3


class _Chip:
    """A device of a torus of 4x4 in tiles of 2x2, as libtpu numbers them."""

    platform = "tpu"

    def __init__(self, x: int, y: int, granule: int = 0, core: int = 0) -> None:
        self.core_on_chip = core
        self.coords = (x, y, 0)
        self.slice_index = granule
        self.id = 16 * granule + 8 * (y // 2) + 4 * (x // 2) + 2 * (y % 2) + x % 2

    def __repr__(self) -> str:
        core = f",{self.core_on_chip}" if self.core_on_chip else ""
        return f"{self.slice_index}:{self.coords[0]},{self.coords[1]}{core}"


def test_a_part_of_a_torus_is_turned_to_cover_the_first_devices() -> None:
    devices = [_Chip(x, y, granule) for granule in (0, 1) for y in range(4) for x in range(4)]

    def turned(chosen: list[_Chip]) -> list[str]:
        return [f"{one}" for one in first_devices(chosen, devices)]

    left = [one for one in devices if one.coords[0] < 2 and not one.slice_index]
    upper = [one for one in devices if one.coords[1] < 2 and not one.slice_index]
    assert turned(upper) == [f"{one}" for one in upper]
    assert turned(left) == [f"0:{one.coords[1]},{one.coords[0]}" for one in left]


def test_a_stage_on_later_slices_moves_to_as_many_slices_of_their_own() -> None:
    four = [_Chip(x, y, granule) for granule in range(4) for y in range(2) for x in range(2)]
    two = [one for one in four if one.slice_index < 2]
    chosen = [one for one in four if one.slice_index in (1, 3)][::-1]
    assert [f"{one}" for one in moved_to(two, chosen)] == [f"{one}" for one in two[::-1]]


def test_cores_of_a_chip_stay_apart() -> None:
    four = [_Chip(0, 0, granule, core) for granule in range(4) for core in (0, 1)]
    chosen = [one for one in four if one.slice_index == 2][::-1]
    assert [f"{one}" for one in moved_to(four[:2], chosen)] == ["0:0,0,1", "0:0,0"]


def nodes_of_gpus(count: int) -> AbsentDevices:
    return AbsentDevices(
        platform="gpu",
        device_kind="H100",
        num_devices=8 * count,
        num_granules=count,
        num_hosts=count,
        topology=f"{count}x1x8",
    )


def test_nodes_of_gpus_are_compiled_for_as_they_are() -> None:
    assert first_granules(nodes_of_gpus(4), 2) == nodes_of_gpus(4)


def test_programs_for_the_same_devices_in_another_order_are_not_the_same() -> None:
    order = CompileOrder(
        one=nodes_of_gpus(1),
        options=(),
        effort="default",
        store=None,
        plan="",
        axes=(("a", 2), ("b", 2)),
        dcn=(1, 1),
        began_s=0.0,
    )
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    keys: list[str] = []
    for arranged in (devices, devices.T, devices.copy()):
        mesh = Mesh(arranged, ("a", "b"))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
        like = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=split)
        low = jax.jit(lambda x: x.sum(axis=0)).lower(like)
        keys.append(fingerprint_of_part(low, order, [device.id for device in mesh.devices.flat]))
    assert keys[0] == keys[2] != keys[1]
