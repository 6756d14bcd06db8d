"""Writes every golden file anew: `python -m tests.update_golden`. Read the diff afterwards."""

from tests import results_golden
from tests.results_golden import FOLDER


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        if path.stem not in results_golden.CASES:
            path.unlink()
    for name, draw in results_golden.CASES.items():
        (FOLDER / f"{name}.txt").write_text(draw(), encoding="utf-8")
    print(f"{len(results_golden.CASES)} files written to {FOLDER}")


if __name__ == "__main__":
    main()
