"""Searches lines for a pattern, in a process that the kernel ends if it takes too long.

Run as a script, with nothing imported but the standard library. The first line that it reads is
`[pattern, seconds]`; each further one a list of lines, to which it answers with a list: null for a
line in which nothing is found, else `[named groups, text of the one group without a name]`. For
one list it has that many seconds of a processor: then SIGPROF ends it, in the middle of a match.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any


def found(pattern: re.Pattern[str], line: str) -> tuple[dict[str, str | None], str | None] | None:
    """What a pattern finds in a line: its named groups, and the one without a name."""
    match = pattern.search(line)
    if match is None:
        return None
    named = pattern.groupindex.values()
    unnamed = [at for at in range(1, pattern.groups + 1) if at not in named]
    return match.groupdict(), match[unnamed[0]] if unnamed else None


def main() -> None:
    """Answers until its input ends, which the end of the process that asks is as well."""
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
