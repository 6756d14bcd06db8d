"""`python -m benchmarks.experts`: see `benchmarks.experts.command`."""

import typer

from benchmarks.experts.command import main

if __name__ == "__main__":
    typer.run(main)
