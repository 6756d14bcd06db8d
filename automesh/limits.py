"""What bounds automesh: sizes, depths, counts and times, in one table.

Whatever another process, another person or another machine may have written is read within these bounds. Each constant
says what it bounds, why it is as large as it is, and what a user sees beyond it.
"""

from __future__ import annotations

ABANDONED_DRAFT_S = 3600.0
"""Age of a draft (a file that is written, but not in its place yet) from which on it counts as left
behind by a process that was killed: writing takes seconds. The next process that writes into its
folder removes it."""

EDIT_SETTLES_S = 0.1
"""How long a rules file that was replaced is watched for an editor that still writes into it, which
takes an editor milliseconds. An edit that comes later is one to the new file."""

EDITED_MEANWHILE = 20
"""How often a rule is merged anew because somebody else wrote the rules file in between. People
save a few times a minute; beyond this it is a program that does not end, and the user is told."""

EXECUTABLES_BYTES = 4 * 2**30
"""What the executables of all studies of an account may take. Those of one study are some MiB on a
CPU and some GiB on an accelerator. Beyond it, those of the study that was searched least recently
are removed; a search that needs them compiles again."""

EXECUTABLES_IN_USE_S = 24 * 3600.0
"""Executables of a study whose search began less than this ago stay: it may still be running."""
