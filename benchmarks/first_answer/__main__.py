"""`python -m benchmarks.first_answer`: see `benchmarks.first_answer.command`."""

import typer

from benchmarks.first_answer.command import main

if __name__ == "__main__":
    typer.run(main)
