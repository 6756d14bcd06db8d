"""What an adapter uses of a framework, looked up in one place, with a sentence for what is missing.

Workers only: importing a framework imports jax.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from automesh.errors import UsageError
from automesh.frameworks.registry import Framework


def import_used(framework: Framework, used: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The modules that an adapter uses, by name.

    Args:
      framework: whose modules they are.
      used: module -> names that the adapter uses of it. Modules of other packages may be among
        them, such as those that the framework's own step comes from.

    Raises:
      UsageError: the framework is not installed whole, or another version that has moved something.
    """
    found: dict[str, Any] = {}
    own = f"{framework.package}."
    for name, names in used.items():
        try:
            found[name] = module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            raise _incomplete(framework, f"module `{missing}`", missing) from None
        except ImportError as error:
            raise _incomplete(framework, f"`{name}` that can be imported ({error})", own) from None
        for one in names:
            if not hasattr(module, one):
                raise _incomplete(framework, f"`{one}` in `{name}`", own)
    return found


def _incomplete(framework: Framework, what: str, missing: str) -> UsageError:
    """The framework, or something that it imports, is not as the adapter needs it."""
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
    return UsageError(
        f"{framework.title} needs the {what}, which is not installed",
        hint=f"`pip install {missing.partition('.')[0]}`",
    )
