"""What a service takes of the options of a search, and the command that it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from automesh.options.table import SEARCH
from automesh_service.commands.submit import SubmitGiven
from automesh_service.submissions.order import Order, words_of


def test_what_a_service_is_given_is_what_it_takes() -> None:
    own = {one.name for one in dataclasses.fields(SubmitGiven)}
    assert {option.name for option in SEARCH if option.has_server} <= own
    orders = {one.name for one in dataclasses.fields(Order)} - {"entry", "args", "needs", "targets"}
    assert {option.name for option in SEARCH if option.has_order} - {"target"} == orders


def test_a_service_runs_what_its_order_says(tmp_path: Path) -> None:
    order = Order(entry="train.py", targets=("cpu:2", "cpu:4"), xla=("a=1",), top=2, step="-x")
    words = words_of(order, tmp_path)
    assert words[words.index("train.py") : -3] == [
        "train.py", "--target=cpu:2", "--target=cpu:4", "--step=-x", "--budget=10m", "--top=2",
        "--xla=a=1",
    ]  # fmt: skip
