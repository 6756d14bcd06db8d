"""`python -m benchmarks.recipes`: see `benchmarks.recipes.command`."""

import typer

from benchmarks.recipes.command import main

if __name__ == "__main__":
    typer.run(main)
