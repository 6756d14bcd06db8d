"""Every public name is what it says, whatever else has been imported."""

from __future__ import annotations

from importlib import resources

import automesh
from automesh import api
from automesh.tuner import run
from tests.support.plugins import WITHOUT, is_installed


def test_no_subpackage_takes_the_place_of_a_function() -> None:
    # A package `automesh.search` would, as soon as anybody imported it.
    assert run.run_search is not None
    assert automesh.search is api.search


def test_every_public_name_can_be_had() -> None:
    assert all(getattr(automesh, name) is not None for name in automesh.__all__)
    assert set(automesh.__all__) == set(dir(automesh))


def test_type_checkers_of_users_read_the_types() -> None:
    """PEP 561: without this file the overloads of `automesh.search` are invisible to them."""
    assert resources.files("automesh").joinpath("py.typed").is_file()
    for name in filter(is_installed, WITHOUT):
        assert resources.files(f"automesh_{name}").joinpath("py.typed").is_file(), name
