"""Which of the propagations that were kept are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automesh.cost.terms import DivisibilityGuard
from automesh.program.nouns import Propagation
from automesh.tuner.estimate import terms_cache
from automesh.tuner.estimate.propagations import Need
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import PropagateJob
from tests.support.fakes.estimate_pool import STEP, propagation, terms

SIZES = (("dp", 2),)
NEED = Need(call=((), ()), active=("dp",), sizes=SIZES, probes=(), spare=(), members=(0,))
JOB = STEP.job(NEED, SIZES)


def test_terms_in_a_former_form_are_neither_found_nor_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stood beside the new ones where a study that went on was explained."""
    cache = TermsCache(folder=tmp_path, source_hash="a", versions=())
    now = terms_cache._FORMAT
    monkeypatch.setattr(terms_cache, "_FORMAT", now - 1)
    cache.keep(JOB, propagation(JOB))
    assert len(cache.all()) == 1
    monkeypatch.setattr(terms_cache, "_FORMAT", now)
    assert cache.find(JOB) is None and cache.all() == ()
    cache.keep(JOB, propagation(JOB))
    assert cache.find(JOB) == propagation(JOB)
    assert [one.form for one in cache.all()] == [now]


def general(job: PropagateJob, **changes: object) -> Propagation:
    return replace(propagation(job), is_general=True, **changes)


LARGER = replace(JOB, probes=((("dp", 8),),), largest=(("dp", 8),))
LARGEST = replace(JOB, sizes=(("dp", 4),), probes=((("dp", 64),),), largest=(("dp", 64),))


def test_a_search_for_more_devices_finds_what_is_alike_on_all_meshes(tmp_path: Path) -> None:
    cache = TermsCache(folder=tmp_path / "a", source_hash="a", versions=())
    cache.keep(LARGER, general(LARGER))
    assert len(cache.all()) == 1
    other = replace(cache, folder=tmp_path / "b", others=(tmp_path / "a",))
    assert other.find(LARGEST) == general(LARGER)
    # It is copied, so that a third search, and the page of this study, find it there.
    assert [one.job for one in other.all()] == [LARGEST]
    assert replace(cache, folder=None, others=(tmp_path / "b",)).find(JOB) == general(LARGER)


@pytest.mark.parametrize(
    "made",
    [
        propagation(LARGER),
        general(LARGER, asked=("the number of devices",)),
        general(LARGER, failed_probes=((("dp", 8),),)),
        general(LARGER, terms=terms(LARGER, fixed=("dp",))),
        general(LARGER, terms=terms(LARGER, guards=(DivisibilityGuard(size=6, axes=("dp",)),))),
    ],
)
def test_what_depends_on_the_sizes_or_the_devices_is_propagated_anew(
    made: Propagation, tmp_path: Path
) -> None:
    cache = TermsCache(folder=tmp_path, source_hash="a", versions=())
    cache.keep(LARGER, made)
    assert cache.find(LARGER) == made
    assert cache.find(LARGEST) is None


def test_another_job_does_not_find_what_is_alike_on_all_meshes(tmp_path: Path) -> None:
    cache = TermsCache(folder=tmp_path, source_hash="a", versions=())
    cache.keep(LARGER, general(LARGER))
    for other in (
        replace(LARGEST, sizes=(("dp", 4), ("tp", 2))),
        replace(LARGEST, sizes=(("tp", 4),)),
        replace(LARGEST, platform="tpu"),
        replace(LARGEST, knobs=(("remat", True),)),
        replace(LARGEST, exact=True),
        replace(LARGEST, seen=(("hash", 2),)),
    ):
        assert cache.find(other) is None, other
    for changed in (replace(cache, source_hash="b"), replace(cache, versions=(("jax", "1"),))):
        assert changed.find(LARGEST) is None


def test_a_second_name_that_somebody_has_changed_leads_nowhere(tmp_path: Path) -> None:
    cache = TermsCache(folder=tmp_path, source_hash="a", versions=())
    cache.keep(LARGER, general(LARGER))
    elsewhere = replace(LARGER, knobs=(("remat", True),))
    cache.keep(elsewhere, propagation(elsewhere))
    (second,) = tmp_path.glob("*.name")
    wrong = next(path.name for path in tmp_path.glob("*.json") if path.name != second.read_text())
    for text in ("../../secret.json", "", "0" * 100, wrong):
        second.write_text(text)
        assert cache.find(LARGEST) is None
