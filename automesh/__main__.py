"""The command `automesh`, and `python -m automesh`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; Ctrl-C ends it with a sentence even while its modules are imported."""
    try:
        from automesh.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; nothing was begun\n")
        sys.exit(_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
