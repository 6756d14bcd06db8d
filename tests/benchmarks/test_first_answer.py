"""What the benchmark of first answers reads off a dry run, without running one."""

from __future__ import annotations

from benchmarks.first_answer import command as first_answer
from benchmarks.first_answer import interrupts

TEN = [f"dp:{n}" for n in range(10)]


def table(at: float, rows: list[str], *, is_table: bool = True) -> dict[str, object]:
    return {"at": at, "rows": rows, "is_table": is_table}


def end(at: float, rows: list[str]) -> dict[str, object]:
    more = {"is_end": True, "estimates": {"dp:0": 1.0}, "cpu_s": 7.0, "peak_mib": 300}
    return {**table(at, rows), **more}


def test_the_first_ten_are_settled_from_the_moment_on_at_which_they_stay() -> None:
    said = [
        table(103.0, TEN[:3]),
        table(104.0, TEN),
        table(105.0, TEN[::-1]),
        table(106.0, [*TEN, "tp:8"]),
        table(107.0, [*TEN, "tp:4"]),
        end(110.0, [*TEN, "sp:2", "tp:4"]),
    ]
    found = first_answer.read(said, 100.0)
    assert (found["first_row_s"], found["first_ten_settled_s"], found["complete_s"]) == (3, 6, 10)


def test_a_version_without_tables_settles_at_its_end() -> None:
    said = [table(102.0, ["dp:0"], is_table=False), end(110.0, ["dp:0"])]
    found = first_answer.read(said, 100.0)
    assert (found["first_row_s"], found["first_ten_settled_s"]) == (2, 10)
    assert first_answer.read(said[1:], 100.0)["first_row_s"] == 10


def test_versions_are_compared_by_their_medians_and_by_every_estimate() -> None:
    def run(seconds: float, **estimates: float) -> dict[str, object]:
        names = ["first_row_s", "first_ten_settled_s", "told_settled_s", "complete_s"]
        names += ["cpu_s", "peak_mib", "load"]
        return {**dict.fromkeys(names, seconds), "estimates": estimates}

    runs = {"now": [run(1.0, a=1.0), run(3.0, a=1.0)], "before": [run(4.0, a=1.0)]}
    found = first_answer.compared(runs)
    assert found["before_over_now"]["complete_s"] == 2.0
    assert found["estimates_equal"] and found["plans"] == 1
    runs["before"].append(run(4.0, a=1.0000000000000002))
    assert not first_answer.compared(runs)["estimates_equal"]
    for failed in ({"now": runs["now"], "before": []}, {"now": [], "before": runs["before"]}):
        assert "before_over_now" not in first_answer.compared(failed)


def test_a_second_search_is_compared_by_its_cpu_and_every_estimate() -> None:
    alone = {"cpu_s": 40.0, "estimates": {"dp:8": 1.0, "tp:8": 2.0}}
    second = {"cpu_s": 10.0, "estimates": {"dp:8": 1.0, "tp:8": 2.002}}
    found = first_answer.second_search(alone, second)
    assert (found["part_of_cpu"], found["estimates_that_differ"]) == (0.25, 1)
    assert abs(found["largest_difference"] - 0.001) < 1e-9
    del second["estimates"]["tp:8"]
    assert first_answer.second_search(alone, second)["largest_difference"] == float("inf")


def test_what_a_run_calls_settled_is_held_against_its_end() -> None:
    settled = {**table(105.0, TEN), "is_settled": True}
    found = first_answer.read([table(103.0, TEN[:3]), settled, end(110.0, TEN)], 100.0)
    assert (found["told_settled_s"], found["told_rightly"]) == (5, True)
    found = first_answer.read([settled, end(110.0, TEN[::-1])], 100.0)
    assert (found["told_settled_s"], found["told_rightly"]) == (5, False)
    assert first_answer.read([table(103.0, TEN), end(110.0, TEN)], 100.0)["told_settled_s"] == 10


def test_ends_of_stopped_runs_are_counted() -> None:
    good = {
        "exit_code": 130,
        "took_s": 1.0,
        "is_ranked": True,
        "has_table": True,
        "is_sentence": True,
        "left": 0,
    }
    early = {**good, "exit_code": 143, "is_ranked": False, "has_table": False}
    bad = {**good, "has_table": False, "is_sentence": False, "left": 2, "took_s": 3.0}
    found = interrupts.counted([good, early, bad])
    assert found["exit_codes"] == {"130": 2, "143": 1}
    assert (found["with_a_table"], found["nothing_estimated_yet"]) == (1, 1)
    assert (found["estimated_but_no_table"], found["tracebacks"]) == (1, 1)
    assert (found["processes_left"], found["longest_end_s"]) == (2, 3.0)
