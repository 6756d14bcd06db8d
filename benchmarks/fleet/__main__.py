"""`python -m benchmarks.fleet`: see `benchmarks.fleet.command`."""

import sys

from benchmarks.fleet.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
