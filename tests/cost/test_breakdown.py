"""A mesh in pieces adds up to what pricing says of it; differences between two meshes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.breakdown import CollectiveCost, MeshCost, break_down
from automesh.cost.comparison import compare_causes, compare_collectives, judge, shares_of
from automesh.cost.pricing import price_on
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated
from tests.support.samples import cost_samples, explain_samples
from tests.support.samples.explain_samples import monomial, total

NAMES = ("dp", "fsdp", "tp")
SPEEDS = cost_samples.PlainSpeeds()
BATCH = cost_samples.powers_of_two(6, 2, NAMES)


def both(row: int, platform: str) -> tuple[MeshCost, Estimated]:
    """The pieces and the price of one mesh of a made-up decoder."""
    one = Batch(names=NAMES, ici=BATCH.ici[row : row + 1], dcn=BATCH.dcn[row : row + 1])
    sizes = {name: int(size) for name, size in zip(NAMES, one.sizes[0], strict=True)}
    active = tuple(name for name in NAMES if sizes[name] > 1)
    terms = cost_samples.dense_terms(active, platform=platform)
    terms = replace(terms, guards=())
    prices = price_on({active: terms}, one, routes_of=cost_samples.simple_routes, speeds=SPEEDS)
    cost = break_down(terms, one, routes_of=cost_samples.simple_routes, speeds=SPEEDS)
    return cost, prices.estimated(0)


rows = st.integers(0, len(BATCH) - 1)
platforms = st.sampled_from(["cpu", "gpu", "tpu", "none"])


@settings(max_examples=25, deadline=None)
@given(row=rows, platform=platforms)
def test_the_pieces_add_up_to_the_price(row: int, platform: str) -> None:
    cost, estimated = both(row, platform)
    kernels_s = sum(
        one.matmul_s + one.memory_s + one.ring_s + one.overhead_s for one in cost.kernels
    )
    collectives_s = sum(one.seconds for one in cost.collectives)
    assert kernels_s + collectives_s == pytest.approx(estimated.bracket_s[1], rel=1e-9)
    causes = dict(estimated.causes)
    multiplying_s = sum(one.matmul_s for one in cost.kernels if not one.is_memory_bound)
    assert multiplying_s == pytest.approx(causes.get("compute", 0.0), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(row=rows, platform=platforms)
def test_the_reasons_add_up_to_the_step(row: int, platform: str) -> None:
    cost, estimated = both(row, platform)
    shares = shares_of(cost, estimated)
    assert sum(share.seconds for share in shares) == pytest.approx(estimated.step_s, rel=1e-9)
    assert all(share.seconds >= 0 and share.piece_s >= 0 for share in shares)
    assert all(share.piece_s <= share.seconds * (1 + 1e-9) for share in shares)
    assert [share.seconds for share in shares] == sorted(
        (share.seconds for share in shares), reverse=True
    )


@settings(max_examples=25, deadline=None)
@given(first=rows, second=rows, platform=platforms)
def test_two_meshes_side_by_side(first: int, second: int, platform: str) -> None:
    costs, estimates = zip(both(first, platform), both(second, platform), strict=True)
    changed = compare_causes(*estimates)
    gained_s = sum(change.second_s - change.first_s for change in changed)
    assert gained_s == pytest.approx(estimates[1].step_s - estimates[0].step_s, abs=1e-9)
    collectives = compare_collectives(*costs)
    for cost, seconds in zip(costs, ("first_s", "second_s"), strict=True):
        alone_s = sum(one.seconds for one in cost.collectives)
        assert sum(getattr(one, seconds) for one in collectives) == pytest.approx(alone_s)
    for one in collectives:
        assert (one.change == "appears") == (one.first is None)
        assert (one.change == "vanishes") == (one.second is None)
    winner = int(np.argmin([one.step_s for one in estimates]))
    verdict = judge(costs, estimates, winner=winner)  # pyright: ignore[reportArgumentType]
    assert verdict.speedup >= 1
    # The loser's largest extra is at least its even share of the difference.
    lost_s = estimates[1 - winner].step_s - estimates[winner].step_s
    assert verdict.main_s * 20 >= lost_s


def test_repeated_work_is_told_from_divided_work() -> None:
    rows_ = monomial(1024.0, dp=-1)
    side = monomial(4096.0)
    divided = explain_samples.matmul(rows_, side, side)
    repeated = explain_samples.matmul(monomial(1024.0), side, side)
    terms = explain_samples.terms(
        "dp",
        kernels=(
            explain_samples.product(divided, total(1.0), source="a.py:1"),
            explain_samples.product(repeated, total(1.0), source="a.py:2"),
        ),
    )
    by_line = {one.source: one for one in explain_samples.explained("dp:8", terms).cost.kernels}
    assert (by_line["a.py:1"].repeated_axes, by_line["a.py:1"].repeats) == ((), 1)
    assert (by_line["a.py:2"].repeated_axes, by_line["a.py:2"].repeats) == (("dp",), 8)
    # Sizes that are baked into shapes say nothing about who does what.
    baked = replace(terms, fixed=("dp",), sampled=(("dp", 8),))
    cost = explain_samples.explained("dp:8", baked).cost
    assert all(one.repeated_axes == () for one in cost.kernels)


def test_what_hides_is_not_blamed() -> None:
    """The gather costs most alone and hides behind compute; the reduction is what is waited for."""
    wide = explain_samples.matmul(monomial(65536.0), monomial(8192.0), monomial(8192.0))
    terms = explain_samples.terms(
        "dp",
        kernels=(explain_samples.product(wide, total(1.0), source="a.py:1"),),
        collectives=(
            explain_samples.collective("all-gather", "dp", payload=total(4.0), source="a.py:2"),
            explain_samples.collective("all-gather", "dp", payload=total(4e9), source="a.py:3"),
            explain_samples.collective("all-reduce", "dp", payload=total(1e9), source="a.py:4"),
        ),
    )
    one = explain_samples.explained("dp:4", terms)
    assert one.cost.collectives[0].source == "a.py:3"
    network = next(s for s in shares_of(one.cost, one.estimated) if s.reason == "ici")
    assert network.collective is not None
    assert network.collective.source == "a.py:4"


def test_bytes_of_collectives_are_those_of_one_device_whatever_the_kind() -> None:
    """The full array of a group has 1024 bytes. Before, an all-to-all was shown with all of them,
    of which no device of its group holds more than a quarter."""

    def bytes_of(kind: str) -> tuple[float, int]:
        one = CollectiveCost(
            kind=kind,
            axes=("dp",),
            source="",
            operand="",
            region="step",
            in_loop=False,
            count=1.0,
            payload_bytes=1024.0,
            group_size=4,
            latency_s=0.0,
            ici_s=0.0,
            dcn_s=0.0,
            exposed=1.0,
            granules=1,
        )
        return one.device_bytes, one.sent_bytes

    assert bytes_of("all-to-all") == (256.0, 192)
    assert bytes_of("ragged-all-to-all") == (256.0, 192)
    assert bytes_of("all-gather") == bytes_of("reduce-scatter") == (1024.0, 768)
    assert bytes_of("all-reduce") == (1024.0, 1536)
    assert bytes_of("collective-permute") == (1024.0, 1024)
