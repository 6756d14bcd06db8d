"""`automesh.search` names a function and a subpackage: people mean the function."""

from __future__ import annotations

import automesh
from automesh import api
from automesh.search import study


def test_search_stays_the_function_once_its_subpackage_is_imported() -> None:
    assert study.__name__ == "automesh.search.study"
    assert automesh.search is api.search
    assert automesh.search is automesh.search
