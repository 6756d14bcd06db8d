"""The public API is documented: examples that run, and a reference made from the docstrings."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys

import pytest

import automesh
from automesh.tuner.request import SearchOptions
from tests.regenerate import api_reference
from tests.regenerate.api_reference import MODULES, functions, public
from tests.support.plugins import is_installed

# Half of the names of `automesh.pipeline` are a plug-in's.
WHOLE = [one for one in MODULES if one != "automesh.pipeline" or is_installed("pipeline")]
FUNCTIONS = [f"{module}.{name}" for module in WHOLE for name in functions(module)]
PAGES = [
    one if one != "automesh.pipeline" else pytest.param(one, marks=pytest.mark.plugin("pipeline"))
    for one in MODULES
]


def looked_up(name: str):
    module, _, own = name.rpartition(".")
    return functions(module)[own]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_a_sentence_and_an_example(name: str) -> None:
    doc = inspect.getdoc(looked_up(name)) or ""
    assert re.match(r"[A-Z`].*", doc)
    assert re.search(r"^Example:\n(.*\n)*?\s+>>> ", doc, re.MULTILINE), "no runnable example"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_that_are_described_are_there(name: str) -> None:
    one = looked_up(name)
    described = re.search(r"^Args:\n((?:  .*\n?|\n)*)", inspect.getdoc(one) or "", re.MULTILINE)
    names = re.findall(r"^  (\w[\w, ]*?):", described[1], re.MULTILINE) if described else []
    known = inspect.signature(one).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()) and "kwargs" not in names:
        return  # Several forms of call, of which the docstring tells.
    assert {part.strip() for each in names for part in each.split(",")} <= set(known)


@pytest.mark.parametrize("module", PAGES)
def test_the_reference_is_made_from_the_docstrings(module: str) -> None:
    kept = api_reference.path_of(module).read_text(encoding="utf-8")
    assert kept == api_reference.page(module), "run `python -m tests.regenerate.update_golden`"


@pytest.mark.parametrize("module", PAGES)
def test_the_reference_has_every_public_name_and_no_address(module: str) -> None:
    page = api_reference.page(module)
    for name in public(module):
        assert f"\n## {module}.{name}\n" in page
    assert " at 0x" not in page
    assert "/home/" not in page


def test_every_option_of_a_search_is_described() -> None:
    own = set(inspect.signature(automesh.search).parameters) - {"options"}
    doc = inspect.getdoc(automesh.search) or ""
    described = set(
        re.findall(r"^  (\w+):", doc.partition("Args:")[2].partition("Raises:")[0], re.M)
    )
    assert described == own | set(SearchOptions.__annotations__)


def run_examples(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.doctests", *arguments],
        cwd=api_reference.FOLDER.parent.parent,
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 failed" in done.stdout


@pytest.mark.slow
def test_the_examples_run_on_eight_devices() -> None:
    run_examples()


@pytest.mark.long
def test_the_examples_that_search_run_too() -> None:
    run_examples("all")
