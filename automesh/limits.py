"""What bounds automesh: sizes, depths, counts and times, in one table.

Whatever another process, another person or another machine may have written is read within these
bounds. Each constant says what it bounds, why it is as large as it is, and what a user sees beyond
it.
"""

from __future__ import annotations

MOST_PASSWORD_BYTES = 4096
"""Of a file that holds a password: far more than servers take. A larger file is not one, and is
refused."""

MOST_COMMAND_CHARS = 8192
"""Of a command that is shown as the way to go on with a search: a study that others write may hold
any text. A longer one is not shown."""

MESSAGE_CHARS = 2_000
"""Characters of an error's message. The longest that automesh writes itself, a list of all chips,
has a few hundred; what it quotes may have millions. Beyond it the middle is left out."""

HINT_LINE_CHARS = 2_000
"""Characters of one line of an error's hint, which may quote what a script printed."""

USER_FILE_BYTES = 16 * 2**20
"""Bytes of a file that people write: rules, search spaces, clusters, profiles. The largest have a
few hundred KiB. A larger file is refused, before it is read to its end."""

FILE_DEPTH = 64
"""How deep lists and tables of such a file may be nested; what is read has at most six levels. A
deeper one is refused: what walks through it would run out of Python's stack."""

SCRIPT_BYTES = 16 * 2**20
"""Bytes of a script. The largest that people write have some hundred KiB; a larger one is data, and
is refused before a worker reads it."""

TARGET_CHARS = 200
"""Characters of a target's name. Names of slices and machines have 40; a longer one is refused, and
no number in it is read."""

LONGEST_S = 366 * 86_400.0
"""Seconds of a budget or a time limit: a year. What a system can wait for has an end, too."""

MOST_BYTES = 2**60
"""Bytes of a size that is given as a limit: an exbibyte, a million times what a machine has."""

LARGEST_INTEGER = 2**63 - 1
"""Whole numbers of a search space: what 64 bits hold, as in JSON's readers, databases and compiler
options. A larger one is refused."""
