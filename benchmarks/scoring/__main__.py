"""`python -m benchmarks.scoring`: see `benchmarks.scoring.command`."""

import typer

from benchmarks.scoring.command import main

if __name__ == "__main__":
    typer.run(main)
