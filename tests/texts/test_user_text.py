"""Words and paths that a user gives: refused before anything is done with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.texts.user_text import check_text, user_path


def test_a_good_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/caf\xe9 \u65e5\u672c.py") == tmp_path / "caf\xe9 \u65e5\u672c.py"
    assert user_path("train.py") == Path("train.py")
    assert user_path(tmp_path) == tmp_path
    assert check_text("--data\t\U0001f600\n") == "--data\t\U0001f600\n"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("~nosuchuser/x.py", "`~nosuchuser/x.py` begins with the home of a user that there is not"),
        ("a\0b", "`a b` holds a NUL character"),
        ("caf\udce9.py", "`caf\\xe9.py` is not UTF-8"),
        ("x" * 300, "is too long for a path"),
        ("loop", "`loop` is a symbolic link that leads to itself"),
        ("loop/x", "`loop/x` is a symbolic link that leads to itself"),
    ],
)
def test_what_can_be_no_path(
    given: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError) as caught:
        user_path(given)
    assert what in caught.value.message
    assert caught.value.hint


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that is typed says nothing of the folder that it is in."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=r"caf\\xe9/train\.py` is not UTF-8"):
        user_path("train.py")


def test_utf8_that_was_not_read_as_such() -> None:
    """As Python reads names in the C locale without its UTF-8 mode."""
    with pytest.raises(UsageError) as caught:
        check_text("caf\xe9.py".encode().decode("ascii", "surrogateescape"))
    assert "PYTHONUTF8=1" in caught.value.hint
