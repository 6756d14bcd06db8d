"""How many nouns say the same: these figures may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGE = ROOT / "automesh"
_MOST_COPIED = 8
# Words that only a comparison of two plans has.
_OF_VERDICTS = {"faster", "slower", "no faster", "undecided"}


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def test_one_noun_has_the_vocabulary_of_verdicts() -> None:
    found = [
        f"{name}: {ast.unparse(node.targets[0])}"
        for name, module in modules("")
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and len(_literals(node.value) & _OF_VERDICTS) > 1
    ]
    assert found == ["report/comparison.py: Verdict"]


def _literals(value: ast.expr) -> set[str]:
    """The words of a `Literal[...]`."""
    if not (isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal"):
        return set()
    return {str(one.value) for one in ast.walk(value.slice) if isinstance(one, ast.Constant)}


def test_a_preparation_is_replaced_at_most_once() -> None:
    """It is made at the end of preparing; only the hash of the trials that count comes later."""
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert sum(text.count("replace(preparation") for text in texts) <= 1
    assert _replaced("preparation") <= 1


def _replaced(noun: str) -> int:
    """How often a call of `replace` has this noun first, over however many lines."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "replace"
        and bool(node.args)
        and ast.unparse(node.args[0]).rpartition(".")[2] == noun
        for _, module in modules("")
        for node in ast.walk(module)
    )


def test_no_facts_are_copied_one_by_one() -> None:
    """What stays together is one noun, which is handed on as a whole."""
    found = {
        f"{name}:{node.lineno}": copied
        for name, module in modules("tuner", "report/files")
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and len(copied := sorted(_copied(node))) > _MOST_COPIED
    }
    assert found == {}


def _copied(call: ast.Call) -> set[str]:
    """Keywords that get the attribute of their own name: `axes=header.axes`."""
    return {
        word.arg
        for word in call.keywords
        if word.arg and isinstance(word.value, ast.Attribute) and word.value.attr == word.arg
    }


def test_these_counts_see_what_they_count() -> None:
    copies = ", ".join(f"{letter}=one.{letter}" for letter in "abcdefghi")
    (call,) = [
        one for one in ast.walk(ast.parse(f"f({copies}, z=one.y)")) if isinstance(one, ast.Call)
    ]
    assert len(_copied(call)) == 9
    words = ast.parse('Call = Literal["faster", "slower", "equal"]').body[0]
    assert isinstance(words, ast.Assign) and len(_literals(words.value) & _OF_VERDICTS) == 2
