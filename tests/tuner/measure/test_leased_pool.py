"""Waiting for the lease of another search, until it is free or the time is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from automesh.program.nouns import Traced, VisitAnswer
from automesh.tuner.measure.leased_pool import LivePool, wait_for_lease


@pytest.mark.parametrize(
    ("refusals", "until_s", "is_led"), [(0, 0.0, True), (3, 3.0, True), (3, 1.5, False)]
)
def test_the_lease_is_waited_for_until_the_time_is_over(
    refusals: int, until_s: float, is_led: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    slept_s: list[float] = []
    study = SimpleNamespace(
        lead=lambda: calls.append("lead") or calls.count("lead") > refusals,
        leader=lambda: SimpleNamespace(host="elsewhere", pid=7),
        heartbeat=lambda: calls.append("heartbeat"),
    )
    shown: list[str] = []
    progress = SimpleNamespace(now=shown.append, tick=lambda: calls.append("tick"))
    monkeypatch.setattr("automesh.tuner.measure.leased_pool.time.sleep", slept_s.append)

    found = wait_for_lease(
        cast("Any", study), cast("Any", progress), until_s=until_s, clock=lambda: sum(slept_s)
    )

    assert found is is_led
    assert sum(slept_s) <= until_s + 1.0
    assert calls.count("heartbeat") == calls.count("tick") == len(slept_s)
    assert set(shown) == ({"waiting for elsewhere (process 7) to measure"} if refusals else set())


@pytest.mark.parametrize("kind", [VisitAnswer, Traced])
def test_an_answer_of_the_wrong_kind_is_refused(kind: type[Any]) -> None:
    answer = object.__new__(kind)
    pool = SimpleNamespace(
        submit=lambda *_, **__: 1,
        wait=lambda _: [SimpleNamespace(ticket=1, result=answer, doubtful=False)],
    )
    live = LivePool(
        pool=cast("Any", pool), study=cast("Any", None), progress=cast("Any", SimpleNamespace())
    )
    calls = {VisitAnswer: live.run, Traced: live.trace}
    for answered, call in calls.items():
        if answered is kind:
            assert call(cast("Any", None), 1.0) is answer
        else:
            with pytest.raises(TypeError, match=f"answered with {kind.__name__}"):
                call(cast("Any", None), 1.0)
