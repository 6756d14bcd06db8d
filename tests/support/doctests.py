"""Runs the examples in automesh's docstrings: `python -m tests.support.doctests [all]`.

With `all`, those too that start worker processes.
"""

from __future__ import annotations

import doctest
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

from tests.support.paths import ROOT
from tests.support.plugins import WITHOUT, is_installed

PACKAGES = [
    ROOT / "automesh",
    *(ROOT / "plugins" / name / f"automesh_{name}" for name in WITHOUT if is_installed(name)),
]
# Examples that need a plug-in.
NEEDS = {"automesh.api.export": "frameworks", "automesh.api.import_rules": "frameworks"}
# Examples that start worker processes, which takes seconds.
_LONG = ("api.calibrate", "api.search", "api.show", "api.explain")
LONG = frozenset(f"automesh.{name}" for name in _LONG)


def modules() -> Iterator[ModuleType]:
    """The modules with examples, of automesh and the installed plug-ins (imports jax)."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8"):
                parts = path.relative_to(package.parent).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield importlib.import_module(name)


def main() -> int:
    """Prints what fails and how many examples there were; 1 if one failed."""
    wants_all = sys.argv[1:] == ["all"]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        for test in finder.find(module):
            is_here = test.name not in NEEDS or is_installed(NEEDS[test.name])
            if is_here and (wants_all or test.name not in LONG):
                runner.run(test)
    print(f"{runner.tries} examples, {runner.failures} failed")
    return 1 if runner.failures or not runner.tries else 0


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "2"}
    warnings.simplefilter("error")
    # As for the tests, in pyproject.toml.
    warnings.filterwarnings("ignore", "", DeprecationWarning, "haliax")
    sys.exit(main())
