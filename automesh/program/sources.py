"""The files of the user's own code, by what is in them (no jax)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

Sources = tuple[tuple[str, str], ...]
"""(path, hash of what is in it) of each file."""


def hash_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_of_sources(sources: Sources) -> str:
    """One hash for all of them: of their names and what is in them, not of where they are."""
    digest = hashlib.sha256()
    for path, inside in sources:
        digest.update(Path(path).name.encode() + b"\0" + bytes.fromhex(inside))
    return digest.hexdigest()[:32]


def edited_files(sources: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The paths of the files that are no longer what they were, or are gone."""
    return tuple(path for path, inside in sources if _hash_or_nothing(Path(path)) != inside)


def _hash_or_nothing(path: Path) -> str:
    try:
        return hash_of_file(path)
    except OSError:
        return ""
