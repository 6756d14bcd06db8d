"""Stands in for the package `examples` of jax's repository, whose scripts are run in its folder.

The root of a checkout in the import path would put its `jax` before the installed one.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path.cwd())]
