"""The words of docstrings, comments and messages: what docs/style.md asks for."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "automesh"
# Packages and modules whose prose has been gone through; the list grows.
CHECKED = (
    "answers.py",
    "api.py",
    "cli",
    "collectives.py",
    "cost",
    "errors.py",
    "files.py",
    "foreign",
    "hardware",
    "hlo",
    "ir",
    "jsonio.py",
    "limits.py",
    "mesh",
    "outcomes.py",
    "options",
    "package.py",
    "partition",
    "pipeline",
    "platforms",
    "plugins",
    "program/capture",
    "reading.py",
    "report",
    "sharding",
    "skipped.py",
    "space",
    "texts",
    "tuner/lint",
    "tuner/study",
    "units.py",
)
_SKIPPED = ("automesh/hlo/hlo_pb2.py", "automesh/pipeline/runtime/")
FORBIDDEN = re.compile(
    r"\b(?:is|are) said of\b|\bstands? beside\b|\bin (?:its|their) place\b|\bbef[ae]ll\b"
    r"|\bsees? to it\b|\b(?:is|are|be) told\b(?! apart)|\bwhom\b|\bHere is \w+ed\b|\bAs above\b"
)
# A docstring is no fragment that continues a name.
FRAGMENT = re.compile(r"(?:Of|By which|With which|That|Those of|After which|For which) [a-z]")
# Names that a plug-in has and another distribution too; this list may only become shorter.
SHARED_NAMES = frozenset(("Problem", "StagedProgram", "StudyPage", "StudySummary"))


def _modules() -> Iterator[Path]:
    for name in CHECKED:
        path = PACKAGE / name
        for module in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not str(module.relative_to(ROOT)).startswith(_SKIPPED):
                yield module


def _docstrings(text: str) -> Iterator[str]:
    """Yields the docstrings of a module, also those of constants."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            match one:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    yield docstring
                case _:
                    pass


def _prose(text: str) -> Iterator[str]:
    """Yields docstrings, messages and comments, each as one line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment = f"{comment} {token.string.lstrip('# ')}"
        elif token.type != tokenize.NL:
            yield comment
            comment = ""


def problems(text: str) -> list[str]:
    found = [one for one in _prose(text) if FORBIDDEN.search(one)]
    return found + [one for one in _docstrings(text) if FRAGMENT.match(one.strip())]


def test_phrases_that_the_style_forbids_do_not_occur() -> None:
    found = {
        str(module.relative_to(ROOT)): wrong
        for module in _modules()
        if (wrong := problems(module.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        '"""Here is decided on which host it runs."""',
        'LIMIT = 1\n"""Of a header that a route reads."""',
        "def one():\n    # The file\n    # stands beside the other.\n    return 1\n",
        'raise ValueError(f"the user {1} is told")',
    ],
)
def test_forbidden_phrases_are_found(text: str) -> None:
    assert problems(text)


def _class_names(folders: Iterable[Path]) -> set[str]:
    """Names that several modules of these folders have for a class."""
    counts: Counter[str] = Counter()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        counts.update({node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)})
    return {name for name, count in counts.items() if count > 1}


def test_no_class_name_exists_twice() -> None:
    """A reader who searches for a name finds one class."""
    assert _class_names([PACKAGE]) == set()
    plugins = [folder for folder in (ROOT / "plugins").glob("*/automesh_*") if folder.is_dir()]
    assert _class_names([PACKAGE, *plugins]) <= SHARED_NAMES
