"""Which of the propagations that were kept are found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.tuner.estimate import terms_cache
from automesh.tuner.estimate.propagations import Need
from automesh.tuner.estimate.terms_cache import TermsCache
from tests.support.fakes.estimate_pool import STEP, propagation

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
