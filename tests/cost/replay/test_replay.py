"""Schedules on hardware: seconds, causes and what holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.replay.replay import replay
from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.chips import chip_called
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import (
    Branch,
    Compute,
    DeviceTransfer,
    Operation,
    ScheduledBlock,
    ScheduledProgram,
    Start,
)
from automesh.mesh.axes import MeshAxis
from automesh.outcomes import ReplayOutcome
from tests.support.samples.replay_samples import (
    Nominal,
    begin,
    collective,
    end,
    layouts_of,
    loop,
    mesh,
    node_fabric,
    product,
    ring,
    schedule,
    slice_fabric,
)

AXES = mesh(fsdp=4, tp=4)
MILLI = 1e-3


def replayed(
    axes: Sequence[MeshAxis],
    *operations: Operation,
    fabric: Fabric | None = None,
    speeds: Speeds | None = None,
) -> ReplayOutcome:
    fabric = fabric or slice_fabric("v5e:4x4")
    result, _ = replay(
        schedule(axes, *operations),
        axes=axes,
        hardware=HardwareModel(
            fabric=fabric, layouts=layouts_of(fabric, axes), speeds=speeds or Nominal()
        ),
    )
    return result


def causes(result: ReplayOutcome) -> dict[str, float]:
    """In milliseconds."""
    return {name: pytest.approx(seconds / MILLI) for name, seconds in result.causes}


def copy(medium: str, payload_bytes: int, *, hbm_bytes: int = 0) -> DeviceTransfer:
    return DeviceTransfer(
        name=f"{medium}-copy",
        kind="copy",
        medium=medium,  # pyright: ignore[reportArgumentType]
        payload_bytes=payload_bytes,
        wire_bytes=payload_bytes,
        hbm_bytes=hbm_bytes,
    )


def test_two_products_and_an_overlapped_gather() -> None:
    # 3/4 of 4 MB over a line of 1 GB/s: 3 ms; each product 2.5e8 operations at 100 GFLOP/s: 2.5 ms.
    gather = collective("all-gather", AXES, "tp", 4_000_000)
    result = replayed(AXES, begin(gather), product("a", 500), end(gather), product("b", 500))
    assert result.step_s == pytest.approx(5.5 * MILLI)
    assert causes(result) == {"compute": 5.0, "ici tp": 0.5}
    assert result.communication_s == (("ici tp", pytest.approx(3.0 * MILLI)),)
    busy = {name: pytest.approx(seconds / MILLI) for name, seconds in result.busy_s}
    assert busy == {"core": 5.0, "x+": 3.0, "x-": 3.0}
    assert result.bracket_s == pytest.approx((5.0 * MILLI, 8.0 * MILLI))
    # 5e8 FLOPs in 5.5 ms against 197 TFLOP/s.
    assert result.mfu == pytest.approx(5e8 / (5.5 * MILLI * 197e12))
    assert result.uncounted == ()


def test_gathers_of_two_axes_meet_only_on_common_links() -> None:
    # fsdp lies along y, tp along x: both gathers run at once.
    tp = collective("all-gather", AXES, "tp", 4_000_000)
    fsdp = collective("all-gather", AXES, "fsdp", 4_000_000)
    apart = replayed(AXES, begin(tp), begin(fsdp), end(tp), end(fsdp))
    assert apart.step_s == pytest.approx(3.0 * MILLI)
    # Over both axes there are two links: 15/16 of 4 MB at 2 GB/s, on the links of tp as well.
    both = collective("all-gather", AXES, "fsdp+tp", 4_000_000)
    together = replayed(AXES, begin(tp), begin(both), end(tp), end(both))
    assert together.step_s == pytest.approx((3.0 + 1.875) * MILLI)


def test_rings_both_ways_share_a_line_and_not_a_closed_dimension() -> None:
    there, back = ring(AXES, "tp", 1, 2_000_000), ring(AXES, "tp", -1, 2_000_000)
    both = (begin(there), begin(back), end(there), end(back))
    assert replayed(AXES, begin(there), end(there)).step_s == pytest.approx(2 * MILLI)
    assert replayed(AXES, *both).step_s == pytest.approx(4 * MILLI)
    axes, fabric = mesh(fsdp=16, tp=16), slice_fabric("v5e:16x16")
    there, back = ring(axes, "tp", 1, 2_000_000), ring(axes, "tp", -1, 2_000_000)
    both = (begin(there), begin(back), end(there), end(back))
    assert replayed(axes, *both, fabric=fabric).step_s == pytest.approx(2 * MILLI)


def test_the_next_layers_gather_starts_in_this_one() -> None:
    gather = collective("all-gather", AXES, "fsdp", 4_000_000)
    first = replace(gather, name="first")
    lane = "weights"
    body = (end(gather, lane), begin(gather, lane), product("layer", 500))
    result = replayed(AXES, begin(first, lane), loop(80, *body), end(gather, lane))
    # 3 ms of gather against 2.5 ms of work: the gather sets the pace of every trip.
    assert result.step_s == pytest.approx((3 + 80 * 3) * MILLI)
    assert causes(result) == {"compute": 200.0, "ici fsdp": 43.0}


def test_memory_holds_up_what_multiplies_little() -> None:
    result = replayed(AXES, product("a", 500, hbm_bytes=4_000_000))
    assert causes(result) == {"memory": 4.0}
    assert result.bracket_s == pytest.approx((4.0 * MILLI, 6.5 * MILLI))
    elementwise = Compute(name="add", kind="memory", opcode="add", hbm_bytes=1_000_000)
    result = replayed(AXES, elementwise, speeds=Nominal(kernel_overhead_s=1e-4))
    assert causes(result) == {"memory": 1.0, "latency": 0.1}
    # 22 times the bandwidth on the chip.
    inside = Compute(name="add", kind="memory", opcode="add", onchip_bytes=22_000_000)
    assert causes(replayed(AXES, inside)) == {"memory": 1.0}


def test_stated_cycles_count_where_they_can_be_true() -> None:
    # 2.5e8 operations are 1907.3 cycles of 131072; the clock is 197e12 / 131072 = 1.503 GHz.
    one = product("a", 500)
    clock_hz = 197e12 / 131072
    tuned = replace(one, cycles=2500)
    assert replayed(AXES, tuned).step_s == pytest.approx(2500 / clock_hz)
    for cycles in (100, 1_000_000):
        odd = replayed(AXES, replace(one, cycles=cycles))
        assert odd.step_s == pytest.approx(2.5 * MILLI)
        assert odd.uncounted == (
            "the compiler's cycles are far from the operations of its matrix products: "
            "priced by their sizes",
        )
    # One that does much besides its product takes what is stated, where most of the work is as
    # it should be; fewer cycles than possible are not believed.
    slow = replace(product("b", 200), cycles=5000)
    fast = replace(product("c", 200), cycles=1)
    both = replayed(AXES, loop(10, tuned), slow, fast)
    assert both.step_s == pytest.approx((10 * 2500 + 5000) / clock_hz + 0.16 * MILLI)
    assert both.uncounted == ()
    # For memory the compiler states too many cycles: fewer than a kernel's start are believed.
    number = Compute(name="counter", kind="memory", opcode="add", hbm_bytes=12)
    assert replayed(AXES, number, speeds=Nominal(kernel_overhead_s=1e-6)).step_s < 1e-7
    tiny = Compute(name="add", kind="memory", opcode="add", hbm_bytes=8, cycles=150)
    starting = Nominal(kernel_overhead_s=1e-6)
    assert replayed(AXES, tiny, speeds=starting).step_s == pytest.approx(150 / clock_hz)
    large = Compute(name="add", kind="memory", opcode="add", hbm_bytes=10**6, cycles=10**7)
    assert replayed(AXES, large, speeds=starting).step_s == pytest.approx(1.001 * MILLI)
    # No compiler states cycles for GPUs.
    gpu = replayed(mesh(tp=8), tuned, fabric=node_fabric(1, 8))
    assert gpu.step_s == pytest.approx(2.5 * MILLI)


def test_clocks_follow_from_peaks() -> None:
    found = {
        slug: round(engines_of(chip_called(slug)).clock_hz(chip_called(slug)) / 1e9, 2)
        for slug in ("v2", "v4", "v5litepod", "v5p", "v6e", "7x", "h100")
    }
    assert found == {
        "v2": 0.7,
        "v4": 1.05,
        "v5litepod": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
        "7x": 2.2,
        "h100": 0.0,
    }


def test_a_kernel_without_a_shape_is_priced_as_a_cube() -> None:
    kernel = Compute(name="flash", kind="kernel", opcode="tpu_custom_call", flops=250_000_000)
    assert replayed(AXES, kernel).step_s == pytest.approx(2.5 * MILLI, rel=1e-2)


def test_copies_are_waited_for_as_memory_or_host() -> None:
    onto_chip = copy("memory", 1_000_000, hbm_bytes=1_000_000)
    result = replayed(AXES, begin(onto_chip), product("a", 250), end(onto_chip))
    assert causes(result) == {"compute": 0.3125, "memory": 0.6875}
    assert result.communication_s == ()
    # 15 GB/s to the host.
    offload = copy("host", 30_000_000)
    result = replayed(AXES, begin(offload), product("a", 500), end(offload))
    assert causes(result) == {"compute": 2.5}
    assert dict(result.busy_s)["host"] == pytest.approx(2 * MILLI)
    assert result.communication_s == (("host", pytest.approx(2 * MILLI)),)


def test_cross_slice_traffic_goes_by_the_network_of_the_hosts() -> None:
    axes, fabric = mesh(dp=(2, 1), fsdp=16), slice_fabric("v5e:4x4*2")
    groups = tuple((device, device + 16) for device in range(16))
    reduce = DeviceTransfer(
        name="all-reduce",
        kind="all-reduce",
        medium="dcn",
        axes=("dp",),
        groups=groups,
        group_size=2,
        payload_bytes=1_000_000,
        wire_bytes=1_000_000,
    )
    # Each of two devices sends half of the array twice: 1 MB at 0.1 GB/s.
    result = replayed(axes, begin(reduce), product("a", 500), end(reduce), fabric=fabric)
    assert causes(result) == {"compute": 2.5, "dcn dp": 7.5}
    assert {name for name, _ in result.busy_s} == {"core", "dcn"}


def test_groups_over_nodes_use_both_networks() -> None:
    axes, fabric = mesh(dp=(2, 2), tp=4), node_fabric(2, 8)
    gather = collective("all-gather", axes, "dp", 4_000_000)
    result = replayed(axes, begin(gather), end(gather), fabric=fabric)
    # Inside: half of 4 MB at 1 GB/s; between: half of each device's 2 MB at 0.1 GB/s.
    assert causes(result) == {"dcn dp": 10.0, "ici dp": 2.0}
    assert {name for name, _ in result.busy_s} == {"nvlink", "dcn"}
    assert result.step_s == pytest.approx(12 * MILLI)


def test_groups_that_fit_no_axes_are_named() -> None:
    odd = replace(collective("all-gather", AXES, "tp", 2_000_000), axes=(), groups=((0, 1),))
    odd = replace(odd, group_size=2)
    result = replayed(AXES, begin(odd), end(odd))
    assert causes(result) == {"ici other groups": 1.0}


def test_other_kinds_move_like_those_that_have_a_formula() -> None:
    spread = collective("all-to-all", AXES, "tp", 8_000_000)
    ragged = replace(spread, kind="ragged-all-to-all")
    expected = replayed(AXES, begin(spread), end(spread))
    assert replayed(AXES, begin(ragged), end(ragged)) == expected
    broadcast = collective("collective-broadcast", AXES, "tp", 4_000_000)
    assert replayed(AXES, begin(broadcast), end(broadcast)).step_s == pytest.approx(3 * MILLI)


def test_of_a_branch_the_costliest_block_is_played() -> None:
    cheap, dear = (ScheduledBlock(operations=(product("a", size),)) for size in (250, 500))
    branch = Branch(name="cond", blocks=(cheap, dear, cheap))
    result = replayed(AXES, loop(2, branch))
    assert causes(result) == {"compute": 5.0}


def test_a_program_of_another_mesh_is_refused() -> None:
    fabric = slice_fabric("v5e:4x4")
    with pytest.raises(ValueError, match="read for the mesh fsdp:4, tp:4, not fsdp:8,tp:2"):
        replay(
            schedule(AXES),
            axes=mesh(fsdp=8, tp=2),
            hardware=HardwareModel(
                fabric=fabric, layouts=layouts_of(fabric, mesh(fsdp=8, tp=2)), speeds=Nominal()
            ),
        )


def test_remarks_are_handed_on() -> None:
    fabric = slice_fabric("v5e:4x4")
    odd = ScheduledProgram(
        platform="tpu",
        axes=(("fsdp", 4), ("tp", 4)),
        body=ScheduledBlock(operations=()),
        is_ordered=False,
        uncounted=("something",),
    )
    result, timeline = replay(
        odd,
        axes=AXES,
        hardware=HardwareModel(fabric=fabric, layouts=layouts_of(fabric, AXES), speeds=Nominal()),
    )
    assert (result.step_s, result.mfu, result.causes, timeline.slices) == (0.0, 0.0, (), ())
    assert result.uncounted == (
        "something",
        "no schedule: operations stand in an order in which they can run",
    )


sizes = st.sampled_from((0, 10_000, 1_000_000, 5_000_000))


@st.composite
def operations(draw: st.DrawFn, axes: Sequence[MeshAxis]) -> list[Operation]:
    """Work and transfers; every transfer is awaited somewhere later, or at the end."""
    names = [axis.name for axis in axes]
    found: list[Operation] = []
    for number in range(draw(st.integers(1, 6))):
        payload = draw(sizes)
        over = draw(st.sampled_from((*names, "+".join(names))))
        kinds = ("all-gather", "all-reduce", "all-to-all", "permute", "memory", "host", "work")
        kind = draw(st.sampled_from(kinds))
        if kind == "work":
            one = product(f"product.{number}", draw(st.sampled_from((20, 300))), hbm_bytes=payload)
            found.append(replace(one, cycles=draw(st.sampled_from((0, 900, 10**6)))))
            continue
        if kind in ("memory", "host"):
            transfer = copy(kind, payload, hbm_bytes=payload)
        elif kind == "permute":
            step = draw(st.sampled_from((1, -1, 2)))
            transfer = ring(axes, draw(st.sampled_from(names)), step, payload)
        else:
            transfer = collective(kind, axes, over, payload)
        lane = f"lane {draw(st.integers(0, 3))}"
        found.append(begin(replace(transfer, name=f"{transfer.name}.{number}"), lane))
        if draw(st.booleans()):
            found.append(end(transfer, lane))
    return found


PLACES = (
    ("v5e:4x4", mesh(fsdp=4, tp=4)),
    ("v5e:4x4", mesh(fsdp=2, tp=8)),
    ("v5e:4x4*2", mesh(fsdp=(2, 2), tp=8)),
    ("v5e:2x4", mesh(fsdp=4, tp=2)),
    ("gpus", mesh(fsdp=(2, 2), tp=4)),
)


def fabric_at(place: str, **faster: float) -> Fabric:
    return node_fabric(2, 8, **faster) if place == "gpus" else slice_fabric(place, **faster)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_holds_for_all_schedules(data: st.DataObject) -> None:
    place, axes = data.draw(st.sampled_from(PLACES))
    body = data.draw(operations(axes))
    steps = [*data.draw(operations(axes)), loop(data.draw(st.integers(0, 9)), *body)]
    fabric, speeds = fabric_at(place), Nominal(latency_s=1e-5, kernel_overhead_s=1e-6)
    result = replayed(axes, *steps, fabric=fabric, speeds=speeds)
    step = result.step_s
    assert sum(seconds for _, seconds in result.causes) == pytest.approx(step)
    assert all(seconds <= step for _, seconds in result.busy_s)
    assert result.bracket_s[0] <= step <= result.bracket_s[1]
    exposed = sum(
        seconds for name, seconds in result.causes if name.split()[0] in ("ici", "dcn", "host")
    )
    assert exposed <= sum(seconds for _, seconds in result.communication_s) + 1e-12
    faster = [
        (fabric_at(place, links=2.0), speeds),
        (fabric_at(place, network=2.0), speeds),
        (fabric, replace(speeds, memory_bytes_per_s=2e9)),
        (fabric, replace(speeds, flops_per_s=2e11)),
        (fabric, replace(speeds, latency_s=0.0)),
    ]
    for quick, sped in faster:
        assert replayed(axes, *steps, fabric=quick, speeds=sped).step_s <= step


def test_starts_without_an_end_are_awaited_at_the_end() -> None:
    gather = collective("all-gather", AXES, "tp", 4_000_000)
    lonely: Operation = Start(transfer=gather, lane="nobody")
    assert replayed(AXES, lonely, product("a", 250)).step_s == pytest.approx(3 * MILLI)
