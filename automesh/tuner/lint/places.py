"""The files of findings' lines; programs name files only by their last part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Folders without code of the user, and the largest number of files that are examined.
_SKIPPED = frozenset(("node_modules", "site-packages", "__pycache__", "results"))
_MOST_FILES = 20_000


def files_by_name(script: Path | None, names: frozenset[str]) -> Mapping[str, str]:
    """Finds the file of each name, relative to the current folder if it is inside; leaves out names
    of no file or of several.

    Args:
      script: the script whose folder is searched; None finds nothing.
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
