"""Imports the parts of a framework that an adapter uses; a sentence says what is missing.

Only workers use it, because a framework imports jax.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from automesh.errors import UsageError
from automesh.plugins.framework import Framework

# Modules that a package of another name contains.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "haliax": "marin-haliax",  # The package `haliax` is an older version, which Levanter refuses.
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def import_used(framework: Framework, used: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Imports the modules that an adapter uses, and returns them by name.

    Args:
      framework: the framework that the modules belong to.
      used: module -> names in it that the adapter uses. These may include modules of other
        packages, such as those of the framework's own step.

    Raises:
      UsageError: the framework is not completely installed, or is another version that lacks one of
        the names.
    """
    found: dict[str, Any] = {}
    own = f"{framework.package}."
    for name, names in used.items():
        try:
            found[name] = module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            raise _incomplete(framework, f"module `{missing}`", missing) from None
        # With another jax this may be any error, such as a failed `assert` or a missing name.
        except Exception as error:  # noqa: BLE001
            what = f"`{name}` that can be imported ({first_lines(error)})"
            raise _incomplete(framework, what, own) from None
        for one in names:
            if not hasattr(module, one):
                raise _incomplete(framework, f"`{one}` in `{name}`", own)
    return found


def _incomplete(framework: Framework, what: str, missing: str) -> UsageError:
    """Makes the error for a framework, or a package that it imports, that lacks something which the
    adapter needs."""
    if missing == framework.package:
        return UsageError(
            f"{framework.title} is not installed in the environment that automesh runs in",
            hint=framework.install,
        )
    if missing.startswith(f"{framework.package}."):
        return UsageError(
            f"the installed {framework.title} has no {what}",
            hint=f"this adapter was tried with {framework.seen_in}: install that version",
        )
    top = missing.partition(".")[0]
    return UsageError(
        f"{framework.title} needs the {what}, which is not installed",
        hint=f"`pip install {_DISTRIBUTIONS.get(top, top)}`",
    )


@contextlib.contextmanager
def kept_environment() -> Generator[None]:
    """Restores what a framework sets in the environment while it is imported or called.

    Otherwise a rule would record these settings as its own, and the next plan would be built with
    them.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def first_lines(error: BaseException) -> str:
    """Returns an exception's message on one line; only the first fault of a long list."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__
