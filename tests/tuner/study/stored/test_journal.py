"""A journal with damaged records: they are left out and named, and all others count."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automesh import limits
from automesh.errors import UsageError
from automesh.tuner.study.backend import cut_torn_tail
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.stored import journal
from automesh.tuner.study.stored.journal import TolerantFile
from automesh.tuner.study.study import Study
from tests.support.samples.storage_cases import compiled, opened, plans

Record = dict[str, Any]
CREATE_TRIAL, SET_USER_ATTRIBUTE, SET_STUDY_ATTRIBUTE = 4, 8, 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of three compiled plans, of 0.1, 0.2 and 0.3 s."""
    folder = tmp_path_factory.mktemp("whole")
    storage = parse_storage(f"{folder}/a.journal", folder)
    with opened(storage) as study:
        study.lead()
        study.compile.enqueue(plans(3))
        for number in range(1, 4):
            trial = study.compile.claim()
            assert trial is not None
            study.compile.finish(trial, compiled(number / 10))
        study.note("footer", {"a": 1})
    return Path(storage.location)


@pytest.fixture
def storage(whole: Path, tmp_path: Path) -> Storage:
    """A copy of it, to be damaged."""
    shutil.copy(whole, tmp_path / "a.journal")
    return parse_storage(f"{tmp_path}/a.journal", tmp_path)


def lines_of(storage: Storage) -> list[bytes]:
    return Path(storage.location).read_bytes().splitlines(keepends=True)


def write(storage: Storage, lines: list[bytes]) -> None:
    Path(storage.location).write_bytes(b"".join(lines))


def number_of(storage: Storage, op_code: int) -> int:
    """The place of the first record of a kind."""
    codes = [json.loads(line)["op_code"] for line in lines_of(storage)]
    return codes.index(op_code)


def change(storage: Storage, number: int, edit: Callable[[Record], object]) -> None:
    lines = lines_of(storage)
    record = json.loads(lines[number])
    edit(record)
    lines[number] = json.dumps(record).encode() + b"\n"
    write(storage, lines)


def seconds(study: Study) -> list[float | None]:
    return [getattr(one.outcome, "step_s", None) for one in study.compile.trials()]


@pytest.mark.parametrize("extra", [
    b'{"op_code":99,"worker_id":"w","study_id":0}\n',
    b'{"op_code":-1,"worker_id":"w"}\n',
    b'{"op_code":"8","worker_id":"w","trial_id":0,"user_attr":{"a":1}}\n',
    b'{"op_code":8}\n',
    b'{"op_code":8,"worker_id":"w","trial_id":[],"user_attr":{"a":1}}\n',
    b'{"op_code":8,"worker_id":"w","trial_id":0,"user_attr":"a"}\n',
    b'{"op_code":6,"worker_id":"w","trial_id":0,"state":77,"values":null}\n',
    b'{"op_code":2,"worker_id":"w","study_id":0,"user_attr":{}}\n',
    b'{"op_code":7,"trial_id":' + b"[" * 100_000 + b"\n",
    b'{"op_code":8,"worker_id":"w","trial_id":0,"user_attr":{"a":"\xff"}}\n',
    b'{"op_code":8,"worker_id":"w","trial_id":0,"user_attr":{"a":' + b"9" * 5000 + b"}}\n",
    b'{"op_c\x8fde":8,"worker_id":"w","trial_id":0,"user_attr":{"a":1}\n',
])  # fmt: skip
def test_a_damaged_change_is_left_out_and_named(storage: Storage, extra: bytes) -> None:
    lines = lines_of(storage)
    first = number_of(storage, SET_USER_ATTRIBUTE)
    write(storage, [*lines[:first], extra, *lines[first:]])
    with opened(storage) as study:
        assert seconds(study) == [0.1, 0.2, 0.3]
        assert study.noted("footer") == {"a": 1}
        study.lead()
        assert len(study.compile.enqueue(plans(4))) == 1
        notices = study.skipped.notices()
    # Changes of finished trials, which Optuna passes over, are no damage.
    assert all(f"line {first + 1} of `a.journal` is damaged and left out: " in n for n in notices)
    assert len(notices) == 1


def test_a_trial_whose_making_is_damaged_moves_no_other(storage: Storage) -> None:
    first = number_of(storage, CREATE_TRIAL)
    for edit in (
        lambda record: record.update(op_code=5),
        lambda record: record.update(op_code=9),
        lambda record: record.pop("datetime_start"),
        lambda record: record.update(distributions={"dp": "{}"}),
        lambda record: record.update(state=9),
        lambda record: record.update(user_attrs=[]),
    ):
        whole = lines_of(storage)
        change(storage, first, edit)
        with opened(storage) as study:
            assert seconds(study) in ([0.2, 0.3], [None, 0.2, 0.3])
            assert {str(one.plan) for one in study.compile.trials()} >= {
                str(plan) for plan in plans(3)[1:]
            }
        write(storage, whole)


@pytest.mark.parametrize("cut", [40, 80, 200])
def test_a_torn_making_of_a_trial_stands_for_an_empty_one(storage: Storage, cut: int) -> None:
    lines = lines_of(storage)
    first = number_of(storage, CREATE_TRIAL)
    head = lines[first].index(b'"study_id"')
    lines[first] = lines[first][: head + cut] + b"\n"
    write(storage, lines)
    with opened(storage) as study:
        assert seconds(study) == [0.2, 0.3]
        assert any(f"line {first + 1} of" in one for one in study.skipped.named)


def test_a_trial_of_a_study_that_never_was_is_refused(storage: Storage) -> None:
    first = number_of(storage, CREATE_TRIAL)
    change(storage, first, lambda record: record.update(study_id=7))
    before = lines_of(storage)
    with pytest.raises(UsageError, match=f"is damaged at line {first + 1}\\b"):
        opened(storage)
    assert lines_of(storage) == before


def test_a_flipped_bit_deletes_no_study(storage: Storage) -> None:
    first = number_of(storage, SET_STUDY_ATTRIBUTE)
    change(storage, first, lambda record: record.update(op_code=1))
    with opened(storage) as study:
        assert seconds(study) == [0.1, 0.2, 0.3]
        assert f"line {first + 1} of `a.journal`" in study.skipped.named


def test_a_damaged_first_record_is_made_up_for(storage: Storage) -> None:
    change(storage, 0, lambda record: record.pop("directions"))
    with opened(storage) as study:
        assert seconds(study) == [0.1, 0.2, 0.3]


def test_what_cannot_be_told_is_refused_with_its_line(storage: Storage) -> None:
    lines = lines_of(storage)
    for damaged in (b"\n", b"\xff" * 300 + b"\n", b"[1]\n", b"{}\n"):
        write(storage, [*lines[:4], damaged, *lines[4:]])
        with pytest.raises(UsageError) as caught:
            opened(storage)
        assert caught.value.message.endswith("is damaged at line 5")
        assert "never overwritten" in caught.value.hint


def test_every_record_can_lose_every_key(storage: Storage) -> None:
    whole = lines_of(storage)
    for number, line in enumerate(whole):
        for key in json.loads(line):
            record = json.loads(line)
            del record[key]
            write(
                storage,
                [*whole[:number], json.dumps(record).encode() + b"\n", *whole[number + 1 :]],
            )
            try:
                with opened(storage) as study:
                    left = [one for one in seconds(study) if one is not None]
                    assert set(left) <= {0.1, 0.2, 0.3}
            except UsageError as error:
                assert "\n" not in error.message


def test_a_colleague_goes_on_while_records_are_damaged(storage: Storage) -> None:
    with opened(storage) as first, opened(storage) as second:
        assert first.lead()
        with Path(storage.location).open("ab") as file:
            file.write(b'{"op_code":42,"worker_id":"x"}\n')
        assert len(first.compile.enqueue(plans(5))) == 2
        trial = second.compile.claim()
        assert trial is not None
        assert second.compile.finish(trial, compiled(0.4)) == "stored"
        assert seconds(first) == [0.1, 0.2, 0.3, 0.4, None]
        assert len(first.skipped.named) == len(second.skipped.named) == 1


def test_what_was_read_of_a_journal_is_not_read_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each reading began at the first line, and a long study took minutes."""
    read: list[int] = []
    record = TolerantFile._record  # pyright: ignore[reportPrivateUsage]

    def counted(file: TolerantFile, line: bytes, number: int) -> Record:
        read.append(number)
        return record(file, line, number)

    class Counted(io.BufferedReader):
        lines = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            Counted.lines += 1
            return super().readline(size)

    def open_counted(path: Path) -> io.BufferedReader:
        return Counted(io.FileIO(path))

    monkeypatch.setattr(TolerantFile, "_record", counted)
    monkeypatch.setattr(journal, "open_regular", open_counted)
    with opened(storage) as study:
        first = len(lines_of(storage))
        assert study.lead()
        assert len(study.compile.enqueue(plans(5))) == 2
        for _ in range(50):
            assert len(study.compile.trials()) == 5
    last = len(lines_of(storage))
    assert first < last
    # Each once, for the study and for the list of all studies' names; and ends of the file.
    assert max(Counter(read).values()) <= 2
    assert Counted.lines < 2 * last + 200


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("JOURNAL_RECORDS", 5, "holds more than 5 records"),
        ("JOURNAL_BYTES", 1000, "holds more than 1000 B"),
        ("JOURNAL_S", -1.0, "holds more than is read in -1 s"),
    ],
)
def test_a_journal_is_read_within_bounds(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, words: str
) -> None:
    before = Path(storage.location).read_bytes()
    monkeypatch.setattr(limits, limit, value)
    with pytest.raises(UsageError, match=words):
        opened(storage)
    assert Path(storage.location).read_bytes() == before


@pytest.mark.slow
def test_more_than_a_million_records_are_refused_at_once(storage: Storage) -> None:
    record = b'{"op_code":2,"worker_id":"a","study_id":0,"user_attr":{"k":1}}\n'
    write(storage, [*lines_of(storage), record * limits.JOURNAL_RECORDS])
    begun_s = time.monotonic()
    with pytest.raises(UsageError, match="more than 1,000,000 records"):
        opened(storage)
    assert time.monotonic() - begun_s < 40


@pytest.mark.parametrize("content", [b"mine", b"mine\nand the rest"])
def test_what_has_taken_the_place_of_a_journal_is_not_written(
    storage: Storage, tmp_path: Path, content: bytes
) -> None:
    """Before, a last line without its end was cut off of whatever was there by then."""
    with opened(storage) as study:
        path = Path(storage.location)
        path.rename(tmp_path / "kept.journal")
        path.write_bytes(content)
        cut_torn_tail(path)
        assert path.read_bytes() == content
        path.unlink()
        (tmp_path / "kept.journal").rename(path)
        study.note("footer", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to others")
def test_a_link_of_others_in_the_place_of_a_journal(storage: Storage, tmp_path: Path) -> None:
    path, victim = Path(storage.location), tmp_path / "victim.journal"
    with opened(storage) as study:
        path.rename(victim)
        before = victim.read_bytes()
        path.symlink_to(victim)
        os.lchown(path, 65534, 65534)
        with pytest.raises(UsageError, match="a link that another account made"):
            study.note("footer", 1)
        assert victim.read_bytes() == before
        path.unlink()
        victim.rename(path)
