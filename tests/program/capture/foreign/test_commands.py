"""Commands of a script change no files while it is run up to its step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

RUN = """
import json, os, pathlib, subprocess
from automesh.program.capture.foreign.commands import commands_in_layer
from automesh.program.capture.world.kept_apart import kept_apart
from automesh.program.capture.world.told import told
seen = []
with kept_apart(), commands_in_layer():
    seen.append(os.system("mkdir -p runs/2/ck && cp runs/1/w.txt runs/2 ; touch runs/2/new"))
    seen.append(sorted(os.listdir("runs/2")))
    seen.append(subprocess.run(["rm", "-rf", "runs/1"]).returncode)
    seen.append(os.path.exists("runs/1"))
    seen.append(subprocess.call("rm runs/nothing", shell=True) != 0)
    seen.append(subprocess.run("rm -r runs/*", shell=True, check=True).returncode)
    seen.append(os.listdir("runs"))
    seen.append(os.system("echo hello > said.txt"))
    subprocess.check_call(["gsutil", "cp", "said.txt", "gs://bucket/said.txt"])
    seen.append(subprocess.check_output("echo read 2>/dev/null | cat", shell=True, text=True))
    seen.append(subprocess.run(["git", "-C", ".", "rev-parse", "HEAD"], capture_output=True,
                               text=True).stderr.strip() != "")
print(json.dumps([seen, told()]))
"""


def test_commands_of_a_script_change_no_files(tmp_path: Path) -> None:
    (tmp_path / "runs/1").mkdir(parents=True)
    (tmp_path / "runs/1/w.txt").write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    seen, told = json.loads(done.stdout.splitlines()[-1])
    assert seen == [
        *(0, ["ck", "new", "w.txt"], 0, False, True, 0, [], 0, "read\n", True),
    ]
    assert [str(one.relative_to(tmp_path)) for one in sorted(tmp_path.rglob("*"))] == [
        *("runs", "runs/1", "runs/1/w.txt"),
    ]
    assert (tmp_path / "runs/1/w.txt").read_text() == "kept"
    assert any("was not run, as it writes files: `echo hello > said.txt`" in one for one in told)
    assert any("`gsutil cp said.txt gs://bucket/said.txt`" in one for one in told)
