"""`--baseline maxtext:FILE`: the mesh of another framework's configuration, as a mesh in text."""

from __future__ import annotations

from pathlib import Path

from automesh.errors import UsageError
from automesh.plugins.offered import EXPORTS, offered
from automesh.reading import read_text
from automesh.report.export.frameworks import granules_of, import_rules, names
from automesh.report.export.translate import mesh_text
from automesh.texts.user_text import user_path


def read_baseline(text: str, *, target: str = "") -> str:
    """Returns a baseline as it is, or the mesh of the file if it is `FRAMEWORK:FILE`.

    Only the mesh is read: the framework's settings for remat and the batch are no knobs of the
    script.

    Args:
      target: its devices, from which open sizes are inferred if their number is known.

    Raises:
      UsageError: the file cannot be read, or does not say one mesh.

    >>> read_baseline("fsdp:8 remat=full")
    'fsdp:8 remat=full'
    """
    name, colon, path = text.strip().partition(":")
    if not colon or _is_mesh(name, path.strip()) or name not in names():
        return text
    granules = granules_of(target) if target else None
    source: Path = user_path(path)
    rules = import_rules(read_text(source), name, granules=granules, source=source).rules
    if len(rules.rules) != 1:
        raise UsageError(
            f"`{source}` has {len(rules.rules)} rules, and a baseline is one mesh",
            hint="name one with `automesh import --target NAME --baseline`",
        )
    return mesh_text(rules.rules[0], rules.axes_of(rules.rules[0]))


def _is_mesh(name: str, rest: str) -> bool:
    """Whether a text is sizes of axes, as `fsdp:8 remat=full`, so that no plug-in is looked for."""
    size = rest.lstrip("-").split(",")[0]
    return size.isdigit() or (name not in offered(EXPORTS) and size.partition(" ")[0].isdigit())
