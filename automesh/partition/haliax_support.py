"""Restores functions of jax that Haliax needs and newer releases of jax have removed (jax).

Haliax 1.4.dev453, the newest in November 2026, calls `jax.core.is_constant_dim` in every product
(haliax/jax_utils.py). In jax 0.12 the function is private, so that no product of named arrays can
be computed. This module makes it available under its old name.
"""

from __future__ import annotations

import importlib
import warnings

import jax.core

_NAME = "is_constant_dim"


def restore_removed_names() -> None:
    """Restores the names of jax that Haliax calls; does nothing where jax still has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of deprecated names.
        if hasattr(jax.core, _NAME):
            return
    inside = importlib.import_module("jax._src.core")
    # Without it, Haliax raises an error that names the function.
    if (function := getattr(inside, _NAME, None)) is not None:
        setattr(jax.core, _NAME, function)
