"""Nothing that was there before a captured run is changed by it, and the next run finds it so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from automesh.program.capture.world import kept_apart
from tests.support.paths import ROOT


def files_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(one): (one.read_bytes() if one.is_file() else b"", one.stat().st_mtime_ns)
        for one in sorted(folder.rglob("*"))
    }


def test_files_are_kept_apart_whatever_python_code_does_with_them(tmp_path: Path) -> None:
    (tmp_path / "ck/step_1").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "ck/step_1/w").write_text("w1")
    (tmp_path / "log.txt").write_text("line\n")
    np.savez(tmp_path / "state.npz", w=1)
    before = files_in(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.kept_apart"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path) == before
    (said,) = json.loads(done.stdout)
    assert said.startswith("the script wanted to write or remove `a.txt`, `state.npz`")
    assert "kept apart in a private folder" in said


def test_a_short_path_elsewhere_is_named_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = kept_apart._in_words(
        ("/tmp/log.txt", "/home/user/runs/7/log.txt", f"{tmp_path}/here.txt")
    )
    assert "`/tmp/log.txt`, `.../7/log.txt`, `here.txt`:" in said
