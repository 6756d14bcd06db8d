"""Random rules, read by the frameworks' own code where they are installed (long).

`plugins/frameworks/tests/support/own_parsers/__init__.py` says what to install.

    pytest -m long plugins/frameworks/tests/exports/test_own_parsers.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.frameworks.tests.support.cases.export_orders import check, orders_for
from plugins.frameworks.tests.support.cases.exports import READERS, On, Read
from plugins.frameworks.tests.support.own_parsers.process import NEEDED, OwnParser, missing

Readers = Callable[[str], Callable[[str, On], Read]]


@pytest.fixture(scope="module")
def reader() -> Iterator[Readers]:
    """By name, how a framework's own code reads a text: a process each, for all texts."""
    parsers: dict[str, OwnParser] = {}

    def by_name(name: str) -> Callable[[str, On], Read]:
        parser = parsers.setdefault(name, OwnParser(name=name))
        return lambda text, on: parser.read(
            text,
            selector=on.selector,
            num_devices=on.num_devices,
            num_granules=on.num_granules,
        )

    yield by_name
    for parser in parsers.values():
        parser.end()


def installed(name: str) -> object:
    lacks = missing(name)
    reason = f"needs {name} as `tests/support/own_parsers/__init__.py` says: no {lacks}"
    return pytest.param(name, marks=pytest.mark.skipif(bool(lacks), reason=reason))


@pytest.mark.long
@pytest.mark.parametrize("name", [installed(name) for name in NEEDED])
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_the_framework_itself_makes_of_a_rule_what_was_meant(
    name: str, reader: Readers, data: st.DataObject
) -> None:
    check(data.draw(orders_for(name)), name, reader(name))


def test_every_framework_has_its_own_reading_and_a_stand_in() -> None:
    assert set(NEEDED) == set(READERS)
