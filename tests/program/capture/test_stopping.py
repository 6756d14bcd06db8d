"""A script that catches everything is stopped all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# In a process of its own, as a fault would hang, and as it traces lines.
RUN = """
import sys
from automesh.program.capture.run_script import run_script, stop_script
from automesh.program.nouns import Entry
class Watch:
    def mesh(self, make, devices, names, axis_types):
        stop_script()
import jax
ended = run_script(Entry(kind="script", location=sys.argv[1], function=""), Watch())
print(ended, sys.gettrace())
for _ in range(1000):
    str(object())
"""
MAKES = "jax.sharding.Mesh(jax.devices(), ('data',))"
CATCHES = {
    "retries": f"""
import jax
tries = 0
while True:
    try:
        {MAKES}
    except:
        tries += 1
        continue
""",
    "twice": f"""
import jax
def train():
    for step in range(10**9):
        try:
            {MAKES}
        except BaseException as error:
            print(type(error).__name__)
def main():
    while True:
        try:
            train()
        except:
            pass
main()
""",
    "once": f"""
import jax
try:
    {MAKES}
except BaseException:
    print("crashed")
finally:
    {MAKES}
""",
}


@pytest.mark.parametrize("name", CATCHES)
def test_a_script_that_catches_everything_is_stopped(name: str, tmp_path: Path) -> None:
    """Before, a bare `except:` around each step was run for ever."""
    script = tmp_path / "script.py"
    script.write_text(CATCHES[name])
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "None None", done.stdout
