"""Writes golden files anew: all of them, in five minutes, or the parts that are named. Read the
diff afterwards.

python -m tests.regenerate.update_golden [results] [explain] [targets] [replay] [readme]
    [deviations] [wrong_calls] [api]
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

# As in conftest.py: before anything imports jax.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "16"}

from tests.conformance import deviations
from tests.e2e import test_readme
from tests.regenerate import api_reference
from tests.support.cases import (
    explain_golden,
    replay_golden,
    results_golden,
    targets_golden,
    wrong_calls,
)


def _write(folder: Path, cases: Mapping[str, Callable[[], str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):
        if path.stem not in cases:
            path.unlink()
    for name, draw in cases.items():
        (folder / f"{name}.txt").write_text(draw(), encoding="utf-8")
    print(f"{len(cases)} files written to {folder}")


def _update_readme() -> None:
    text = test_readme.README
    for name in test_readme.EXACT:
        text = text.replace(test_readme.block(name), test_readme.exact_output(name))
    (test_readme.ROOT / "README.md").write_text(text, encoding="utf-8")


PARTS: Mapping[str, Callable[[], None]] = {
    "results": lambda: _write(results_golden.FOLDER, results_golden.CASES),
    "explain": lambda: _write(explain_golden.FOLDER, explain_golden.CASES),
    "targets": lambda: _write(targets_golden.FOLDER, targets_golden.CASES),
    "replay": lambda: _write(replay_golden.FOLDER, replay_golden.CASES),
    "readme": _update_readme,
    "deviations": deviations.write,
    "wrong_calls": wrong_calls.write,
    "api": api_reference.write,
}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
