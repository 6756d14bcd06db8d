"""The shape of the package: import-linter checks the floors, these tests what it cannot say."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import grimp
import pytest

from automesh.ir.findings.registry import RULES
from automesh.ir.findings.rule import PricedCheck
from tests.support.paths import ROOT
from tests.support.plugins import WITHOUT, is_installed

PACKAGES = [ROOT / "automesh", *(ROOT / "plugins" / name / f"automesh_{name}" for name in WITHOUT)]
_GENERATED = ("hlo_pb2.py",)
_MOST_MODULES = 15
_MOST_PARAMETERS = 12
# Production files that a finding is in.
_MOST_FILES = 3


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    plugins = [f"automesh_{name}" for name in WITHOUT if is_installed(name)]
    return grimp.build_graph(
        "automesh", *plugins, exclude_type_checking_imports=True, cache_dir=None
    )


def test_no_folder_holds_more_than_a_newcomer_can_look_over() -> None:
    modules = (
        path
        for package in PACKAGES
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and path.name not in _GENERATED
    )
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {folder: size for folder, size in sizes.items() if size > _MOST_MODULES} == {}


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    waiting = {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }
    # Whoever imports nothing that is left is in no circle.
    while free := {module for module, needs in waiting.items() if not needs & waiting.keys()}:
        for module in free:
            del waiting[module]
    assert sorted(waiting) == []


def test_every_folder_of_modules_says_what_it_is_for() -> None:
    assert all(package.is_dir() for package in PACKAGES)
    for package in PACKAGES:
        for init in package.rglob("__init__.py"):
            assert init.read_text().startswith('"""'), init


def test_no_function_takes_more_parameters_than_a_reader_can_follow() -> None:
    """A command takes one record of what was given: see `automesh.cli.options.reads`."""
    longest = {
        f"{path.relative_to(ROOT)}: {name}": count
        for package in PACKAGES
        for path in package.rglob("*.py")
        if path.name not in _GENERATED
        for name, count in _signatures(path.read_text(encoding="utf-8"))
        if count > _MOST_PARAMETERS
    }
    assert longest == {}


def test_a_finding_is_one_module_with_its_rule_and_its_words() -> None:
    """The pass that marks what a rule looks for is another one: `docs/contributing.md`."""
    texts = {
        str(path.relative_to(ROOT)): _literals(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in package.rglob("*.py")
        if path.name not in _GENERATED
    }
    places = {
        rule.name: [path for path, literals in texts.items() if rule.name in literals]
        for rule in RULES
    }
    assert len(places) == len(RULES) >= 22
    # One more, if a cure has words of its own for the rule.
    assert {rule: paths for rule, paths in places.items() if len(paths) > _MOST_FILES - 1} == {}
    # What is found where a mesh is priced has its name there.
    of_programs = [rule.name for rule in RULES if not isinstance(rule.check, PricedCheck)]
    homes = [[path for path in places[name] if "/ir/findings/" in path] for name in of_programs]
    assert [paths for paths in homes if len(paths) != 1] == []


def _literals(source: str) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _signatures(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = node.args
            named = len([*own.posonlyargs, *own.args, *own.kwonlyargs])
            yield node.name, named + bool(own.vararg) + bool(own.kwarg)
