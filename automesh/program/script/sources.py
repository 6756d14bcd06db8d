"""The files of the user's own code and of what it reads, by what is in them (no jax)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from automesh.package import INSTALLED, PACKAGE

_HASHED_BYTES = 256 * 2**20

Sources = tuple[tuple[str, str], ...]
"""(path, hash of what is in it) of each file."""


def hash_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_of_content(path: Path) -> str:
    """Hash of what is in a file; of a very large one its size and time; empty if there is none."""
    try:
        status = path.stat()
        if status.st_size <= _HASHED_BYTES:
            return hash_of_file(path)
    except OSError:
        return ""
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()


def hash_of_sources(sources: Sources) -> str:
    """One hash for all of them: of their names and what is in them, not of where they are."""
    digest = hashlib.sha256()
    for path, inside in sources:
        digest.update(Path(path).name.encode() + b"\0" + bytes.fromhex(inside))
    return digest.hexdigest()[:32]


def edited_files(sources: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The paths of the files that are no longer what they were, or are gone."""
    return tuple(path for path, inside in sources if hash_of_content(Path(path)) != inside)


def is_users(path: Path, roots: Collection[Path]) -> bool:
    """Whether a file is the user's own: under none of Python's and automesh's folders.

    Args:
      path: resolved.
      roots: folders of the user's. A virtual environment in one of them is no part of it; one that
        lies in Python's own folder is.
    """
    if path.is_relative_to(PACKAGE) or any(part in INSTALLED for part in path.parts):
        return False
    inside = [root for root in roots if path.is_relative_to(root)]
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return not any(
        path.is_relative_to(prefix) and not any(root.is_relative_to(prefix) for root in inside)
        for prefix in prefixes
    )
