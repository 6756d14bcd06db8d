"""Ctrl-C while estimates are made: what is known is ranked, and the same command goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from automesh.report.estimates import INTERRUPTED, NO_TIME, Estimates
from automesh.report.progress import Silent
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.pool import Finished
from tests.support.fakes.estimate_pool import FakePool, plan, rung
from tests.tuner.estimate.test_rung import all_plans


@dataclass
class Stopped(FakePool):
    """Somebody presses Ctrl-C while the workers are waited for the nth time."""

    at: int = 0
    waits: int = 0

    def wait(self, timeout_s: float | None = None) -> list[Finished]:
        self.waits += 1
        if self.waits == self.at:
            raise KeyboardInterrupt
        return super().wait(timeout_s)


@pytest.mark.parametrize("torus", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4, 7, 9, 12])
def test_what_is_known_is_kept_and_the_rest_is_made_later(
    at: int, torus: bool, tmp_path: Path
) -> None:
    plans = [*all_plans(8, remat="none"), *all_plans(8, remat="full")]
    whole = rung(plans, FakePool()).run()
    cache = TermsCache(folder=tmp_path / "terms", source_hash="a", versions=())
    pool = Stopped(at=at)
    found = rung(plans, pool, cache=cache, torus=torus, workers=1).run()
    assert found.is_interrupted
    assert set(found.found) | set(found.missing) == set(plans)
    assert set(found.missing.values()) == {INTERRUPTED}
    assert all(found.found[one] == whole.found[one] for one in found.found)
    done = pool.waits - 1 - torus if at > 1 + torus else 0
    assert bool(found.found) == (done > 0)
    assert found.waiting == (frozenset(found.missing) if found.found else frozenset())
    kept = len(list((tmp_path / "terms").glob("*")))
    more = FakePool()
    rest = rung(plans, more, cache=cache, workers=1).run()
    assert rest.found == whole.found and not rest.is_interrupted
    assert len(more.propagated) == 14 - kept <= 14 - done


def test_an_interrupt_in_the_middle_of_a_price_prices_what_is_known() -> None:
    plans = all_plans(8)
    made = rung(plans, FakePool())
    price, calls = made.price, []

    def interrupted(*given: object) -> object:
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return price(*given)  # pyright: ignore

    made.price = interrupted  # pyright: ignore
    found = made.run()
    assert found.is_interrupted and set(found.found) == set(plans)


def test_what_is_missing_is_named() -> None:
    known = dict.fromkeys((plan("dp:8"), plan("dp:2,sp:4")), FOUND)
    with_tp = dict.fromkeys((plan("dp:2,tp:4"), plan("tp:8")), INTERRUPTED)
    said = Estimates(found=known, missing=with_tp).missing_notice
    assert said == (
        "meshes with tp: not estimated yet (2 plans): the estimates were interrupted before; "
        "the same command goes on"
    )
    mixed = {plan("dp:4,sp:2"): NO_TIME}
    said = Estimates(found=known, missing=mixed).missing_notice
    assert said.startswith("1 plan not estimated yet, such as dp:4,sp:2: the time for estimates")
    knobs = {plan("dp:8", remat="full"): NO_TIME}
    assert Estimates(found=known, missing=knobs).missing_notice.startswith("meshes with remat=full")


FOUND = rung([plan("dp:8")], FakePool()).run().found[plan("dp:8")]


@dataclass
class Phases(Silent):
    """Keeps the last report of how far the estimates are."""

    total: int = 0
    done: int = 0
    note: str = ""

    def phase(self, name: str, *, total: int, done: int = 0, note: str = "", **_: object) -> None:  # pyright: ignore
        self.total, self.done, self.note = total, done, note


def test_what_was_left_out_is_not_shown_as_done() -> None:
    made, seen = rung(all_plans(8), Stopped(at=3), workers=1), Phases()
    made.propagator.progress = seen
    made.run()
    assert (seen.total, seen.done, seen.note) == (2, 2, "5 left out")
    made, seen = rung(all_plans(8), FakePool(), deadline_s=2.5, workers=1), Phases()
    made.propagator.progress = seen
    found = made.run()
    assert found.missing and seen.done == seen.total < 7 and "left out" in seen.note
    whole = Phases()
    made = rung(all_plans(8), FakePool())
    made.propagator.progress = whole
    made.run()
    assert (whole.total, whole.done, whole.note) == (7, 7, "")
