"""`python -m benchmarks.presets`: see `benchmarks.presets.command`."""

import typer

from benchmarks.presets.command import main

if __name__ == "__main__":
    typer.run(main)
