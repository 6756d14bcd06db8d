"""The store of compiled programs: whole or not at all, bounded, shared by processes that die."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh import limits
from automesh.errors import UsageError
from automesh.hlo.store import ModuleStore, Stored, default_store, key_of
from automesh.outcomes import Collective, Counts, Memory, OutOfMemory
from tests.cli.test_help import check
from tests.support.cases import bad_inputs_run

MEMORY = Memory(
    argument_bytes=4, output_bytes=3, alias_bytes=2, temporary_bytes=1, peak_bytes=6 * 2**30
)
COUNTS = Counts(
    flops=10,
    hbm_bytes=20,
    collectives=(
        Collective(
            kind="all-gather",
            axes=("dp", "tp"),
            group_size=4,
            count=2,
            payload_bytes=64,
            wire_bytes=48,
        ),
    ),
    uncounted=("a kernel",),
)
VERDICT = OutOfMemory(stage="compile", needed_bytes=9, limit_bytes=8, detail="too much")
KEPT = Stored(
    module=b"module" * 50,
    memory=MEMORY,
    counts=COUNTS,
    compile_s=21.5,
    effort="default",
    target="tpu v5e:4x4",
    label="dp:4,tp:4",
    versions=(("jax", "0.10.2"), ("libtpu", "0.0.42")),
)
REFUSED = replace(KEPT, module=b"", memory=None, counts=None, out_of_memory=VERDICT, effort="low")
# Where the header ends is in the first bytes; what follows is packed and has a checksum.
texts = st.text(max_size=20)
stored = st.builds(
    Stored,
    module=st.binary(max_size=300),
    memory=st.sampled_from([MEMORY, None]),
    counts=st.sampled_from([COUNTS, None]),
    compile_s=st.floats(0, 1e4),
    effort=st.sampled_from(["default", "low"]),
    target=texts,
    label=texts,
    versions=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    out_of_memory=st.sampled_from([VERDICT, None]),
    is_settled=st.booleans(),
)


def key(name: object) -> str:
    return key_of(fingerprint=str(name), target=["t"], effort=(), versions=(), environment=())


def aged(store: ModuleStore, name: str, age_s: float) -> None:
    """As if an entry had been used last so long ago."""
    then = time.time() - age_s
    os.utime(store.folder / f"{key(name)}.module", (then, then))


@given(stored)
def test_what_is_kept_is_found(tmp_path_factory: pytest.TempPathFactory, one: Stored) -> None:
    store = ModuleStore(tmp_path_factory.mktemp("store"))
    assert store.find(key("a")) is None
    store.keep(key("a"), one)
    assert store.find(key("a")) == one
    assert store.find(key("b")) is None
    (entry,) = store.entries()
    assert entry.stored == replace(one, module=b"")
    assert entry.size_bytes == store.size_bytes() > 0


@given(st.data())
def test_a_damaged_file_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = ModuleStore(tmp_path_factory.mktemp("store"))
    store.keep(key("a"), KEPT)
    path = store.folder / f"{key('a')}.module"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1), label="cut off after")
    path.write_bytes(whole[:cut])
    assert store.find(key("a")) is None
    assert store.entries() == ()
    place = data.draw(st.integers(0, len(whole) - 1), label="damaged at")
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255), label="by")
    path.write_bytes(damaged)
    # The checksum does not cover the flags of the packed part, which do not change what is in it.
    assert store.find(key("a")) in (None, KEPT)
    store.keep(key("a"), KEPT)
    assert store.find(key("a")) == KEPT


def test_a_small_file_that_unpacks_to_much_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its whole length was reserved, and more than the limit of a module came out."""
    monkeypatch.setattr(limits, "MODULE_BYTES", 8 * limits.CHUNK_BYTES)
    store = ModuleStore(tmp_path)
    most = replace(KEPT, module=bytes(limits.MODULE_BYTES))
    store.keep(key("a"), most)
    store.keep(key("b"), replace(KEPT, module=bytes(64 * limits.CHUNK_BYTES)))
    assert (tmp_path / f"{key('b')}.module").stat().st_size < limits.CHUNK_BYTES
    assert store.find(key("a")) == most
    tracemalloc.start()
    try:
        assert store.find(key("b")) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * limits.MODULE_BYTES


def test_a_file_under_a_wrong_name_is_not_there(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    store.keep(key("a"), KEPT)
    (tmp_path / f"{key('a')}.module").rename(tmp_path / f"{key('b')}.module")
    (tmp_path / f"{key('c')}.module").write_text("mine")
    assert store.find(key("b")) is store.find(key("c")) is None
    assert store.entries() == ()


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    for age_s, name in enumerate("dcba"):
        store.keep(key(name), KEPT)
        aged(store, name, 100.0 * (1 + age_s))
    each = store.size_bytes() // 4
    assert store.find(key("a")) == KEPT, "the oldest, but used now"
    small = replace(store, limit_bytes=3 * each)
    small.keep(key("e"), KEPT)
    assert [entry.key for entry in small.entries()] == [key("e"), key("a"), key("d")]
    assert small.size_bytes() <= small.limit_bytes


def test_what_is_kept_again_takes_no_more_room(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    store.keep(key("a"), KEPT)
    store.keep(key("b"), KEPT)
    full = replace(store, limit_bytes=store.size_bytes())
    full.keep(key("a"), KEPT)
    assert {entry.key for entry in full.entries()} == {key("a"), key("b")}


def test_what_is_too_large_is_not_kept(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    store.keep(key("a"), KEPT)
    tight = replace(store, limit_bytes=store.size_bytes() + 10)
    tight.keep(key("b"), replace(KEPT, module=random.Random(0).randbytes(2000)))
    assert [entry.key for entry in tight.entries()] == [key("a")]


def test_half_written_files_are_removed_in_time(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    old, new = tmp_path / ".0000.old.tmp", tmp_path / ".0000.new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    then = time.time() - 7200
    os.utime(old, (then, then))
    store.keep(key("a"), KEPT)
    assert (old.exists(), new.exists()) == (False, True)
    (tmp_path / "notes.txt").write_text("mine")
    assert store.clear() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_is_not_there_is_an_empty_store(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path / "none")
    assert (store.find(key("a")), store.entries(), store.size_bytes()) == (None, (), 0)
    assert store.clear() == 0
    assert not store.folder.exists()


WRITER = """
import sys
from pathlib import Path
from tests.hlo.test_store import KEPT, ModuleStore, key, replace
store = ModuleStore(Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
while True:
    for number in range(8):
        store.keep(key(number), replace(KEPT, module=str(number).encode() * 100_000))
        assert (one := store.find(key(number))) is None or one.label == KEPT.label
"""


def test_killed_writers_leave_nothing_half_done(tmp_path: Path) -> None:
    kept = replace(KEPT, module=b"0" * 100_000)
    probe = ModuleStore(tmp_path / "probe")
    probe.keep(key(0), kept)
    store = ModuleStore(tmp_path / "store", 5 * probe.size_bytes())
    command = [sys.executable, "-c", WRITER, str(store.folder), str(store.limit_bytes)]
    writers = [
        subprocess.Popen(
            command, cwd=bad_inputs_run.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for delay_s, writer in zip((0.1, 0.05, 0.02), writers, strict=True):
        time.sleep(delay_s)
        failed = writer.poll()
        writer.kill()
        _, words = writer.communicate()
        assert failed is None, words.decode()
    entries = {entry.key for entry in store.entries()}
    assert entries
    for number in range(8):
        found = store.find(key(number))
        assert (found is not None) == (key(number) in entries)
        assert found is None or found.module == str(number).encode() * 100_000
    # Each of the three may have made room for itself before the others had written.
    assert store.size_bytes() <= store.limit_bytes + 2 * probe.size_bytes()


@given(st.integers(0, 4))
def test_the_key_depends_on_everything(part: int) -> None:
    parts = {
        "fingerprint": ("f", "g"),
        "target": (["v5e:4x4"], ["v5e:4x8"]),
        "effort": ((("effort", "low"),), (("effort", "default"),)),
        "versions": ((("libtpu", "1"),), (("libtpu", "2"),)),
        "environment": ((), (("XLA_FLAGS", "--x"),)),
    }
    one = {name: values[0] for name, values in parts.items()}
    changed = list(parts)[part]
    other = {**one, changed: parts[changed][1]}
    assert key_of(**one) == key_of(**one) != key_of(**other)  # pyright: ignore[reportArgumentType]


def test_order_does_not_matter_for_the_key() -> None:
    versions = [("jax", "1"), ("libtpu", "2")]
    common = {"fingerprint": "f", "target": [], "effort": (), "environment": ()}
    keys = {key_of(**common, versions=one) for one in (versions, versions[::-1])}  # pyright: ignore
    assert len(keys) == 1


def test_the_environment_names_the_folder_and_the_limit(tmp_path: Path) -> None:
    variables = {"AUTOMESH_CACHE": str(tmp_path), "AUTOMESH_CACHE_LIMIT": "3MiB"}
    assert default_store(variables) == ModuleStore(tmp_path / "modules", 3 * 2**20)
    assert default_store({}).folder.name == "modules"
    assert default_store({}).limit_bytes == 4 * 2**30
    with pytest.raises(UsageError, match=r"\$AUTOMESH_CACHE_LIMIT: "):
        default_store({"AUTOMESH_CACHE_LIMIT": "plenty"})


def doctor(command: str, folder: Path) -> bad_inputs_run.Ran:
    variables = {"AUTOMESH_CACHE": str(folder / "cache"), "AUTOMESH_CACHE_LIMIT": "2GiB"}
    return bad_inputs_run.run(f"doctor {command}", folder, {**variables, "COLUMNS": "100"})


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with a store of four programs for two targets."""
    store = ModuleStore(tmp_path / "cache" / "modules")
    h100 = "gpu h100 1x2x8"
    for age, (name, one) in enumerate(
        {
            "a": KEPT,
            "b": replace(KEPT, compile_s=7200.0),
            "c": REFUSED,
            "d": replace(KEPT, target=h100, module=random.Random(1).randbytes(3 * 2**20)),
        }.items()
    ):
        store.keep(key(name), one)
        # Noon of 14 November 2023 and the days before.
        used_s = 1_699_963_200 - 86_400 * age
        os.utime(store.folder / f"{key(name)}.module", (used_s, used_s))
    return tmp_path


def test_doctor_shows_what_is_kept(filled: Path) -> None:
    ran = doctor("--cache", filled)
    assert (ran.code, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 80
    check("doctor_cache", ran.stdout)
    tree = json.loads(doctor("--cache --json", filled).stdout)
    assert [one["programs"] for one in tree["targets"]] == [3, 1]
    assert [one["out_of_memory"] for one in tree["targets"]] == [1, 0]
    assert tree["limit_bytes"] == 2 * 2**30
    assert tree["size_bytes"] == sum(one["size_bytes"] for one in tree["targets"])


def test_doctor_clears_what_is_kept(filled: Path) -> None:
    ran = doctor("--cache --clear", filled)
    assert (ran.code, ran.stderr) == (0, "")
    check("doctor_cache_clear", ran.stdout)
    assert not list((filled / "cache" / "modules").iterdir())


def test_doctor_clears_only_what_it_shows(tmp_path: Path) -> None:
    ran = doctor("--clear", tmp_path)
    assert (ran.code, ran.stdout) == (2, "")
    assert "automesh doctor --cache --clear" in ran.stderr


def test_the_cache_is_shown_without_jax(tmp_path: Path) -> None:
    from tests.cli.test_search import call

    done = call(shlex.join(["doctor", "--cache"]), tmp_path, {"AUTOMESH_CACHE": str(tmp_path)})
    assert (done.code, done.stderr, done.jax) == (0, "", "")


def test_a_program_moves_to_another_store_whole_or_not_at_all(tmp_path: Path) -> None:
    here, there = ModuleStore(tmp_path / "here"), ModuleStore(tmp_path / "there")
    key, other = "a" * 64, "b" * 64
    here.keep(key, KEPT)
    data = here.packed(key)
    assert data is not None
    for damaged in (data[:-1], data + b"x", data[:40], b"", data[:-8] + bytes(8)):
        assert not there.take(key, damaged)
    for wrong in (other, "../../x", "", "A" * 64):
        assert not there.take(wrong, data)
        assert here.packed(wrong) is None
    assert not ModuleStore(tmp_path / "small", limit_bytes=10).take(key, data)
    assert there.take(key, data)
    assert there.find(key) == KEPT
    assert [path.name for path in (tmp_path / "there").iterdir()] == [f"{key}.module"]
