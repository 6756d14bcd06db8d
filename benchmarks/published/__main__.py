"""`python -m benchmarks.published`: see `benchmarks.published.command`."""

import typer

from benchmarks.published.command import main

if __name__ == "__main__":
    typer.run(main)
