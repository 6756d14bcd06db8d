"""`python -m benchmarks.race_errors`: see `benchmarks.race_errors.command`."""

import typer

from benchmarks.race_errors.command import main

if __name__ == "__main__":
    typer.run(main)
