"""`python -m benchmarks.kill_fleet`: see `benchmarks.kill_fleet.command`."""

import typer

from benchmarks.kill_fleet.command import main

if __name__ == "__main__":
    typer.run(main)
