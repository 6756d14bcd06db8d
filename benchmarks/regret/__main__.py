"""`python -m benchmarks.regret`: see `benchmarks.regret.command`."""

import typer

from benchmarks.regret.command import main

if __name__ == "__main__":
    typer.run(main)
