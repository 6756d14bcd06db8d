"""Writes every golden file anew: `python -m tests.update_golden`. Read the diff afterwards."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests import explain_golden, replay_golden, results_golden, targets_golden, test_readme


def main() -> None:
    _write(results_golden.FOLDER, results_golden.CASES)
    _write(explain_golden.FOLDER, explain_golden.CASES)
    _write(targets_golden.FOLDER, targets_golden.CASES)
    _write(replay_golden.FOLDER, replay_golden.CASES)
    _update_readme()


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


if __name__ == "__main__":
    main()
