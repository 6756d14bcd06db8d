"""Writes, moves and removes files in the working directory inside of the private layer, twice.

    python -m tests.support.jobs.kept_apart

Fails where the layer shows another thing than the files themselves would. A process of its own,
because the layer changes `os` for good.
"""

from __future__ import annotations

import glob
import io
import json
import logging
import os
import pathlib
import pickle
import shutil
import sqlite3
import sys
import tempfile

import numpy as np

from automesh.program.capture.world.kept_apart import kept_apart
from automesh.program.capture.world.told import forget, told


def refused(kind: type[BaseException], call: object, *args: object) -> BaseException:
    try:
        call(*args)  # type: ignore[operator]
    except kind as error:
        assert "automesh-run" not in str(error), error
        return error
    raise AssertionError(f"{args} was let through")


def write_files() -> None:
    assert pathlib.Path("a.txt").read_text() == "old"
    with open("a.txt", "w") as file:
        file.write("new")
    assert pathlib.Path("a.txt").read_text() == "new"
    assert os.path.getsize("a.txt") == 3
    np.savez("state.npz", w=2)
    assert np.load("state.npz")["w"] == 2
    np.arange(3).tofile("raw.bin")
    assert os.path.getsize("raw.bin") == 24
    with open("p.pkl", "wb") as file:
        pickle.dump([1], file)
    assert pickle.loads(pathlib.Path("p.pkl").read_bytes()) == [1]
    pathlib.Path("j.json").write_text(json.dumps({"a": 1}))
    assert json.loads(pathlib.Path("j.json").read_text()) == {"a": 1}
    with open("e.txt", "x") as file:
        file.write("q")
    refused(FileExistsError, open, "e.txt", "x")
    refused(FileNotFoundError, open, "nowhere/e", "w")
    refused(FileNotFoundError, open, "nothing")
    with open("e.txt", "r+") as file:
        assert file.read() == "q"
    handler = logging.FileHandler("log.txt")
    handler.emit(logging.makeLogRecord({"msg": "hi"}))
    handler.close()
    assert pathlib.Path("log.txt").read_text() == "line\nhi\n"


def change_folders() -> None:
    refused(FileExistsError, os.makedirs, "ck")
    os.makedirs("ck/step_2", exist_ok=True)
    pathlib.Path("ck/step_2/w").write_text("w2")
    assert sorted(os.listdir("ck")) == ["step_1", "step_2"]
    assert sorted(one.name for one in pathlib.Path("ck").iterdir()) == ["step_1", "step_2"]
    assert sorted(glob.glob("ck/*/w")) == ["ck/step_1/w", "ck/step_2/w"]
    assert {folder for folder, _, _ in os.walk("ck")} == {"ck", "ck/step_1", "ck/step_2"}
    shutil.rmtree("ck/step_1")
    assert os.listdir("ck") == ["step_2"]
    shutil.rmtree("ck")
    assert not os.path.isdir("ck")
    os.mkdir("ck")
    assert os.listdir("ck") == []
    os.rename("ck", "other")
    assert os.path.isdir("other")
    assert not os.path.exists("ck")
    here = os.getcwd()
    os.chdir("other")
    pathlib.Path("in.txt").write_text("i")
    assert os.getcwd() == os.path.join(here, "other")
    os.chdir("..")
    assert pathlib.Path("other/in.txt").read_text() == "i"


def move_files() -> None:
    os.rename("a.txt", "b.txt")
    assert not os.path.exists("a.txt")
    pathlib.Path("t.tmp").write_text("z")
    os.replace("t.tmp", "b.txt")
    assert pathlib.Path("b.txt").read_text() == "z"
    shutil.copy("b.txt", "c.txt")
    shutil.move("c.txt", "d.txt")
    assert os.path.exists("d.txt")
    os.symlink("b.txt", "link")
    assert pathlib.Path("link").read_text() == "z"
    os.remove("e.txt")
    refused(FileNotFoundError, os.remove, "e.txt")
    os.truncate("log.txt", 0)
    os.utime("log.txt")
    os.chmod("log.txt", 0o600)


def use_temporary_files() -> str:
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "x").write_text("1")
    assert os.listdir(folder) == ["x"]
    with tempfile.TemporaryDirectory() as other:
        pathlib.Path(other, "x").write_text("1")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("1")
        file.flush()
        assert pathlib.Path(file.name).read_text() == "1"
    return folder


def run() -> None:
    forget()
    with kept_apart():
        write_files()
        change_folders()
        move_files()
        folder = use_temporary_files()
        # What comes by the layer is refused.
        refused(PermissionError, sqlite3.connect, "state.npz")
        refused(PermissionError, io.FileIO, "state.npz", "w")
    assert not os.path.exists(folder)


if __name__ == "__main__":
    run()
    run()
    sys.stdout.write(json.dumps(told()))
