"""Names that are no UTF-8, and locales that cannot read them: as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from automesh.jsonio import from_json, to_json
from automesh.program.script.sources import Reads, Watch, hash_of_sources

LIMIT_S = 120
RETURNS_NOTHING = "def build(mesh):\n    print('building')\n"
RAISES = r"""
print("\x1b]0;owned\x07printed\x9b2J", flush=True)


def build(mesh):
    raise ValueError("\x1b[31mred\x1b]0;owned\x07 \u202egnp caf\udce9")
"""
EXITS = r"""
import sys

sys.stderr.write("\x1b]0;owned\x07printed\x9b2J \u202egnp\n")
sys.exit(3)
"""


def run(
    words: list[bytes], folder: Path, variables: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    unwanted = ("LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(
        [sys.executable, "-m", "automesh", *words],
        cwd=folder,
        env={**environment, "LC_ALL": "C.UTF-8", **(variables or {})},
        capture_output=True,
        timeout=LIMIT_S,
    )
    # Raises where what is printed is no UTF-8.
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def obeyed(text: str) -> set[str]:
    return {char for char in text if not char.isprintable() and char != "\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (b"caf\xe9", "caf\xe9".encode()):
        inside = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        inside.mkdir()
        (inside / "train.py").write_text(RETURNS_NOTHING)
    return tmp_path


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_byte_is_named_and_no_script_is_blamed(folder: Path, locale: str) -> None:
    words = [b"search", b"caf\xe9/train.py", b"--target", b"cpu:2"]
    code, out, err = run(words, folder, {"LC_ALL": locale})
    assert (code, out) == (2, "")
    assert err == (
        "error: `caf\\xe9/train.py` is not UTF-8, which neither jax nor a study accepts\n"
        "hint: rename it: names of files and folders must be UTF-8\n"
    )


def test_a_folder_above_is_named(folder: Path) -> None:
    inside = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
    code, out, err = run([b"check-script", b"train.py", b"--target", b"cpu:2"], inside)
    assert (code, out) == (2, "")
    assert "caf\\xe9" in err and "is not UTF-8" in err


def test_a_locale_that_reads_no_names_is_named(folder: Path) -> None:
    words = [b"search", "caf\xe9/train.py".encode(), b"--target", b"cpu:2"]
    code, out, err = run(words, folder, {"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert (code, out) == (2, "")
    assert "`caf\\xc3\\xa9/train.py` is not UTF-8" in err
    assert "set PYTHONUTF8=1" in err


def test_what_a_script_reads_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a byte in the name of a file or in a variable that a script reads was its fault."""
    folder = os.fsencode(tmp_path)
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / "loop").symlink_to("loop")
    Path(os.fsdecode(folder + b"/caf\xe9")).write_text("2")
    monkeypatch.setitem(os.environ, "DATA", "caf\udce9")
    watch = Watch(modules=frozenset())
    for name in (b"/data.txt", b"/loop", b"/caf\xe9", b"/nul\0byte"):
        watch.note_open(folder + name, os.O_RDONLY)
    watch.asked["DATA"] += 1
    reads = watch.reads([tmp_path], ())
    assert [Path(name).name for name, _ in reads.files] == ["data.txt"]
    assert [name for name, _ in reads.variables] == ["DATA"]
    assert from_json(to_json(reads, Reads), Reads) == reads
    assert hash_of_sources((("/x/caf\udce9.py", "00"),)) != hash_of_sources((("/x/caf.py", "00"),))


@pytest.mark.slow
def test_the_c_locale_alone_keeps_nobody_from_a_name(folder: Path) -> None:
    words = [b"check-script", "caf\xe9/train.py".encode(), b"--target", b"cpu:2"]
    code, out, err = run(words, folder, {"LC_ALL": "C"})
    assert code == 1, err
    assert out.startswith("caf\xe9/train.py for cpu-2\n")
    assert "`build` returned nothing" in out


@pytest.mark.slow
@pytest.mark.parametrize(("script", "said"), [(RAISES, "red gnp caf\\xe9"), (EXITS, "printed gnp")])
def test_what_a_script_says_arrives_as_text(tmp_path: Path, script: str, said: str) -> None:
    """Of a worker: before, a lone surrogate in an exception's text ended the worker's answer."""
    (tmp_path / "train.py").write_text(script)
    code, out, err = run([b"check-script", b"train.py", b"--target", b"cpu:2"], tmp_path)
    assert code in (1, 2), err
    assert not obeyed(out + err)
    assert said in " ".join((out + err).split())
