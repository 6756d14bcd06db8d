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
