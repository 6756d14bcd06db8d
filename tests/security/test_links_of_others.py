"""Links that somebody has put where a study writes under names that everybody can know before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.tuner.paths import make_study_folder, newest_study

NOBODY = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to others")


@is_root
@pytest.mark.parametrize("name", [".", "study.db", "study.db-wal", "logs", "terms"])
def test_a_link_of_another_account_is_not_followed(name: str, tmp_path: Path) -> None:
    """Before, a study was written, and old drafts removed, wherever such a link led."""
    folder, victim = tmp_path / "results" / "train-cpu-4-1234", tmp_path / "victim"
    victim.mkdir()
    place = folder / name
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    os.lchown(place, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="is a link that another account made"):
        make_study_folder(folder)
    assert list(victim.iterdir()) == []


def test_a_link_of_ones_own_leads_to_a_larger_disk(tmp_path: Path) -> None:
    folder, disk = tmp_path / "study", tmp_path / "disk"
    disk.mkdir()
    folder.mkdir()
    (folder / "logs").symlink_to(disk)
    make_study_folder(folder)
    assert (folder / "logs").is_symlink()


@pytest.mark.parametrize("target", ["nothing", "study.db"])
def test_a_link_that_leads_nowhere_hides_no_study_beside_it(target: str, tmp_path: Path) -> None:
    sound, evil = tmp_path / "sound", tmp_path / "evil"
    for folder in (sound, evil):
        folder.mkdir()
    (sound / "study.db").touch()
    (evil / "study.db").symlink_to(target)
    assert newest_study(tmp_path, "") == sound
    (sound / "study.db").unlink()
    with pytest.raises(UsageError, match="there is no study under"):
        newest_study(tmp_path, "")
