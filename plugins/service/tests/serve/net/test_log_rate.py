"""What strangers cause again and again is logged a few times."""

from __future__ import annotations

import logging

import pytest

from automesh_service.serve.net.log_rate import LogRate, bounded_log


def test_a_flood_leaves_a_few_lines_and_hides_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("uvicorn.error")
    with bounded_log():
        for number in range(10_000):
            log.warning("request %d is none", number)
        logging.getLogger("asyncio").warning("something else")
    said = [one.getMessage() for one in caplog.records]
    assert said == [*(f"request {number} is none" for number in range(20)), "something else"]
    log.warning("afterwards")
    assert len(caplog.records) == 22


def test_what_was_left_out_is_counted() -> None:
    now_s = 0.0
    rate = LogRate(lambda: now_s)

    def let_through() -> logging.LogRecord | None:
        record = logging.LogRecord("a", logging.WARNING, "a.py", 1, "%s again", ("it is",), None)
        return record if rate.filter(record) else None

    assert sum(let_through() is not None for _ in range(120)) == 20
    now_s = 5.0
    record = let_through()
    assert record is not None
    assert record.getMessage() == "it is again (and 100 times more, not logged)"
    assert let_through() is None
