"""How good are the shardings that nobody wrote? See `command`."""

from benchmarks.infer.command import main

main()
