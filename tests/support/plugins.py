"""Which plug-ins of this repository are installed: the core is tested with and without them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

WITHOUT: Mapping[str, str] = {
    name: f"needs the plug-in: pip install -e plugins/{name}"
    for name in ("service", "frameworks", "pipeline")
}
"""Plug-in -> why a test of it is skipped."""


def is_installed(plugin: str) -> bool:
    """Whether a plug-in is installed here.

    Args:
      plugin: its folder in `plugins`.
    """
    return importlib.util.find_spec(f"automesh_{plugin}") is not None
