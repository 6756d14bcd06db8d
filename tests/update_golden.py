"""Writes every golden file anew: `python -m tests.update_golden`. Read the diff afterwards."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests import explain_golden, results_golden


def main() -> None:
    _write(results_golden.FOLDER, results_golden.CASES)
    _write(explain_golden.FOLDER, explain_golden.CASES)


def _write(folder: Path, cases: Mapping[str, Callable[[], str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):
        if path.stem not in cases:
            path.unlink()
    for name, draw in cases.items():
        (folder / f"{name}.txt").write_text(draw(), encoding="utf-8")
    print(f"{len(cases)} files written to {folder}")


if __name__ == "__main__":
    main()
