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

TARGET_CHARS = 200
"""Characters of a target's name, and of the name that a rule is selected for. Names of slices and
machines have 40; a longer one is refused, and no number in it is read."""

LONGEST_S = 366 * 86_400.0
"""Seconds of a budget or a time limit: a year. What a system can wait for has an end, too."""

MOST_BYTES = 2**60
"""Bytes of a size that is given as a limit: an exbibyte, a million times what a machine has."""

# Reading what others may have written. A file beyond its bound is refused or skipped, with a
# sentence that names both.

PEOPLE_FILE_BYTES = 4 * 2**20
"""Rules, search spaces, clusters, calibrations: what people write and merge. Ten thousand rules
take 4 MiB, and a parser of TOML in Python takes seconds for that; larger is some other file."""

NESTING = 64
"""Tables and lists within each other in such a file. Ours nest five deep; parsers and all that
walks through the values recur once per level, and Python's stack ends near a thousand."""

LARGEST_INTEGER = 2**63 - 1
"""Whole numbers in such a file and in a search space, in size: what 64 bits hold with a sign, as in
TOML's own rules, JSON's readers, databases and compiler options. Python would take one of a million
digits, and then not print it. A larger one is refused."""

SCRIPT_BYTES = 16 * 2**20
"""Bytes of a script. The largest that people write have some hundred KiB; a larger one is data, and
is refused before a worker reads it."""

TERMS_BYTES = 2**28
"""One propagation in a study's folder `terms`: the largest seen has 9 MB. A larger file is left
out, and made again."""

FOREIGN_DATABASE_BYTES = 2**29
"""A study's database that somebody else may have written, which is copied before it is read: one of
5,000 plans has some megabytes. A larger one is refused."""

FOREIGN_SQL_S = 60.0
"""All statements with which such a database is read: milliseconds as a rule, and a second for one
of that size. Then reading it ends with a sentence."""

FOREIGN_VALUE_BYTES = 64 * 2**20
"""One value in such a database: as of `JOURNAL_LINE_BYTES`."""

FOREIGN_SQL_BYTES = 2**20
"""One statement, so also one table's definition in such a database: ours have under 500 bytes."""

FOREIGN_TABLES = 100
"""Tables and indexes of such a database: a study has 30. With more it is another program's."""

JOURNAL_BYTES = 2**31
"""A journal as a whole: one of 5,000 plans has some tens of megabytes. A larger one is refused."""

JOURNAL_RECORDS = 1_000_000
"""Records of a journal: a search writes some ten for each plan, and each that makes a trial takes
some kilobytes of memory. As above."""

JOURNAL_S = 120.0
"""For a journal to be read from its beginning: a million small records take 20 s. As above."""

HOLDS_BYTES = 16 * 2**20
"""The file that says which process runs what, beside a journal: 300 bytes a process, so fifty
thousand of them."""

JOURNAL_LINE_BYTES = 64 * 2**20
"""One record of a journal. Our largest, a note of all first visits, has some megabytes; a line
without an end must not fill the memory."""

STORED_HEADER_BYTES = 2**20
"""What stands before a compiled program in the store: under 10 kB for a pipeline of many stages."""

MODULE_BYTES = 2**31
"""A compiled program, unpacked: protobuf itself has no larger message. A packed file of a few
kilobytes could otherwise unpack to more than the memory."""

GROUP_DEVICES = 2**18
"""Devices in the groups of one collective of a compiled program: four times the largest mesh on
record. Groups are written as a formula of a few bytes, and unfolded into a list."""

ESTIMATES_BYTES = 2**28
"""The table `estimates.csv` of a study: 200 bytes a plan, so a million plans. A larger one is left
out."""

PROGRAM_TEXT_BYTES = 2**30
"""The text of a traced program in a temporary folder: the largest seen has 60 MB."""

PAYLOAD_BYTES = 2**32
"""A pickled `build` with all that it captures: arrays of a few gigabytes may be among it."""

SMALL_RECORD_BYTES = 2**16
"""What a guardian or a search notes of one run in a file of its own: under 200 bytes."""

CHUNK_BYTES = 2**20
"""What is read at once of a file that a command writes to, so that gigabytes of it are never in
memory together."""

REPORT_LINE_BYTES = 2**20
"""One line of a command's output or of its JSON lines; of a longer one nothing is read."""

NAMED_DAMAGES = 5
"""Damaged records that are named one by one in a result; of the others only the number is told."""

# Writing files, and keeping what was compiled.

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

# Patterns, and what they are matched with.

PATTERN_CHARS = 2000
"""Of a rule's `match`: room for some hundred names. A longer one is refused."""

MATCH_BITS = 21
"""Ways in which Python's engine may try to match a name, as a power of two: three repeats in a name
of 200 characters, which is at most some tenths of a second. A pattern with more goes to an engine
that does not try, or is refused."""

LINE_CHARS = 20_000
"""Of a line that a command prints, what `--step-time regex:` looks at: progress bars and dumped
configs are shorter. What follows is passed over."""

MATCHING_LINES = 1000
"""That are matched at once: those that are new, if a command does not print without a pause."""

MATCHING_S = 5.0
"""Of a processor, for the pattern of `--step-time regex:` on so many lines: milliseconds as a rule.
A pattern that takes longer ends the search."""

ANSWER_S = 60.0
"""For the process that matches, on a machine that is busy with other things. As above."""

# Locks of others.

LOCK_S = 30.0
"""For the lock of a study's storage or a profile, which is held for milliseconds, or for a second
where tables are made: only a process that is stopped keeps it for longer. Then it is said to be in
use."""

RULES_LOCK_S = 60.0
"""For the lock of a rules file. Many searches may end at once, and each holds it while it watches
for somebody who edits, and while the disk writes. As above."""

LOOK_S = 5.0
"""For the lock of a storage that is only looked at before a search. As above."""

# The service: what comes over the network, from anybody who can reach it.

BUNDLE_BYTES = 64 * 2**20
"""A bundle as it is sent: the folder of a script, without data. Refused with status 413."""

BUNDLES_OF_ONE_BYTES = 4 * 2**30
"""All bundles of one user together: sixty of the largest. More are refused with status 429."""

BUNDLE_UNUSED_S = 7 * 86_400.0
"""Age from which on a bundle is removed that no submission uses. It can be sent again."""

BUNDLE_UNPACKED_BYTES = 256 * 2**20
"""What the files of a bundle take once unpacked: a packed one of a few kilobytes could otherwise
fill the disk. Refused with status 422, and so is what is beyond the next four."""

BUNDLE_MEMBERS = 5_000
"""Files and folders in a bundle."""

BUNDLE_PATH_CHARS = 400
"""Of the path of a file in a bundle, which a file system must hold below a folder of ours."""

BUNDLE_DEPTH = 32
"""Folders within each other in a bundle."""

BUNDLE_HEADER_BYTES = 2**20
"""What is read at once while a bundle is looked at: names of files are headers, and a header that
claims to have gigabytes must not be read into memory."""

REQUEST_BYTES = 2**20
"""The body of any other request: an order has some kilobytes. Refused with status 413."""

ORDER_CHARS = 2_000
"""Of each word of an order: a script, an argument, a target. Refused with status 422."""

ORDER_WORDS = 200
"""Arguments of a script, and 20 times as many as anyone has targets."""

ORDER_TOP = 1_000
"""Finalists that an order may ask for: more than are ever measured."""

NAME_CHARS = 400
"""Of a name in the path of a request: a study's has 60, and a file's 255 bytes."""

HEADER_CHARS = 4_000
"""Of a header that a route reads. As above: beyond it the request is refused with status 422."""

BODY_S = 10.0
"""How long a part of a body may take to arrive, and all of it at `BODY_LEAST_BYTES_PER_S`: who
sends slower keeps a connection open for nothing. Ended with status 408."""

BODY_LEAST_BYTES_PER_S = 4 * 2**10
"""As slow as a body may arrive after `BODY_S`: modems were as fast."""

HEAD_S = 10.0
"""For the head of a request to arrive, and for the handshake before it; the connection is closed
after it, with status 408 if a part of a head has come."""

ANSWER_STALL_S = 60.0
"""Without a byte of an answer taken, while some wait to be: the connection is closed after it."""

CONNECTIONS = 2_000
"""Open at once, and fewer where the system lets a process open fewer files; a quarter of them from
one address. For who comes beyond it, another one is closed: first one that never showed a token."""

SEARCH_BYTES = 2**30
"""Of this machine's memory, for each search that a service runs at once: the search, and a worker
with jax. More searches than there are cores, or than the memory has room for, are refused at the
start."""

REQUESTS_PER_S = 60.0
"""Of one token: a person clicks, a program that watches a search asks once a second. What comes
faster is refused with status 429, which says when to come again."""

REQUESTS_AT_ONCE = 120
"""By which that rate may be exceeded for a moment."""

REFUSALS_PER_S = 2.0
"""Requests without a valid token from one address: who guesses is slowed down. As above."""

REFUSALS_AT_ONCE = 40
"""By which that rate may be exceeded for a moment."""

WATCHERS = 512
"""Streams of events that are open at once; more are refused with status 429."""

WATCHERS_OF_ONE = 64
"""Of one token, of these."""

IDEMPOTENCY_CHARS = 200
"""Of an `Idempotency-Key`."""

PAGE_SIZE = 200
"""Rows of one answer: more are on the next page."""

LOG_SLICE_BYTES = 2**18
"""Of a log, in one answer: the next one goes on where it ended."""

PENDING_SUBMISSIONS = 100
"""Of one user, queued or running: more are refused with status 429 until some have ended."""

LONGEST_BUDGET_S = 7 * 86_400.0
"""Of a search that is submitted: devices are shared."""

LEASE_S = 45.0
"""An agent of which nothing was heard for so long is lost, and its submission is queued again. It
says every five seconds that it is there."""

STATE_BYTES = 128 * 2**20
"""What an agent sends of the studies of a submission, before it is packed: a study of 5,000 plans
has some MiB, and logs of workers are left out beyond it. Packed it has the bound of a bundle."""

SEARCH_LOG_BYTES = 64 * 2**20
"""What a service keeps of the log of a search that an agent runs; the rest stays with the agent."""

HOUSEKEEPING_S = 600.0
"""Between two times at which a service removes what is old."""

REMOTE_ANSWER_BYTES = 64 * 2**20
"""What a server may answer a command of ours: the JSON of a study of 5,000 plans has some MiB."""

# A service as its clients see it: anybody may listen at an address.

REMOTE_SMALL_BYTES = 2**20
"""Of any other answer to a command of ours: a submission has some kilobytes. A larger one is
refused, and so is what is beyond the next ones."""

REMOTE_TABLE_BYTES = 4 * 2**20
"""Of a table: 1,000 rows of 400 characters have a tenth of it."""

REMOTE_HEAD_BYTES = 2**18
"""Of all that comes before the body of an answer: interim answers and headers."""

REMOTE_EVENT_BYTES = 4 * 2**20
"""Of one event of a stream: a state with 200 studies has some hundred kilobytes."""

REMOTE_LINE_CHARS = 20_000
"""Of a line of a search elsewhere that is shown here; the rest of a longer one is left out."""

REMOTE_CONNECT_S = 10.0
"""For a connection to be taken. Who drops what is sent there says nothing at all."""

REMOTE_WAIT_S = 60.0
"""For an answer to begin, and all of it to arrive at `REMOTE_LEAST_BYTES_PER_S`: a busy service
takes seconds."""

REMOTE_LEAST_BYTES_PER_S = 2**15
"""As slow as an answer may arrive after `REMOTE_WAIT_S`, and a request be taken: the largest bundle
takes half an hour then."""

REMOTE_NEWS_S = 1.5
"""After which a command says that it waits."""

REMOTE_FIRST_S = 20.0
"""For which a command tries again if nobody has ever answered it: the address may be wrong."""

REMOTE_BACK_S = 300.0
"""For which it tries again once somebody has: the service may be started again."""

STORED_STEP_BYTES = 4 * 2**30
"""Of the arguments of a captured step: with larger ones a script is run again where it is measured,
and one without a mesh is not measured."""
