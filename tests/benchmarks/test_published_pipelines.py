"""The benchmark of published layouts with pipelines: reading, pricing, statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automesh.cost.pipeline.terms import PipelineTerms, ScheduleText, StageTerms
from automesh.cost.terms import (
    CollectiveTerm,
    Kernel,
    Matmul,
    Monomial,
    Region,
    Sum,
    Terms,
    value_of,
)
from automesh.program.nouns import Propagation
from benchmarks.published.command import PIPELINES
from benchmarks.published.groups import Record, read_records
from benchmarks.published.layouts import Layout, LayoutGroup, Shape, layout_groups_of
from benchmarks.published.pipelines import Row, described, missed, regret, summary_of
from benchmarks.published.pricing import devices_of, priced
from benchmarks.published.stages import terms_of
from benchmarks.support.models import Unlike

GROUPS, OTHERS = layout_groups_of(read_records(PIPELINES))
BY_NAME = {group.name: group for group in GROUPS}
AMP = BY_NAME["amp/homogeneous"]
ONCE: Sum = (Monomial(coefficient=1.0),)


def test_every_source_has_groups_that_can_be_read() -> None:
    sources = {group.name.split("/")[0] for group in GROUPS}
    assert sources == {"vtrain_single", "vtrain_multi", "aleph_alpha", "hf_ultrascale", "amp"}
    assert len(GROUPS) >= 25
    for group in GROUPS:
        assert sum(one.measured_s > 0 for one in group.layouts) >= 2
        for one in group.layouts:
            assert one.dp * one.tp * one.pp == group.devices
            assert sum(one.stages) == group.shape.layers
            assert group.most_rows % (2 * one.rows) == 0
    assert all(reason for _, reason in OTHERS)


def test_devices_are_those_of_the_publication() -> None:
    fabric = devices_of(AMP).fabric
    assert (fabric.num_granules, fabric.granule_devices, fabric.chip.name) == (4, 4, "t4")
    for group in GROUPS:
        assert devices_of(group).num_devices == group.devices


def test_stages_are_those_that_were_run() -> None:
    stages = {one.pp: one.stages for one in AMP.layouts if one.rows == 1 and one.tp == 1}
    # [0, 9, 15, 21, 30]: three units before the first layer, three after the last one.
    assert stages[4] == (6, 6, 6, 6)
    assert stages[16] == (1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2)
    # nanotron: the head counts as four layers, a rank takes the layer that fills it.
    small = BY_NAME["hf_ultrascale/1B/32xH100"]
    assert {one.stages for one in small.layouts if one.pp == 4} <= {(6, 5, 5, 0)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallelism": {"dp": 3, "tp": 1, "pp": 4}}, "not of all devices"),
        ({"batch": {"global_batch": 33, "micro_batch": 1, "grad_accum": 8}}, "microbatches"),
        ({"extra": {"partition": [0, 1, 2, 21, 30]}}, "no layer"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_its_reason(
    changes: dict[str, dict[str, object]], reason: str
) -> None:
    records = [one for one in read_records(PIPELINES) if one.group == AMP.name]
    usual = next(one for one in records if one.parallelism["pp"] == 4)
    wrong = {name: {**getattr(usual, name), **values} for name, values in changes.items()}
    (group,), _ = layout_groups_of([*records, replace(usual, id="wrong", **wrong)])
    assert [why for name, why in group.left_out if name == "wrong"] != []
    assert reason in dict(group.left_out)["wrong"]


def test_a_group_of_nothing_readable_is_told() -> None:
    records = [one for one in read_records(PIPELINES) if one.group == AMP.name]
    failed = [replace(one, status="oom", measured={}) for one in records]
    groups, ((name, reason),) = layout_groups_of(failed)
    assert not groups
    assert name == AMP.name
    assert "fewer than two" in reason
    with pytest.raises(Unlike):
        raise Unlike(reason)


def program(collective: str) -> Terms:
    """A multiplication of the microbatch's rows, and an all-reduce over one axis."""
    rows = Monomial(coefficient=64 * 1024.0, powers=(("ep", -1),))
    side = Monomial(coefficient=4096.0)
    return Terms(
        active=("ep", "tp"),
        sampled=(("ep", 2), ("tp", 2)),
        platform="gpu",
        regions=(Region(name="step", trips=ONCE),),
        kernels=(
            Kernel(
                region=0,
                count=ONCE,
                bytes=ONCE,
                matmuls=(
                    Matmul(batch=Monomial(coefficient=1.0), m=rows, n=side, k=side, dtype="bf16"),
                ),
            ),
        ),
        collectives=(
            CollectiveTerm(
                region=0,
                count=ONCE,
                kind="all-reduce",
                axes=(collective,),
                payload_bytes=(Monomial(coefficient=1e6),),
                hides=True,
            ),
        ),
        points=(),
        argument_bytes=(),
        output_bytes=(),
        alias_bytes=(),
    )


def made(ranks: int, collective: str) -> Propagation:
    sent: Sum = (Monomial(coefficient=2.0**26, powers=(("ep", -1),)),)
    weights: Sum = (Monomial(coefficient=2.0**30),)
    stage = StageTerms(
        programs=(("F", program(collective)), ("B", program(collective))),
        finish=replace(program(collective), collectives=(), kernels=()),
        params_bytes=weights,
        sums_bytes=weights,
        state_bytes=weights,
        inputs_bytes=sent,
        saved_bytes=sent,
        outputs_bytes=sent,
        gradients_bytes=sent,
    )
    text = ScheduleText(name="1f1b", num_ranks=ranks, num_microbatches=1, num_stages=ranks)
    frame = replace(
        program(collective),
        active=("pp", "ep", "tp"),
        sampled=(("pp", ranks), ("ep", 2), ("tp", 2)),
        kernels=(),
        collectives=(),
        fixed=("pp",),
    )
    pipeline = PipelineTerms(axis="pp", schedule=text, kinds=(stage,), stages=(0,) * ranks)
    return Propagation(
        terms=frame, failed_probes=(), notes=(), lower_s=0.0, propagate_s=0.0, pipeline=pipeline
    )


def layout(**changes: object) -> Layout:
    usual = next(one for one in AMP.layouts if (one.pp, one.tp, one.rows) == (4, 2, 2))
    return replace(usual, **changes)


def causes(one: Layout, group: LayoutGroup, collective: str = "ep") -> dict[str, float]:
    found = priced(one, group, made(one.pp, collective), devices_of(group)).cost
    assert sum(found.stage_bytes) > 0
    return dict(found.causes)


def test_gradients_are_reduced_once_per_step() -> None:
    # What cuts a microbatch has no wires: its collectives are gone; those over tp are waited for.
    assert "ici ep" not in causes(layout(), AMP)
    assert causes(layout(), AMP, "tp")["ici tp"] > 0
    once = causes(layout(microbatches=8), AMP)["ici dp"]
    assert once > 0
    assert causes(layout(microbatches=16), AMP)["ici dp"] == pytest.approx(once)


def test_zero_splits_the_state_and_moves_as_much() -> None:
    plain, shared = (
        priced(layout(zero=zero), AMP, made(4, "ep"), devices_of(AMP)).cost for zero in (0, 1)
    )
    assert plain.memory_bytes - shared.memory_bytes == 2**29  # half of 1 GiB for two replicas
    assert dict(shared.causes)["ici dp"] > 0


def trained(*, tied: bool = False, vocab: int = 50304, **how: object) -> LayoutGroup:
    """AMP's trials, of another model or trained otherwise."""
    shape = replace(AMP.shape, tied=tied, vocab=vocab)
    return replace(AMP, shape=shape, trainer=replace(AMP.trainer, **how))


def exchange_s(one: Layout, group: LayoutGroup) -> float:
    found = causes(one, group)
    return found["ici dp"] + found["latency"]


def test_zero_without_scattered_gradients_moves_more() -> None:
    whole, parts = (
        exchange_s(layout(zero=1), trained(scatters=scatters)) for scatters in (False, True)
    )
    plain = exchange_s(layout(zero=0), trained())
    # The gradients to all replicas instead of a part to each: an all-reduce is sent twice.
    assert plain < parts < whole
    assert whole - parts == pytest.approx(plain / 2, rel=0.1)


def test_gradients_hide_behind_the_last_way_back_but_for_the_embedding() -> None:
    beside, after = (trained(overlaps=overlaps, vocab=128) for overlaps in (True, False))
    whole, left = (causes(layout(), group)["ici dp"] for group in (after, beside))
    # A multiplication of 64 rows' 2048 tokens by 4096 x 4096, on a T4, is not long.
    assert 0.0 < whole - left < 0.05 * whole
    # Of 32 times as many tokens it is.
    long = layout(rows=AMP.most_rows, microbatches=1)
    assert causes(long, beside)["ici dp"] < 0.7 * causes(long, after)["ici dp"]
    # What is there last is waited for, however long the way back: here that is all of it.
    large = trained(overlaps=True, vocab=2**19)
    assert causes(long, large)["ici dp"] == pytest.approx(causes(long, after)["ici dp"])
    # ZeRO reduces when all is done.
    assert causes(layout(zero=1), beside)["ici dp"] == causes(layout(zero=1), after)["ici dp"]


def test_stages_that_share_an_embedding_add_its_gradients() -> None:
    untied, tied = (causes(layout(), trained(tied=tied)) for tied in (False, True))
    # 50304 x 1024 numbers of two bytes, of which tp = 2 splits the rows, over a share of 50 Gbit/s.
    sent = 50304 * AMP.shape.d_model * 2 / 2
    assert tied["dcn pp"] - untied["dcn pp"] == pytest.approx(sent / (6.25e9 / 4 * 0.48))
    alone = layout(dp=8, stages=(24,))
    first, second = (causes(alone, trained(tied=tied)) for tied in (False, True))
    assert first == second


def test_more_microbatches_cost_in_proportion_but_for_the_bubble() -> None:
    short, long = (
        priced(layout(microbatches=count), AMP, made(4, "ep"), devices_of(AMP)).cost
        for count in (4, 8)
    )
    assert dict(long.causes)["compute"] == pytest.approx(2 * dict(short.causes)["compute"])
    assert dict(long.causes)["bubble"] == pytest.approx(dict(short.causes)["bubble"], rel=0.05)


def test_a_layout_whose_rows_and_machines_end_apart_is_refused() -> None:
    odd = layout(tp=3)
    with pytest.raises(ValueError, match="machines"):
        priced(odd, AMP, made(4, "ep"), devices_of(AMP))


def rows() -> list[Row]:
    absent = devices_of(AMP)
    found: list[Row] = []
    for number, count in enumerate((2, 4, 8, 16)):
        one = layout(microbatches=count, measured_s=1.0 + number, theirs_s=5.0 - number)
        found.append(Row(layout=one, priced=priced(one, AMP, made(4, "ep"), absent)))
    return found


def test_figures_of_a_group() -> None:
    summary = summary_of(rows(), left_out=3)
    assert summary["configs"] == 4
    assert summary["kendall_tau"] == 1.0
    assert summary["top1_regret"] == summary["top5_regret"] == 0.0
    assert summary["their_kendall_tau"] == -1.0
    assert summary["their_top1_regret"] == 3.0
    assert summary["left_out"] == 3
    assert summary["oom"] == 0
    assert "oom_recall" not in summary


def test_memory_is_judged_where_it_is_on_record() -> None:
    first, second, third, fourth = rows()
    judged = [
        replace(first, priced=replace(first.priced, fits=False)),  # said to run out, and ran
        replace(second, priced=replace(second.priced, fits=False)),
        third,
        fourth,
    ]
    judged[1] = replace(judged[1], layout=replace(second.layout, ran_out=True, measured_s=0.0))
    judged[2] = replace(third, layout=replace(third.layout, ran_out=None, measured_s=0.0))
    summary = summary_of(judged, left_out=0)
    assert (summary["oom_precision"], summary["oom_recall"]) == (0.5, 1.0)
    assert summary["failed_otherwise"] == 1
    lines = described(AMP, judged)
    assert sum("!" in line for line in lines) == 1


def test_the_cause_that_goes_with_the_error_is_named() -> None:
    def waits(row: Row) -> float:
        return dict(row.priced.cost.causes)["bubble"]

    some = rows()
    # Were there no bubbles there, what waits most here would be priced too slow by most.
    without = [
        replace(row, layout=replace(row.layout, measured_s=row.ours_s - waits(row))) for row in some
    ]
    assert "too slow" in missed(without) or "too fast" in missed(without)
    assert "(correlation" in missed(without)
    exact = [replace(row, layout=replace(row.layout, measured_s=row.ours_s)) for row in some]
    assert missed(exact) == "no cause goes with the error"
    odd = [replace(exact[0], layout=replace(exact[0].layout, measured_s=9.0)), *exact[1:]]
    assert f"`{odd[0].layout}` is predicted fastest, priced -" in missed(odd)
    assert missed(some[:2]) == "too few layouts to say why"


@pytest.mark.parametrize(("top", "found"), [(1, 0.2), (2, 0.1), (3, 0.0)])
def test_regret_is_of_the_best_of_those_that_are_predicted_best(top: int, found: float) -> None:
    assert regret([1.0, 1.2, 1.1], [3.0, 1.0, 2.0], top) == pytest.approx(found)


def test_records_keep_what_they_say() -> None:
    one = next(one for one in read_records(PIPELINES) if one.group == AMP.name)
    assert isinstance(one, Record)
    assert one.step_s > 0


@pytest.mark.long
def test_terms_of_stages_are_made_once_and_hold_for_all_rows(tmp_path: Path) -> None:
    shape = Shape(
        layers=4, d_model=64, d_ff=128, heads=4, vocab=256, tied=True, length=32, chunk=16
    )

    def made_of(stages: tuple[int, ...]) -> Propagation:
        return terms_of(shape, stages, remat="full", splits=False, rows=8, folder=tmp_path)

    found = made_of((1, 3))
    assert len([*tmp_path.iterdir()]) == 1
    assert made_of((1, 3)) == found
    assert len([*tmp_path.iterdir()]) == 1
    assert found.terms.fixed == ("pp",)
    assert not found.failed_probes
    pipeline = found.pipeline
    assert pipeline is not None
    first, last = (pipeline.kinds[kind] for kind in pipeline.stages)
    # A vocabulary of 256 and a layer, in bfloat16; wide sums; wide copies with two moments.
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert value_of(first.params_bytes, {}) == 2 * (256 * 64 + layer)
    assert value_of(first.sums_bytes, {}) == 4 * (256 * 64 + layer)
    assert value_of(first.state_bytes, {}) == 12 * (256 * 64 + layer) + 4
    assert value_of(last.params_bytes, {}) == 2 * (256 * 64 + 3 * layer + 64)
    # Twice the parts, half of the bytes that are sent.
    sent = [value_of(first.outputs_bytes, {"ep": parts}) for parts in (2, 4)]
    assert sent == [8 / 2 * 32 * 64 * 2, 8 / 4 * 32 * 64 * 2]
