"""The tables of a study in SQLite, and nothing else: compared before a statement reads any of them.

A schema is code. CHECKs are evaluated by `PRAGMA quick_check`, generated columns and expressions of
indexes whenever a row is read or looked for, views in the place of tables by each query, and any of
them may take for ever. So the texts of a schema are taken apart here, without SQLite, by a grammar
that knows only what Optuna, its upgrades and the leases write: named columns of simple types, NOT
NULL, literal defaults, keys and indexes over columns. What the grammar does not know is refused.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping

from automesh import limits
from automesh.errors import UsageError
from automesh.foreign.own import SchemaRow, schema_of

_ATTRIBUTES = {"key", "value_json"}
TABLES: Mapping[str, frozenset[str]] = {
    name: frozenset(columns)
    for name, columns in {
        # `direction`, `value` and `step` of `trial_values` were there before Optuna 2.4.
        "studies": {"study_id", "study_name", "direction"},
        "version_info": {"version_info_id", "schema_version", "library_version"},
        "study_directions": {"study_direction_id", "direction", "study_id", "objective"},
        "study_user_attributes": {"study_user_attribute_id", "study_id", *_ATTRIBUTES},
        "study_system_attributes": {"study_system_attribute_id", "study_id", *_ATTRIBUTES},
        "trials": {
            *("trial_id", "number", "study_id", "state", "value"),
            *("datetime_start", "datetime_complete"),
        },
        "trial_user_attributes": {"trial_user_attribute_id", "trial_id", *_ATTRIBUTES},
        "trial_system_attributes": {"trial_system_attribute_id", "trial_id", *_ATTRIBUTES},
        "trial_params": {
            *("param_id", "trial_id", "param_name", "param_value", "distribution_json"),
        },
        "trial_values": {
            *("trial_value_id", "trial_id", "objective", "value", "value_type", "step"),
        },
        "trial_intermediate_values": {
            *("trial_intermediate_value_id", "trial_id", "step"),
            *("intermediate_value", "intermediate_value_type"),
        },
        "trial_heartbeats": {"trial_heartbeat_id", "trial_id", "heartbeat"},
        "alembic_version": {"version_num"},
        "automesh_holds": {"hold_key", "owner", "renewed_s", "version"},
    }.items()
}
"""Columns by table: of Optuna's, of its upgrades' own, and of the leases."""
FIRST_TABLES = ("studies", "version_info")
"""The tables that Optuna makes before its others: a database without them has no study."""

_TOKEN = re.compile(
    r"""[ \t\r\n]+ | "(?P<quoted>[A-Za-z_][A-Za-z0-9_]*)" | (?P<word>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""| (?P<other>[0-9]+ | '[A-Za-z0-9_]*' | [(),=])""",
    re.VERBOSE,
)
_TYPE = (
    r"(?:INTEGER|BIGINT|SMALLINT|FLOAT|DOUBLE(?: PRECISION)?|REAL|TEXT|VARCHAR|DATETIME|BOOLEAN)"
    r"(?: \( [0-9]+ \))?"
)
_LITERAL = r"(?:NULL|[0-9]+|'[A-Za-z0-9_]*')"
_COLUMN = re.compile(
    rf"(\w+) {_TYPE}(?: NOT NULL| NULL| DEFAULT {_LITERAL}| DEFAULT \( {_LITERAL} \))*"
    r"(?: PRIMARY KEY)?"
)
_LIST = r"\( \w+(?: , \w+)* \)"
_KEY = re.compile(
    rf"(?:CONSTRAINT \w+ )?(?:(?:PRIMARY KEY|UNIQUE) {_LIST}"
    rf"|FOREIGN KEY {_LIST} REFERENCES \w+ {_LIST}"
    # Optuna's own, and what SQLAlchemy once wrote for an enumeration.
    rf"|CHECK \( version_info_id = 1 \)|CHECK \( \w+ IN \( {_LITERAL}(?: , {_LITERAL})* \) \))"
)
_TABLE = re.compile(r"CREATE TABLE (\w+) \( (.*) \)")
_INDEX = re.compile(rf"CREATE (?:UNIQUE )?INDEX (\w+) ON (\w+) ({_LIST})")
_NOT_OURS = "which automesh did not create"


class ForeignSchema(UsageError):
    """A database that has other tables than a study's; the message continues after its name."""


def check_schema(connection: sqlite3.Connection) -> bool:
    """Compares a database's schema with a study's, before any other statement looks at it.

    Returns:
      Whether there are tables at all.

    Raises:
      ForeignSchema: it has something that no study has; names it.
      sqlite3.Error: the file is damaged.
    """
    rows = schema_of(connection)
    if len(rows) > limits.FOREIGN_TABLES:
        raise ForeignSchema(
            f"has more than {limits.FOREIGN_TABLES} tables and indexes: it is a database of "
            "another program"
        )
    # Views and triggers first: they say most plainly what it is.
    rows.sort(key=lambda one: one.kind in ("table", "index"))
    tables = {one.name for one in rows if one.kind == "table"}
    if tables and tables.isdisjoint(FIRST_TABLES):
        raise ForeignSchema("is a database of another program")
    known = TABLES
    for one in rows:
        try:
            _check(one, known)
        except ForeignSchema:
            known = {**known, **_tables_of_installed()}
            _check(one, known)
    return bool(tables)


def _tables_of_installed() -> Mapping[str, frozenset[str]]:
    """Returns the columns of the tables that the installed Optuna adds to former ones."""
    # Here and not above: a service looks at the schemas of others without Optuna.
    from optuna.storages._rdb import models

    return {
        table.name: TABLES.get(table.name, frozenset()) | {column.name for column in table.columns}
        for table in models.BaseModel.metadata.tables.values()
    }


def _check(made: SchemaRow, known: Mapping[str, frozenset[str]]) -> None:
    """Checks that a row of the database's schema belongs to a study. Raises ForeignSchema if it
    does not."""
    kind = str(made.kind)
    if kind == "index" and made.sql is None and made.table in known:
        return  # Of a key; SQLite makes it from the table.
    text = _normal(made.sql)
    if kind == "table" and made.name in known and (match := _TABLE.fullmatch(text)):
        if match[1] == made.name == made.table:
            _check_columns(made.name, match[2], known[made.name])
            return
    elif kind == "index" and made.table in known and (match := _INDEX.fullmatch(text)):
        columns = set(match[3].strip("() ").split(" , "))
        is_named = match[1] == made.name and match[2] == made.table
        if is_named and columns <= known[made.table]:
            return
    kind = kind if kind in ("table", "index", "view", "trigger") else "entry"
    raise ForeignSchema(f"has the {kind} `{made.name}`, {_NOT_OURS}")


def _check_columns(table: str, body: str, known: frozenset[str]) -> None:
    for one in _parts(body):
        match = _COLUMN.fullmatch(one)
        if match is not None and match[1] in known:
            continue
        if match is None and _KEY.fullmatch(one):
            continue
        shown = one if len(one) <= 60 else f"{one[:60]}..."
        raise ForeignSchema(f"has `{shown}` in the table `{table}`, {_NOT_OURS}")


def _parts(body: str) -> Iterator[str]:
    """Splits a list at its outermost commas."""
    depth, words = 0, list[str]()
    for word in body.split(" "):
        depth += (word == "(") - (word == ")")
        if word == "," and depth == 0:
            yield " ".join(words)
            words.clear()
        else:
            words.append(word)
    yield " ".join(words)


def _normal(sql: object) -> str:
    """Returns a statement with single spaces and names without quotes.

    It is empty for one that has anything else than words, whole numbers, plain texts and brackets.
    """
    if not isinstance(sql, str):
        return ""
    words, position = list[str](), 0
    while position < len(sql):
        match = _TOKEN.match(sql, position)
        if match is None:
            return ""
        position = match.end()
        word = match["quoted"] or match["word"] or match["other"]
        words += [word] if word else []
    return " ".join(words)
