"""The files that lines of findings are in: programs name them by their last part alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Folders that hold no code of the user's, and how many files are looked at.
_SKIPPED = frozenset(("node_modules", "site-packages", "__pycache__", "results"))
_MOST_FILES = 20_000


def files_by_name(script: Path | None, names: frozenset[str]) -> Mapping[str, str]:
    """Of each name the file as the user would open it, relative to the current folder if it is
    below that; names of no file, or of several, are left out.

    Args:
      script: whose folder is searched; None: nothing is known.
    """
    if script is None:
        return {}
    if set(names) == {script.name}:
        return {script.name: _shown(script)}
    found: dict[str, list[Path]] = {}
    seen = 0
    for folder, folders, files in os.walk(script.parent):
        folders[:] = [one for one in folders if one not in _SKIPPED and not one.startswith(".")]
        seen += len(files)
        if seen > _MOST_FILES:
            break
        for name in names.intersection(files):
            found.setdefault(name, []).append(Path(folder) / name)
    known = {name: _shown(paths[0]) for name, paths in found.items() if len(paths) == 1}
    return known | ({script.name: _shown(script)} if script.name in names else {})


def _shown(path: Path) -> str:
    here = Path.cwd()
    whole = path.resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
