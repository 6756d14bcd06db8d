"""Searches lines for a pattern, in a process that the kernel ends if it takes too long.

It is run as a script and imports only the standard library. The first line of its input is
`[pattern, seconds]`. Each further line is a list of lines, and it answers with a list: null for a
line without a match, else `[named groups, text of the one group without a name]`. It may use so
many seconds of processor time for one list; then SIGPROF ends it, even in the middle of a match.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any


def found(pattern: re.Pattern[str], line: str) -> tuple[dict[str, str | None], str | None] | None:
    """Searches a line for a pattern; returns its named groups, and the text of the one without a
    name."""
    match = pattern.search(line)
    if match is None:
        return None
    named = pattern.groupindex.values()
    unnamed = [at for at in range(1, pattern.groups + 1) if at not in named]
    return match.groupdict(), match[unnamed[0]] if unnamed else None


def main() -> None:
    """Answers one list of lines after another until its input ends, which also happens when the
    parent process ends."""
    text, seconds = json.loads(sys.stdin.readline())
    pattern = re.compile(text)
    for order in sys.stdin:
        lines: list[str] = json.loads(order)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answers: list[Any] = [found(pattern, line) for line in lines]
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
