"""Compiler options that a compiler does not take, as errors for the user."""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from automesh.errors import UsageError, did_you_mean
from automesh.outcomes import Failed

# What `automesh.program.lower.compiled` says of a compile option.
_UNKNOWN = re.compile(r"this compiler has no option `([^`]+)`")
_WRONG = re.compile(r"the compiler option `([^`]+)` is wrong: ")
# Compilers do not list their options, but the names stand in their binaries.
_BINARIES = {
    "libtpu": "libtpu.so",
    "jaxlib": "libjax_common.so",
    "jax_plugins.xla_cuda12": "xla_cuda_plugin.so",
    "jax_plugins.xla_cuda13": "xla_cuda_plugin.so",
}
_NAME = re.compile(rb"xla_[a-z0-9_]{3,100}")


def refuse_options(result: object) -> None:
    """Lets other failures pass, and ends the search if the compiler refuses an option.

    What became of this plan would become of all with that option.

    Raises:
      UsageError: the compiler does not know the option, or not such a value.
    """
    if not isinstance(result, Failed) or result.stage != "compile":
        return
    hint = "correct it on the command line (--xla) or in the search space ([compiler_options])"
    if match := _UNKNOWN.search(result.reason):
        meant = did_you_mean(match[1], known_names())
        raise UsageError(f"the compiler has no option `{match[1]}`{meant}", hint=hint)
    if _WRONG.search(result.reason):
        raise UsageError(result.reason, hint=hint)


@cache
def known_names() -> frozenset[str]:
    """What may be the names of options, from the compilers that are installed here."""
    found: set[bytes] = set()
    for path in _installed():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found.update(match[0] for match in _NAME.finditer(data))
    return frozenset(name.decode("ascii") for name in found)


def _installed() -> Iterator[Path]:
    for module, binary in _BINARIES.items():
        parent = module.partition(".")[0]
        if importlib.util.find_spec(parent) is None:
            continue
        # Without importing anything: packages are folders, and a plugin's lies in its parent's.
        spec = importlib.util.find_spec(parent)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder, *module.split(".")[1:], binary)
            if path.is_file():
                yield path
