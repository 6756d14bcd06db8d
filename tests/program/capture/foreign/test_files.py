"""Libraries that open files in C++ read and write what the private layer has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# It imports tensorstore after the layer is there, as a script does, and once more in a second run.
RUN = """
import json, os, pathlib
from automesh.program.capture.foreign.files import led_to_layer, with_places
from automesh.program.capture.world.kept_apart import kept_apart

def spec(place):
    base = f"file://{os.getcwd()}/{place}/"
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "w"}}

def once():
    import tensorstore as ts
    shape = {"metadata": {"shape": [3], "chunks": [3], "dtype": "<i4"}}
    new = ts.open({**spec("ck/2.tmp"), **shape}, create=True, open=True).result()
    new.write([1, 2, 3]).result()
    os.rename("ck/2.tmp", "ck/2")
    seen = [ts.open(ts.Spec(spec("ck/2"))).result().read().result().tolist()]
    old = ts.open({**spec("ck/1"), **shape}, create=True, open=True).result()
    seen.append(old.read().result().tolist())
    old.write([7, 7, 7]).result()
    seen.append(ts.open(spec("ck/1")).result().read().result().tolist())
    store = ts.KvStore.open(f"file://{os.getcwd()}/notes/").result()
    store.write("a", b"b").result()
    return [*seen, sorted(os.listdir("ck")), pathlib.Path("notes/a").read_text(), database()]

def database():
    import sqlite3
    with sqlite3.connect("runs.db") as runs, sqlite3.connect(":memory:") as scratch:
        scratch.execute("create table t (x)")
        runs.execute("create table if not exists losses (x)")
        runs.execute("insert into losses values (1)")
        runs.commit()
        return [list(row) for row in runs.execute("select count(*) from losses")]

if os.path.isdir("ck"):
    found = []
    for _ in range(2):
        with kept_apart(), led_to_layer():
            found.append(once())
    print(json.dumps([found, with_places(spec("ck"), writes=True) == spec("ck")]))
else:
    import tensorstore as ts
    os.makedirs("ck")
    shape = {"metadata": {"shape": [3], "chunks": [3], "dtype": "<i4"}}
    ts.open({**spec("ck/1"), **shape}, create=True).result().write([4, 5, 6]).result()
    database()
"""


def run(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_tensorstore_and_sqlite_open_is_kept_apart(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    folder = tmp_path / "work"
    folder.mkdir()
    run(folder)
    before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    found, is_real_behind = json.loads(run(folder))
    assert found == [[[1, 2, 3], [4, 5, 6], [7, 7, 7], ["1", "2"], "b", [[2]]]] * 2
    assert is_real_behind, "no run goes on"
    assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before
