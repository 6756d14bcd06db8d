"""The place of a study: the `--storage` argument, read and checked without opening anything."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from automesh.errors import UsageError
from automesh.texts.storage_url import MASK, StorageUrl, masked, masked_url, read_url, with_password
from automesh.texts.user_text import check_text, user_path

_SERVERS = ("postgresql", "postgres", "mysql", "mariadb")
_JOURNAL_SUFFIXES = (".journal", ".log")
_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9]*)(\+[A-Za-z0-9]+)?:")
_HINT = (
    "use `postgresql+psycopg://user@host/database`, `mysql+pymysql://user@host/database`, "
    "`sqlite:///file.db`, or a journal file such as `/shared/study.journal`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A place for studies.

    Attributes:
      kind: a SQLite file, a database server, or a journal file.
      location: absolute path of the file, or the server's URL with `***` for what is secret.
      server: how the server is reached; None for a file.
    """

    kind: Literal["sqlite", "server", "journal"]
    location: str
    server: StorageUrl | None = None

    @property
    def text(self) -> str:
        """Returns the location for messages and tables."""
        return self.location

    def masked(self, text: str) -> str:
        """Returns a text of others, such as an error of the server's, without secrets."""
        return masked(text, self.server.values if self.server is not None else ())


def parse_storage(text: str, folder: Path, environ: Mapping[str, str] = os.environ) -> Storage:
    """Reads `--storage`; empty means `study.db` in `folder`.

    `journal:FILE`, `*.journal` or `*.log` is a journal; `sqlite:///FILE`, `*.db`, `*.sqlite` or
    `*.sqlite3` is SQLite. A journal is for a file system that several hosts share, where SQLite's
    write-ahead log does not work.

    Args:
      environ: has the password of a server whose URL has none, see `automesh.texts.storage_url`.

    Raises:
      UsageError: neither a database URL of a known kind nor a file with a known ending; or the file
        with the password cannot be read.
    """
    text = check_text(text.strip())
    if not text:
        return Storage(kind="sqlite", location=str((folder / "study.db").absolute()))
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    if match is not None and scheme in _SERVERS:
        server = with_password(read_url(_server_url(text, match)), environ)
        return Storage(kind="server", location=server.shown, server=server)
    if scheme in ("sqlite", "journal"):
        path = _file_of(text)
        if not path.name or path.name == ":memory:":
            raise UsageError(f"storage `{masked_url(text)}` names no file", hint=_HINT)
        kind = "sqlite" if scheme == "sqlite" else "journal"
        return Storage(kind=kind, location=str(path.absolute()))
    suffix = Path(text).suffix
    if not scheme and suffix in _JOURNAL_SUFFIXES:
        return Storage(kind="journal", location=str(user_path(text).absolute()))
    if not scheme and suffix in _SQLITE_SUFFIXES:
        return Storage(kind="sqlite", location=str(user_path(text).absolute()))
    raise UsageError(
        f"`{masked_url(masked(text))}` is not a storage that a study can be kept in", hint=_HINT
    )


def _server_url(text: str, match: re.Match[str]) -> str:
    rest = text[match.end() :]
    if not rest.startswith("//") or not rest.strip("/"):
        # Without the // nobody can tell what is what in it.
        shown = f"{match[0]}{MASK}" if "@" in rest else text
        raise UsageError(f"storage `{shown}` names no server", hint=_HINT)
    if match[1].lower() in ("postgresql", "postgres") and match[2] is None:
        return f"postgresql+psycopg:{rest}"  # the driver that the `postgres` extra installs
    return text


def _file_of(text: str) -> Path:
    """Returns the path in `kind:///relative`, `kind:////absolute` (as SQLAlchemy has it) or
    `kind:path`."""
    scheme, _, rest = text.partition(":")
    if rest.startswith("//"):
        if scheme.startswith("sqlite") and not rest.startswith("///"):
            # `sqlite+driver://:password@/file`: a file has no host, no user and no password.
            return Path()
        rest = rest[3:] if scheme.startswith("sqlite") else rest[2:]
    return user_path(rest.partition("?")[0])
