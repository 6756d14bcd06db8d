"""A journal in which damaged records are left out, and named.

Optuna replays a journal record by record, and stops at the first that it cannot read. Here such a
record counts as one that changes nothing. Only those that make a study or a trial must not be
missing: whatever follows knows trials by their place in the order of making. For such a record an
empty trial or study is made; if a line does not even show what it was, the journal is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedRandom
from pathlib import Path
from typing import Any

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import get_lock_file
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.study import StudyDirection
from optuna.trial import TrialState

from automesh import limits
from automesh.errors import UsageError
from automesh.files import is_foreign_link
from automesh.reading import open_regular
from automesh.skipped import Skipped
from automesh.units import format_bytes

Record = dict[str, Any]

_LOOK = 256  # records between two looks at the clock

_CREATE_STUDY, _DELETE_STUDY, _CREATE_TRIAL = 0, 1, 4
# Of a trial that nobody has, so that Optuna passes it over.
_NOTHING: Record = {"op_code": 8, "worker_id": "", "trial_id": -1, "user_attr": {"": 0}}
_ALWAYS = {"op_code", "worker_id"}
# By these keys a record is known whose operation code may be what is damaged.
_OF_A_CHANGE = {"trial_id", "user_attr", "system_attr"}
_OF_A_TRIAL = {"datetime_start", "datetime_complete", "distributions", "user_attrs"}
_OF_A_STUDY = {"study_name", "directions"}
_KEYS = (*_OF_A_CHANGE, *_OF_A_TRIAL, *_OF_A_STUDY)
_OP_CODE = re.compile(r'"op_code" ?: ?(-?[0-9]{1,9})\b')
_STUDY_ID = re.compile(r'"study_id" ?: ?([0-9]{1,9})\b')
_STUDY_NAME = re.compile(r'"study_name" ?: ?("[^"\\]{1,500}")')


class TolerantJournal(JournalStorage):
    """Optuna's storage in a journal file.

    Args:
      lock: the process that writes holds it.
      skipped: takes the records that are damaged.

    Raises:
      UsageError: a line is damaged so much that its kind is unknown.
    """

    def __init__(self, path: Path, lock: JournalFileOpenLock, skipped: Skipped) -> None:
        # Optuna reads the journal as soon as it is given it: first it gets an empty one.
        super().__init__(_Empty())
        self._backend = TolerantFile(path, lock, skipped)
        self._replay_result = _TolerantReplay(self._worker_id_prefix, path, skipped)
        self.get_all_studies()


class _Empty(BaseJournalBackend):
    def read_logs(self, log_number_from: int) -> Iterable[Record]:
        del log_number_from
        return []

    def append_logs(self, logs: list[Record]) -> None:
        raise NotImplementedError


class TolerantFile(JournalFileBackend):
    """The file of a journal, read as one record a line, whatever a line holds."""

    def __init__(self, path: Path, lock: JournalFileOpenLock, skipped: Skipped) -> None:
        super().__init__(str(path), lock_obj=lock)
        self._path = path
        self._skipped = skipped
        self._offsets = {0: 0}

    def read_logs(self, log_number_from: int) -> Generator[Record]:
        """Reads the records from a number on, as far as the file is written.

        Raises:
          UsageError: as `TolerantJournal`, or it takes longer than a journal may.
        """
        begun_s = time.monotonic()
        with open_regular(self._path) as file:
            number = log_number_from
            if number not in self._offsets:  # There may be very many: looked through rarely.
                number = max(one for one in self._offsets if one <= log_number_from)
            file.seek(self._offsets[number])
            while True:
                line = file.readline(limits.JOURNAL_LINE_BYTES)
                if not line.endswith(b"\n"):
                    if len(line) == limits.JOURNAL_LINE_BYTES:
                        raise _damaged(self._path, number)
                    return  # Somebody is writing it.
                if number >= limits.JOURNAL_RECORDS:
                    raise _too_long(self._path, f"more than {limits.JOURNAL_RECORDS:,} records")
                # Who replays the record before has the time, too.
                if number % _LOOK == 0 and time.monotonic() - begun_s > limits.JOURNAL_S:
                    raise _too_long(self._path, f"more than is read in {limits.JOURNAL_S:.0f} s")
                if number >= log_number_from:
                    record = self._record(line, number)
                    number += 1
                    self._offsets[number] = file.tell()
                    yield record
                else:
                    number += 1

    def append_logs(self, logs: list[Record]) -> None:
        """Adds records as Optuna does, unless the journal was replaced since it was opened.

        Raises:
          OSError: it cannot be written, or is a link.
        """
        text = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs)
        with get_lock_file(self._lock), open_for_writing(self._path) as file:
            file.seek(0, os.SEEK_END)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _record(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
            if isinstance(record, dict):
                return {"op_code": None, "worker_id": "", **record}
            error: Exception = UsageError("it is no JSON object")
        except (ValueError, RecursionError) as caught:
            error = caught
        self._skipped.note(_line(self._path, number), error)
        return _stand_in(_remains_of_text(line), self._path, number)


def open_for_writing(path: Path) -> BufferedRandom:
    """Opens an existing journal, to read and write its bytes.

    A link is followed if its owner is this user, or one that `is_foreign_link` trusts.

    Raises:
      OSError: it cannot be opened, is no regular file, or a link that somebody else has made.
    """
    if is_foreign_link(path):
        raise OSError(errno.ELOOP, "it is a link that another account made", str(path))
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(os.path.realpath(path), flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "r+b")


def check_size(path: Path) -> None:
    """Refuses a journal that is larger than one may be, before it is replayed.

    Raises:
      UsageError: names its size.
    """
    size = path.stat().st_size
    if size > limits.JOURNAL_BYTES:
        raise _too_long(path, f"more than {format_bytes(limits.JOURNAL_BYTES)}")
    records = 0
    with open_regular(path) as file:
        while chunk := file.read(limits.CHUNK_BYTES):
            records += chunk.count(b"\n")
            if records > limits.JOURNAL_RECORDS:
                raise _too_long(path, f"more than {limits.JOURNAL_RECORDS:,} records")


def _too_long(path: Path, what: str) -> UsageError:
    return UsageError(
        f"the journal {path} holds {what}, and is not read",
        hint="it is kept as it is: name another --storage to start anew",
    )


class _TolerantReplay(JournalStorageReplayResult):
    """The state of the studies after the records of a journal."""

    def __init__(self, worker_id_prefix: str, path: Path, skipped: Skipped) -> None:
        super().__init__(worker_id_prefix)
        self._path = path
        self._skipped = skipped

    def apply_logs(self, logs: Iterable[Record]) -> None:
        """Applies records, those of this process strictly: it wants to know what is refused.

        Raises:
          UsageError: as `TolerantJournal`.
        """
        for log in logs:
            number = self.log_number_read
            try:
                self._check(log)
                super().apply_logs([log])
            except (DuplicatedStudyError, UpdateFinishedTrialError):
                raise
            # Whatever Python makes of a value that is not what Optuna has written.
            except Exception as error:
                if log["worker_id"] == self.worker_id:
                    raise
                self._skipped.note(_line(self._path, number), error)
                stand_in = _stand_in(_remains_of(log), self._path, number)
                if stand_in["op_code"] == _CREATE_TRIAL and not self._knows(stand_in["study_id"]):
                    raise _damaged(self._path, number) from None
                self.log_number_read = number
                super().apply_logs([stand_in])

    def _check(self, log: Record) -> None:
        """Refuses records that Optuna would take, and that do more harm than a lost record."""
        op_code, study_id = log["op_code"], log.get("study_id")
        if type(op_code) is not int:
            raise UsageError(f"its operation code is {op_code!r}")
        if op_code == _DELETE_STUDY and set(log) != {*_ALWAYS, "study_id"}:
            raise UsageError("it would delete a study, and says more than which")
        if op_code == _CREATE_TRIAL and not self._knows(study_id):
            raise UsageError(f"it makes a trial of a study {study_id!r} that there is not")

    def _knows(self, study_id: object) -> bool:
        """Whether a study was ever made; trials of one that was deleted are passed over."""
        return type(study_id) is int and 0 <= study_id < self._next_study_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remains:
    """The readable parts of a damaged record.

    Attributes:
      op_code, study_id: None if they are not readable.
      keys: those of `_KEYS` that it has.
    """

    op_code: int | None
    study_id: int | None
    study_name: str
    keys: frozenset[str]


def _remains_of(record: Record) -> _Remains:
    op_code, study_id = record["op_code"], record.get("study_id")
    name = record.get("study_name")
    return _Remains(
        op_code=op_code if type(op_code) is int else None,
        study_id=study_id if type(study_id) is int else None,
        study_name=name if isinstance(name, str) else "",
        keys=frozenset(key for key in _KEYS if key in record),
    )


def _remains_of_text(line: bytes) -> _Remains:
    text = line.decode(errors="replace")
    op_code, study_id = _OP_CODE.search(text), _STUDY_ID.search(text)
    name = _STUDY_NAME.search(text)
    return _Remains(
        op_code=int(op_code[1]) if op_code else None,
        study_id=int(study_id[1]) if study_id else None,
        study_name=name[1][1:-1] if name else "",
        keys=frozenset(key for key in _KEYS if f'"{key}":' in text or f'"{key}": ' in text),
    )


def _stand_in(remains: _Remains, path: Path, number: int) -> Record:
    """Makes a record that replaces a damaged one: it does only what later records need.

    Raises:
      UsageError: it may have made a study or a trial, and its number is not readable.
    """
    keys = remains.keys
    if keys & _OF_A_CHANGE:
        return _NOTHING
    if keys & _OF_A_TRIAL or (remains.op_code == _CREATE_TRIAL and not keys):
        if remains.study_id is not None:
            return _empty_trial(remains.study_id)
    elif keys & _OF_A_STUDY or remains.op_code == _CREATE_STUDY:
        if remains.study_name:
            return _empty_study(remains.study_name)
    elif remains.op_code is not None:
        return _NOTHING
    raise _damaged(path, number)


def _empty_trial(study_id: int) -> Record:
    """Makes a record of a failed trial without content, which no search takes for its own."""
    now = datetime.now(UTC).isoformat()
    return {
        "op_code": _CREATE_TRIAL,
        "worker_id": "",
        "study_id": study_id,
        "datetime_start": now,
        "datetime_complete": now,
        "state": TrialState.FAIL.value,
    }


def _empty_study(name: str) -> Record:
    return {
        "op_code": _CREATE_STUDY,
        "worker_id": "",
        "study_name": name,
        "directions": [StudyDirection.MINIMIZE.value],
    }


def _line(path: Path, number: int) -> str:
    return f"line {number + 1} of `{path.name}`"


def _damaged(path: Path, number: int) -> UsageError:
    return UsageError(
        f"{path} is damaged at line {number + 1}",
        hint="it is never overwritten: move it away to start over, or name another --storage",
    )
