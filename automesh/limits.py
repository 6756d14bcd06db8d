"""What bounds automesh: sizes, depths, counts and times, in one table.

Whatever another process, another person or another machine may have written is read within these
bounds. Each constant says what it bounds, why it is as large as it is, and what a user sees beyond
it.
"""

from __future__ import annotations

# Patterns and what they are matched with

SELECTOR_CHARS = 256
"""Of the name of a target: the longest on record has 30. A longer one is refused."""

PATTERN_CHARS = 2000
"""Of a rule's `match`: room for some hundred names. A longer one is refused."""

MATCH_BITS = 18
"""Ways in which Python's engine may try to match a name, as a power of two: at most a tenth of a
second. A pattern with more goes to an engine that does not try, or is refused."""

LINE_CHARS = 20_000
"""Of a line that a command prints, what `--step-time regex:` looks at: progress bars and dumped
configs are shorter. What follows is passed over."""

MATCHING_S = 5.0
"""Of a processor, for the pattern of `--step-time regex:` on all lines that are new: milliseconds
as a rule. A pattern that takes longer ends the search."""

ANSWER_S = 60.0
"""For the process that matches, on a machine that is busy with other things. As above."""

# Locks of others

LOCK_S = 30.0
"""For a lock of a study's storage, which is held for milliseconds, or for a second where its tables
are made: only a process that is stopped keeps it for longer. Then the storage is said to be in
use."""

LOOK_S = 5.0
"""For the lock of a storage that is only looked at before a search. As above."""
