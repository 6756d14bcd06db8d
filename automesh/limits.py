"""The limits of automesh: sizes, depths, counts and times, in one table.

Whatever another process, another person or another machine may have written is read within these
bounds. Each constant says what it bounds, why it is as large as it is, and what a user sees beyond
it.
"""

from __future__ import annotations

MOST_PASSWORD_BYTES = 4096
"""Limit of a file that holds a password: far more than servers accept. A larger file is refused."""

MOST_COMMAND_CHARS = 8192
"""Limit of the command that automesh shows for continuing a search. Others may write a study, so it
may hold any text; a longer command is not shown."""

MESSAGE_CHARS = 2_000
"""Characters of an error's message. The longest that automesh writes itself, a list of all chips,
has a few hundred; a quoted text may have millions. The middle of a longer message is left out."""

HINT_LINE_CHARS = 2_000
"""Characters of one line of an error's hint, which may quote what a script printed."""

TARGET_CHARS = 200
"""Characters of a target's name, and of the name that a rule is selected for. Names of slices and
machines have 40; a longer one is refused, and no number in it is read."""

LONGEST_S = 366 * 86_400.0
"""Seconds of a budget or a time limit: a year. What a system can wait for has an end, too."""

MOST_BYTES = 2**60
"""Largest size, in bytes, that can be given as a limit: an exbibyte, a million times what a machine
has."""

# Reading what others may have written. A file beyond its bound is refused or skipped, with a
# sentence that names both.

PEOPLE_FILE_BYTES = 4 * 2**20
"""Rules, search spaces, clusters, calibrations: what people write and merge. Ten thousand rules
take 4 MiB, which a TOML parser in Python reads in seconds; a larger file is something else."""

NESTING = 64
"""Depth of nested tables and lists in a file that people write. Our own files nest five deep.
Parsers, and all code that walks through the values, recurse once per level, and Python's stack ends
near a thousand."""

LARGEST_INTEGER = 2**63 - 1
"""Largest absolute value of a whole number in a file that people write and in a search space: what
a signed 64-bit integer holds, as in TOML, JSON readers, databases and compiler options. Python
would read a number of a million digits, and then refuse to print it. A larger one is refused."""

YAML_VALUES = 200_000
"""Values in the YAML file of a framework, each as often as its aliases name it: the largest of
their configurations has some thousands. A file with more is refused."""

YAML_NUMBER_CHARS = 100
"""Characters of a number in a YAML file; one of 64 bits has 66, in binary. A longer one is refused
before it is read."""

SCRIPT_BYTES = 16 * 2**20
"""Bytes of a script. The largest that people write have some hundred KiB; a larger one is data, and
is refused before a worker reads it."""

TERMS_BYTES = 2**28
"""Size of one propagation in a study's folder `terms`: the largest seen has 9 MB. A larger file is
ignored, and the propagation is made again."""

FOREIGN_DATABASE_BYTES = 2**29
"""A study's database that somebody else may have written, which is copied before it is read: one of
5,000 plans has some megabytes. A larger one is refused."""

FOREIGN_SQL_S = 60.0
"""Seconds for all statements that read a database which somebody else may have written:
milliseconds as a rule, and one second for a database of that size. After it, reading ends with an
error."""

FOREIGN_VALUE_BYTES = 64 * 2**20
"""Size of one value in a database that somebody else may have written; the same as
`JOURNAL_LINE_BYTES`."""

FOREIGN_SQL_BYTES = 2**20
"""Size of one statement, and so of one table's definition, in a database that somebody else may
have written: ours have under 500 bytes."""

FOREIGN_TABLES = 100
"""Tables and indexes of a database that somebody else may have written: a study has 30. A database
with more belongs to another program."""

JOURNAL_BYTES = 2**31
"""A journal as a whole: one of 5,000 plans has some tens of megabytes. A larger one is refused."""

JOURNAL_RECORDS = 1_000_000
"""Records of a journal: a search writes about ten for each plan, and each record that makes a trial
takes some kilobytes of memory. A longer journal is refused."""

JOURNAL_S = 120.0
"""Seconds for reading a journal from its beginning: a million small records take 20 s. A journal
that takes longer is refused."""

HOLDS_BYTES = 16 * 2**20
"""Size of the file next to a journal that says which process runs which trial: 300 bytes a process,
so fifty thousand of them."""

JOURNAL_LINE_BYTES = 64 * 2**20
"""Size of one record of a journal. Our largest, a note of all first visits, has some megabytes; a
line without an end must not fill the memory."""

STORED_HEADER_BYTES = 2**20
"""Size of the header of a compiled program in the store: under 10 kB for a pipeline of many
stages."""

MODULE_BYTES = 2**31
"""Size of a compiled program, unpacked; protobuf allows no larger message. Without this limit, a
packed file of a few kilobytes could fill the memory."""

GROUP_DEVICES = 2**18
"""Devices in the groups of one collective of a compiled program: four times the largest mesh on
record. Groups are written as a formula of a few bytes, and unfolded into a list."""

ESTIMATES_BYTES = 2**28
"""Size of a study's table `estimates.csv`: 200 bytes a plan, so a million plans. A larger one is
left out."""

PROGRAM_TEXT_BYTES = 2**30
"""Size of the text of a traced program in a temporary folder: the largest seen has 60 MB."""

PAYLOAD_BYTES = 2**32
"""Size of a pickled `build` with everything that it captures, which may include arrays of a few
gigabytes."""

SMALL_RECORD_BYTES = 2**16
"""Size of the file in which a guardian or a search records one run: under 200 bytes."""

CHUNK_BYTES = 2**20
"""Bytes that are read at once from a file that a command writes, so that gigabytes of it are never
in memory together."""

REPORT_LINE_BYTES = 2**20
"""Size of one line of a command's output or of its JSON lines; a longer line is skipped."""

NAMED_DAMAGES = 5
"""Damaged records that a result names one by one; it only counts the others."""

# Writing files, and keeping what was compiled.

ABANDONED_DRAFT_S = 3600.0
"""Age at which a draft (a file that is being written, before it gets its final name) counts as left
behind by a killed process: writing takes seconds. The next process that writes into the folder
removes it."""

EDIT_SETTLES_S = 0.1
"""How long automesh watches a rules file that it has replaced, in case an editor still writes into
the old one, which takes milliseconds. A later edit goes into the new file."""

EDITED_MEANWHILE = 20
"""How often a rule is merged again because somebody else has written the rules file in between.
People save a few times a minute; more often means that a program keeps writing, and the user gets
an error."""

EXECUTABLES_BYTES = 4 * 2**30
"""Size of the executables of all studies of an account together. Those of one study are some MiB on
a CPU and some GiB on an accelerator. Beyond it, those of the study that was searched least recently
are removed; a search that needs them compiles again."""

EXECUTABLES_IN_USE_S = 24 * 3600.0
"""Age of a search up to which its executables are kept in any case: it may still be running."""

# Patterns, and the texts that they are matched with.

PATTERN_CHARS = 2000
"""Length of a rule's `match`: room for some hundred names. A longer one is refused."""

MATCH_BITS = 21
"""Most ways in which Python's engine may try to match a name, as a power of two: three repeats in a
name of 200 characters, which takes at most some tenths of a second. A pattern with more ways goes
to an engine without backtracking, or is refused."""

LINE_CHARS = 20_000
"""Characters of a printed line that `--step-time regex:` reads: progress bars and dumped configs
are shorter. The rest of a longer line is ignored."""

MATCHING_LINES = 1000
"""Most lines that are matched at once: all new ones, unless a command prints without a pause."""

MATCHING_S = 5.0
"""Processor time for matching the pattern of `--step-time regex:` with so many lines: milliseconds
as a rule. A pattern that takes longer ends the search."""

ANSWER_S = 60.0
"""Time limit of the matching process, on a machine that is busy with other work. A pattern that
takes longer ends the search."""

# Locks that another process may hold.

LOCK_S = 30.0
"""How long to wait for the lock of a study's storage or a profile. It is held for milliseconds, or
for a second while tables are made; only a stopped process holds it longer. After this time, an
error says that the file is in use."""

RULES_LOCK_S = 60.0
"""How long to wait for the lock of a rules file. Many searches may end at once, and each holds the
lock while it watches for an editor, and while the disk writes. After this time, an error says that
the file is in use."""

LOOK_S = 5.0
"""How long to wait for the lock of a storage that is only read before a search. After this time, an
error says that it is in use."""

# The service: data that comes over the network, from anybody who can reach it.

BUNDLE_BYTES = 64 * 2**20
"""Size of a bundle as it is sent: the folder of a script, without data. A larger one is refused
with status 413."""

BUNDLES_OF_ONE_BYTES = 4 * 2**30
"""Size of all bundles of one user together: sixty of the largest. More are refused with status
429."""

BUNDLE_UNUSED_S = 7 * 86_400.0
"""Age at which a bundle that no submission uses is removed. It can be sent again."""

BUNDLE_UNPACKED_BYTES = 256 * 2**20
"""Size of the files of a bundle once unpacked: a packed bundle of a few kilobytes could otherwise
fill the disk. A larger one is refused with status 422, and so is a bundle beyond one of the next
four limits."""

BUNDLE_MEMBERS = 5_000
"""Files and folders in a bundle."""

BUNDLE_PATH_CHARS = 400
"""Length of the path of a file in a bundle; the file system must accept it below one of our
folders."""

BUNDLE_DEPTH = 32
"""Depth of nested folders in a bundle."""

BUNDLE_HEADER_BYTES = 2**20
"""Bytes that are read at once while a bundle is checked: names of files are headers, and a header
that claims to have gigabytes must not be read into memory."""

REQUEST_BYTES = 2**20
"""Size of the body of any other request: an order has some kilobytes. A larger one is refused with
status 413."""

ORDER_CHARS = 2_000
"""Length of each word of an order: a script, an argument, a target. A longer one is refused with
status 422."""

ORDER_WORDS = 200
"""Number of a script's arguments, or of targets, in an order: 20 times as many targets as anyone
has."""

ORDER_TOP = 1_000
"""Most finalists that an order may ask for: more than are ever measured."""

NAME_CHARS = 400
"""Length of a name in the path of a request: the name of a study has 60 characters, and of a file
255 bytes."""

HEADER_CHARS = 4_000
"""Limit of one request header that a route reads. A request with a longer one is refused with
status 422."""

BODY_S = 10.0
"""How long a part of a body may take to arrive; all of it must arrive at `BODY_LEAST_BYTES_PER_S`.
A slower client keeps a connection open for nothing, and gets status 408."""

BODY_LEAST_BYTES_PER_S = 4 * 2**10
"""Slowest rate at which a body may arrive after `BODY_S`: the speed of a modem."""

HEAD_S = 10.0
"""How long the handshake and the head of a request may take to arrive. After this time the
connection is closed, with status 408 if a part of a head has come."""

ANSWER_STALL_S = 60.0
"""How long a client may read nothing while an answer waits to be sent. After this time the
connection is closed."""

CONNECTIONS = 2_000
"""Connections that are open at once, a quarter of them from one address; fewer where the system
lets a process open fewer files. For a new connection beyond this limit, another one is closed:
first one that never showed a token."""

SEARCH_BYTES = 2**30
"""Memory of this machine that each running search of a service needs: the search, and a worker with
jax. More searches than there are cores, or than the memory has room for, are refused at the
start."""

REQUESTS_PER_S = 60.0
"""Rate of requests with one token: a person clicks, and a program that watches a search asks once a
second. Faster requests are refused with status 429, which says when to try again."""

REQUESTS_AT_ONCE = 120
"""Number of requests by which that rate may be exceeded for a moment."""

REFUSALS_PER_S = 2.0
"""Rate of requests without a valid token from one address, so that guessing a token is slow. Faster
requests are refused with status 429."""

REFUSALS_AT_ONCE = 40
"""Number of requests by which that rate may be exceeded for a moment."""

WATCHERS = 512
"""Event streams that are open at once; more are refused with status 429."""

WATCHERS_OF_ONE = 64
"""Event streams of one token that are open at once."""

IDEMPOTENCY_CHARS = 200
"""Length of an `Idempotency-Key`."""

PAGE_SIZE = 200
"""Rows of one answer; the next page has the rest."""

LOG_SLICE_BYTES = 2**18
"""Bytes of a log in one answer; the next answer continues where it ended."""

PENDING_SUBMISSIONS = 100
"""Submissions of one user that are queued or running: more are refused with status 429 until some
have ended."""

LONGEST_BUDGET_S = 7 * 86_400.0
"""Longest budget of a submitted search: devices are shared."""

LEASE_S = 45.0
"""How long an agent may be silent before it counts as lost and its submission is queued again. An
agent reports every five seconds."""

STATE_BYTES = 128 * 2**20
"""Size of the studies of a submission that an agent sends, before packing: a study of 5,000 plans
has some MiB, and logs of workers beyond this limit are left out. Packed, the limit is that of a
bundle."""

SEARCH_LOG_BYTES = 64 * 2**20
"""Bytes that a service keeps of the log of a search that an agent runs; the rest stays with the
agent."""

HOUSEKEEPING_S = 600.0
"""Seconds between two clean-ups, in which a service removes old files."""

REMOTE_ANSWER_BYTES = 64 * 2**20
"""Largest answer of a server that a command reads: the JSON of a study of 5,000 plans has some
MiB."""

# A service as its clients see it. Any program may listen at an address.

REMOTE_SMALL_BYTES = 2**20
"""Size of any other answer that a command reads: a submission has some kilobytes. A larger one is
refused, and so is an answer beyond one of the next limits."""

REMOTE_TABLE_BYTES = 4 * 2**20
"""Size of a table: 1,000 rows of 400 characters take a tenth of this."""

REMOTE_HEAD_BYTES = 2**18
"""Size of everything before the body of an answer: interim answers and headers."""

REMOTE_EVENT_BYTES = 4 * 2**20
"""Size of one event of a stream: a state with 200 studies has some hundred kilobytes."""

REMOTE_LINE_CHARS = 20_000
"""Length of a shown line of a search that runs elsewhere; the rest of a longer one is left out."""

REMOTE_CONNECT_S = 10.0
"""How long to wait for a connection. An address that drops packets never answers."""

REMOTE_WAIT_S = 60.0
"""How long to wait for an answer to begin; all of it must arrive at `REMOTE_LEAST_BYTES_PER_S`. A
busy service takes seconds."""

REMOTE_LEAST_BYTES_PER_S = 2**15
"""Slowest rate at which an answer may arrive after `REMOTE_WAIT_S`, and a request be received: the
largest bundle takes half an hour at this rate."""

REMOTE_NEWS_S = 1.5
"""Seconds after which a command says that it is waiting."""

REMOTE_FIRST_S = 20.0
"""How long a command retries an address that has never answered: it may be wrong."""

REMOTE_BACK_S = 300.0
"""How long a command retries an address that has answered before: the service may be restarting."""

STORED_STEP_BYTES = 4 * 2**30
"""Size of the stored arguments of a captured step. With larger ones, a script is run again in the
process that measures it, and a script without a mesh is not measured."""
