"""`python -m benchmarks.truth`: see `benchmarks.truth.command`."""

import sys

from benchmarks.truth.command import main

if __name__ == "__main__":
    sys.exit(main())
