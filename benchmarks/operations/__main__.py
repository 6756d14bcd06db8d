import sys

from benchmarks.operations.command import main

sys.exit(main())
