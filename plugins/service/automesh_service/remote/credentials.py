"""The token that a command or a script sends to a service. It is never an argument, which others
could read.

A service that listens on this machine alone writes a token to a private file of its account, so
that the commands of this account need no copy of it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from automesh.errors import UsageError
from automesh.files import write_whole
from automesh.limits import MOST_PASSWORD_BYTES, SMALL_RECORD_BYTES
from automesh.reading import Unreadable, open_regular, parse_json, read_text
from automesh_service.submissions.process import TOKEN, TOKEN_FILE

_HINT = f"set {TOKEN}, or let {TOKEN_FILE} name a file of mode 0600 with the token"


def token_for(port: int, *, is_local: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the token for a service.

    Args:
      port: the port in the service's address.
      is_local: whether the address is one of this machine.

    Raises:
      UsageError: there is no token, or others may read its file.
    """
    if token := environ.get(TOKEN, "").strip():
        return token
    if name := environ.get(TOKEN_FILE, ""):
        return _token_in(Path(name))
    word = _word_of(port) if is_local else ""
    if not word:
        raise UsageError("there is no token for the service", hint=_HINT)
    return word


def _token_in(path: Path) -> str:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"others may read the token in `{path}`", hint=f"run `chmod 600 {path}`"
                )
            return file.read(MOST_PASSWORD_BYTES).decode(errors="replace").strip()
    except (OSError, Unreadable) as error:
        raise UsageError(f"the token cannot be read: {error}", hint=_HINT) from None


# Services on this machine.


def _word(port: int) -> Path:
    return platformdirs.user_state_path("automesh") / "services" / f"{port}.json"


def leave_word(port: int, token: str) -> None:
    """Writes the token of this service to a file, where commands of this account find it.

    Raises:
      UsageError: the folder cannot be written, or others may enter it.
    """
    path = _word(port)
    mine = psutil.Process()
    word = {"token": token, "pid": mine.pid, "created_s": mine.create_time()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.parent.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UsageError(f"others than you may enter `{path.parent}`", hint="`chmod 700` it")
        write_whole(path, json.dumps(word))
        path.chmod(0o600)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be written: {error.strerror}") from None


def forget_server(port: int) -> None:
    """Removes the file that `leave_word` has written."""
    with suppress(OSError):
        _word(port).unlink()


def _word_of(port: int) -> str:
    """Reads the token that a service on this machine has left. Returns an empty text if that
    service has ended: another program may listen at its port since then."""
    with suppress(UsageError, KeyError, TypeError, ValueError, psutil.Error):
        found: dict[str, Any] = parse_json(read_text(_word(port), limit_bytes=SMALL_RECORD_BYTES))
        created_s = psutil.Process(int(found["pid"])).create_time()
        if abs(created_s - float(found["created_s"])) < 1.0:
            return str(found["token"])
    return ""
