"""What single instructions of a schedule move: sends, groups of collectives, work elsewhere."""

from __future__ import annotations

import pytest

from automesh.hlo.schedule.nouns import Compute, Start
from automesh.hlo.schedule.totals import tally_of
from tests.support.hlo_text import ADD, EIGHT, GPU, WHOLE, schedule, spelled

EXCHANGE = """  p = f32[64]{0} parameter(0)
  a = token[] after-all()
  b = token[] after-all()
  r = (f32[64]{0}, u32[], token[]) recv(a), channel_id=1,
    frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}
  s = (f32[64]{0}, u32[], token[]) send(p, b), channel_id=1,
    frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}
  rd = (f32[64]{0}, token[]) recv-done(r), channel_id=1DONE
  sd = token[] send-done(s), channel_id=1DONE
  ROOT g = f32[64]{0} get-tuple-element(rd), index=0"""


# XLA writes the pairs beside the send and the receive, not always beside their ends.
@pytest.mark.parametrize(
    "attributes",
    ["", ', frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}'],
)
def test_a_send_among_the_devices_is_a_permute_that_ends_when_it_is_received(
    attributes: str,
) -> None:
    plan = schedule(EXCHANGE.replace("DONE", attributes), axes=(("pp", 4),))
    assert spelled(plan.body) == [
        "start collective-permute s",
        "done s",
    ]
    start = plan.body.operations[0]
    assert isinstance(start, Start)
    assert start.transfer.pairs == ((0, 1), (1, 2), (2, 3))
    assert (start.transfer.axes, start.transfer.wire_bytes) == (("pp",), WHOLE)
    assert plan.uncounted == ()


def test_a_send_to_the_host_is_named_and_finished() -> None:
    entry = """  p = f32[64]{0} parameter(0)
  a = token[] after-all()
  s = (f32[64]{0}, u32[], token[]) send(p, a), channel_id=1, is_host_transfer=true
  ROOT sd = token[] send-done(s), channel_id=1, is_host_transfer=true"""
    plan = schedule(entry)
    assert spelled(plan.body) == ["start send s", "done s"]
    assert plan.uncounted == ("send to or from the host or another program",)


def test_megascale_devices_that_are_named_in_another_way_are_refused() -> None:
    entry = """  p = f32[64]{0} parameter(0)
  a = token[] after-all()
  ROOT s = (f32[64]{0}, u32[], token[]) send(p, a), channel_id=1, is_host_transfer=true,
    frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",
    _xla_megascale_target="all",_xla_megascale_transfer_type="ALL_REDUCE"}"""
    with pytest.raises(ValueError, match="in a way that is not known"):
        schedule(entry)


def test_work_on_another_thread_stands_where_it_starts() -> None:
    body = """work {
  x = f32[64]{0} parameter(0)
  ROOT n = f32[64]{0} negate(x)
}"""
    entry = """  p = f32[64]{0} parameter(0)
  s = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(p), calls=work
  ROOT d = f32[64]{0} async-done(s)"""
    assert spelled(schedule(entry, body).body) == ["memory n"]


def test_work_on_the_host_is_no_work_of_the_device() -> None:
    body = """work {
  x = f32[64,64]{1,0} parameter(0)
  ROOT n = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    entry = """  p = f32[64,64]{1,0} parameter(0)
  s = ((f32[64,64]{1,0}), f32[64,64]{1,0}, u32[]) async-start(p), calls=work,
    async_execution_thread="host"
  y = f32[64,64]{1,0} negate(p)
  d = f32[64,64]{1,0} async-done(s)
  ROOT t = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(y, d)"""
    plan = schedule(entry, body + ', execution_thread="host"')
    assert spelled(plan.body) == ["start copy s", "memory y", "done s"]
    assert tally_of(plan.body).flops == 0
    (start, *_) = plan.body.operations
    assert isinstance(start, Start)
    assert (start.transfer.medium, start.transfer.wire_bytes) == ("host", 2 * 64 * WHOLE)
    assert plan.uncounted == ("work on the host, but for what it takes and returns",)


GROUP = """together {
  a = f32[64]{0} parameter(0)
  b = f32[64]{0} parameter(1)
  g = f32[256]{0} all-gather(a), channel_id=1, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, dimensions={0}
  r = f32[64]{0} all-reduce(b), channel_id=2, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, to_apply=add
  ROOT t = (f32[256]{0}, f32[64]{0}) tuple(g, r)
}"""
GROUPED = """  p = f32[64]{0} parameter(0)
  x = f32[8,8]{1,0} parameter(1)
  w = ((f32[64]{0}, f32[64]{0}), (f32[256]{0}, f32[64]{0})) async-start(p, p), calls=together,
    CONFIG
  m = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  d = (f32[256]{0}, f32[64]{0}) async-done(w)
  ROOT t = ((f32[256]{0}, f32[64]{0}), f32[8,8]{1,0}) tuple(d, m)"""


def test_all_collectives_of_a_group_are_started_and_waited_for() -> None:
    entry = GROUPED.replace("CONFIG", GPU.replace("SYNC", "false"))
    plan = schedule(entry, ADD, GROUP, axes=EIGHT)
    assert spelled(plan.body) == [
        "start all-gather w",
        "start all-reduce w",
        "matrix m",
        "done w",
        "done w",
    ]
    moved = [one.transfer for one in plan.body.operations if isinstance(one, Start)]
    assert [(one.name, one.payload_bytes) for one in moved] == [("g", 4 * WHOLE), ("r", WHOLE)]
    at_once = schedule(
        GROUPED.replace("CONFIG", GPU.replace("SYNC", "true")), ADD, GROUP, axes=EIGHT
    )
    assert spelled(at_once.body) == [
        "start all-gather w",
        "done w",
        "start all-reduce w",
        "done w",
        "matrix m",
    ]


# What was widened: XLA for CPUs alone widens what it moves.

GATHERED = """  p = bf16[256]{0} parameter(0)
  c = f32[256]{0} convert(p)
  g = f32[1024]{0} all-gather(c), channel_id=1, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, dimensions={0}CONFIG
  ROOT n = bf16[1024]{0} convert(g)"""
REDUCED = """  p = f32[1024]{0} parameter(0)
  ROOT r = f32[1024]{0} all-reduce(p), channel_id=2, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, to_apply=add.REDUCERCONFIG"""


def moved_bytes(entry: str, platform: str, *computations: str) -> int:
    config = ", " + GPU.replace("SYNC", "true") if platform == "gpu" else ""
    plan = schedule(entry.replace("CONFIG", config), *computations, axes=EIGHT)
    assert (plan.platform, plan.uncounted) == (platform, ())
    (start, *_) = [one for one in plan.body.operations if isinstance(one, Start)]
    return start.transfer.payload_bytes


@pytest.mark.parametrize(
    ("reducer", "platform", "width"),
    [
        ("1_promoted", "cpu", 2),
        ("1_reassoc_promoted", "cpu", 4),  # One reduction of a sum that was made in 32 bits.
        ("1_promoted", "gpu", 4),
        ("1_reassoc_promoted", "gpu", 4),
    ],
)
def test_reductions_are_as_wide_as_what_moves(reducer: str, platform: str, width: int) -> None:
    reduction = ADD.replace("add {", f"add.{reducer} {{")
    assert moved_bytes(REDUCED.replace("REDUCER", reducer), platform, reduction) == width * 1024


@pytest.mark.parametrize(("platform", "width"), [("cpu", 2), ("gpu", 4)])
def test_gathers_are_as_wide_as_what_moves(platform: str, width: int) -> None:
    assert moved_bytes(GATHERED, platform) == width * 1024


@pytest.mark.parametrize(("flops", "counted"), [("2000", 2000), ("-1", 0)])
def test_a_kernel_of_negative_cost_states_nothing(flops: str, counted: int) -> None:
    cost = '{"flops":"FLOPS","bytes_accessed":"4096"}'.replace("FLOPS", flops)
    entry = """  p = f32[64]{0} parameter(0)
  ROOT k = f32[64]{0} custom-call(p), custom_call_target="tpu_custom_call",
    backend_config={"custom_call_config":{"cost_estimate":COST}}"""
    (kernel,) = schedule(entry.replace("COST", cost)).body.operations
    assert isinstance(kernel, Compute)
    assert (kernel.flops, kernel.hbm_bytes) == (counted, 4096 if counted else 2 * WHOLE)
    author = " counted as its author estimates it" if counted else ""
    assert kernel.uncounted == f"custom call `tpu_custom_call`{author}"
