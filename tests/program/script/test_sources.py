"""Which installed packages a script's modules belong to."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from automesh.program.script.sources import is_users, watching

FILES = {
    "plain": {"RECORD": "plain_module.py,sha256=x,1\nplain_package/inside.py,,\n"},
    "declared": {"top_level.txt": "stated\nother\n", "RECORD": "unstated/inside.py,,\n"},
    "quoted": {"RECORD": '"with,comma/inside.py",,\nquoted_package/__init__.py,,\n'},
    "gone": {"RECORD": "removed/__init__.py,,\n"},
}
MODULES = ("plain_module", "plain_package.inside", "unstated", "other", "quoted_package", "removed")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Distributions of which one has a file that is not there."""
    for name, files in FILES.items():
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        for file, text in files.items():
            (folder / file).write_text(text)
    for file in ("plain_module.py", "plain_package/inside.py", "quoted_package/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_distributions_are_those_of_the_standard_library_without_its_walk(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = metadata.packages_distributions()
    wanted = {owner for name in MODULES for owner in owners.get(name.partition(".")[0], ())}
    wanted -= {"gone"}  # Python 3.11 does not look whether the files are there.
    assert wanted == {"plain", "declared", "quoted"}
    monkeypatch.setattr(metadata, "packages_distributions", None)
    with watching() as watch:
        for name in MODULES:
            monkeypatch.setitem(sys.modules, name, sys)
    found = watch.reads((installed,), ()).distributions
    assert {name for name, version in found if version == "1.5"} == wanted


def test_what_autograph_generates_is_not_the_users(tmp_path: Path) -> None:
    """Before, a study whose script uses tf.data had changed sources at every resumption."""
    assert is_users(tmp_path / "train.py", (tmp_path,))
    assert not is_users(tmp_path / "__autograph_generated_filex1_2.py", (tmp_path,))
    assert not is_users(tmp_path / "automesh-run-x1" / "params.pkl", (tmp_path,))
