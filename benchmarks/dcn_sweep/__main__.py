"""`python -m benchmarks.dcn_sweep`: see `benchmarks.dcn_sweep.command`."""

import sys

from benchmarks.dcn_sweep.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
