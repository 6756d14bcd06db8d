"""Which study a search belongs to: the same inputs resume the same one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from automesh.program.nouns import Entry


def workload_name(entry: Entry) -> str:
    """A short name for people: the script's stem, the module's last part, or the function's."""
    name = {
        "script": Path(entry.location).stem,
        "module": entry.location.rpartition(".")[2],
        "pickle": entry.function,
    }[entry.kind]
    if entry.kind != "pickle" and entry.function != "build":
        name = f"{name}-{entry.function}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


def study_name(
    entry: Entry, *, selector: str, axes: Sequence[str], scope: Path, figures: str = ""
) -> str:
    """`<workload>-<target>-<hash>`; hashed are script path, function, arguments, target, axes.

    Args:
      scope: directory that stands for the location of a callable, which has no path.
      figures: of a target of the user's own, see `Target`.
    """
    location = str(scope) if entry.kind == "pickle" else entry.location
    identity = [entry.kind, location, entry.function, list(entry.argv), selector, list(axes)]
    identity += [figures] if figures else []
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    return f"{workload_name(entry)}-{selector}-{digest}"
