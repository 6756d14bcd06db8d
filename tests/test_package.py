"""Which files are the user's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.package import is_users_file


def test_packages_that_are_installed_into_a_folder_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pip install --target`. Before, absl was taken for the script's own code there, and a
    second run of the script ended with "KeyError: 'logtostderr'"."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "absl_py-2.0.dist-info").mkdir()
    record = "absl/__init__.py,sha256=x,0\nsix.py,,\nabsl_py-2.0.dist-info/RECORD,,\n"
    (tmp_path / "absl_py-2.0.dist-info" / "RECORD").write_text(record)
    (tmp_path / "mine.egg-info").mkdir()
    (tmp_path / "mine.egg-info" / "SOURCES.txt").write_text("mine/train.py\n")
    said = {
        name: is_users_file(str(tmp_path / name))
        for name in ("absl/logging/__init__.py", "six.py", "train.py", "mine/train.py")
    }
    assert said == {
        "absl/logging/__init__.py": False,
        "six.py": False,
        "train.py": True,
        "mine/train.py": True,
    }
