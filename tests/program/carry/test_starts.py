"""Starts of a script are counted over processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from automesh.program.carry.starts import again, note_again, note_start, starts


def test_starts_of_several_processes_are_counted_in_order(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert starts(folder) == ()
    note_start(folder, "first run")
    code = "import sys; from automesh.program.carry.starts import note_start as n; n(*sys.argv[1:])"
    for why in ("data:2,model:4", "winner"):
        subprocess.run([sys.executable, "-c", code, folder, why], check=True)
    assert starts(folder) == ("first run", "data:2,model:4", "winner")


def test_nobody_counts_without_a_folder(tmp_path: Path) -> None:
    note_start("", "first run")
    note_start(str(tmp_path / "of another host"), "first run")
    assert not list(tmp_path.iterdir())
    assert starts(str(tmp_path / "of another host")) == ()


def test_each_reason_why_a_carried_script_is_run_again_is_kept_once(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert again(folder) == ()
    for why in (
        "its function is not stored",
        "it names a single device",
        "its function is not stored",
    ):
        note_again(folder, why)
    assert again(folder) == ("its function is not stored", "it names a single device")
    assert starts(folder) == ()
