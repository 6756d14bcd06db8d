"""`python -m benchmarks.attached`: see `benchmarks.attached.command`."""

import typer

from benchmarks.attached.command import main

if __name__ == "__main__":
    typer.run(main)
