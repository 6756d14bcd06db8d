"""Finds and hides the secrets of a storage URL, and reads passwords from other places.

A text passes through here before it is shown, stored, logged, raised or put into JSON:

`masked`      any text: the secrets of the URLs in it become `***`
`typeable`    the words of a command: the URL of `--storage` loses its secrets, so that the command
              can be typed again with the password from somewhere else; other words are masked
`read_url`    the URL of a storage, its secrets apart: only what connects to the server sees them

A secret need not be in the URL: see `PASSWORD`, `PASSWORD_FILE`, and libpq's own PGPASSWORD,
PGPASSFILE and ~/.pgpass.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from automesh.errors import UsageError
from automesh.limits import MOST_PASSWORD_BYTES
from automesh.reading import Unreadable, open_regular
from automesh.texts.user_text import user_path

MASK = "***"
PASSWORD = "AUTOMESH_STORAGE_PASSWORD"
"""The environment variable that holds the password of any server."""
PASSWORD_FILE = "AUTOMESH_STORAGE_PASSWORD_FILE"
"""The environment variable that names a file, whose first line is the password of any server."""
OWN_VARIABLES = (PASSWORD, PASSWORD_FILE)
"""Variables that only automesh reads; they are removed for users' code in workers and commands."""

_HINT = "write `postgresql+psycopg://user@host:5432/database`, and the password into " + PASSWORD
_ESCAPES = "in users and passwords write `@` as `%40`, `?` as `%3F`, `/` as `%2F` and `%` as `%25`"
_SCHEME = r"[A-Za-z][\w+.-]{0,40}://"
_USER = re.compile(r"(?P<user>[^:/]*):(?P<password>[^@]*)@")
_SERVER = re.compile(r"postgres|mysql|mariadb")
_LEFT_OF_PASSWORD = re.compile(r"[:/].*@|%40", re.IGNORECASE)
_PORT_AND_QUERY = re.compile(r"\d{1,5}(?:/[^?@]*)?\?")
# Of any driver: `password`, `passwd`, `sslpassword`, `ssl_key_password`, `scram_client_key`, ...;
# but `passfile` names a file.
_SECRET_KEY = re.compile(
    r"pass(?!file|ive)|pwd|secret|token(?!s|iz)|credential|api_?key|scram_\w+_key", re.IGNORECASE
)
# libpq's form, in its errors and in what people write: `host=db password=secret`.
_SETTING = re.compile(
    r"""(?<!\w)((?:ssl_?)?(?:password|passwd|passphrase))\s*=\s*"""
    r"""('(?:[^'\\]|\\.)*'|"[^"]*"|[^\s&'"`]+)""",
    re.IGNORECASE,
)
# A URL in a text, with what its password may be made of: in quotes whatever is between them,
# without quotes all up to the next space; if there is no `@` up to there, and no port, all up to
# the last `@` nearby in the line.
_IN_TEXT = re.compile(
    rf"""(?P<quote>['"`])(?P<before>[\w.-]{{1,99}}=)?"""
    rf"""(?P<quoted>{_SCHEME}(?:(?!(?P=quote))[^\n])*)(?P=quote)"""
    rf"|(?P<at>{_SCHEME}\S{{0,1000}}@[^\s'\"`]*)"
    rf"|(?P<spaced>{_SCHEME}[^\s/:@]*:(?!\d+(?:[/?\s]|$))[^\n]{{1,200}}@[^\s'\"`]*)"
    rf"|(?P<plain>{_SCHEME}[^\s'\"`]*)",
)
_SHORT = 4  # A shorter password is part of many words: it is only masked as a separate word.


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUrl:
    """The URL of a database server, separate from its secrets.

    Attributes:
      shown: for people: the given URL, each secret replaced by `***`.
      bare: the given URL without its
      secrets: for SQLAlchemy, and for commands that people type. secrets: further arguments of the
        driver: name and value.
      hidden: other secret values, which the driver finds by itself.
    """

    shown: str
    bare: str
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)

    @property
    def values(self) -> tuple[str, ...]:
        """Returns all secret values, for `masked`."""
        return (*(value for _, value in self.secrets), *self.hidden)


def read_url(text: str) -> StorageUrl:
    """Reads the URL of a database server as SQLAlchemy does.

    A password may contain `/`, spaces, `%40` for `@`, and an `@` itself if it cannot be mistaken
    for the one before the host.

    Raises:
      UsageError: no URL, or one whose password is ambiguous. The message contains no secret.
    """
    import sqlalchemy as sa
    import sqlalchemy.exc as sa_errors

    parts = _split(text)
    if parts is None:
        raise UsageError(
            f"it is not clear where the password ends in the storage URL `{masked_url(text)}`",
            hint=f"{_ESCAPES}; or leave the password out, and set {PASSWORD}",
        )
    if MASK in (parts.password, *(value for _, value in parts.secret_pairs)):
        raise UsageError(
            f"`{MASK}` in the storage URL `{parts.masked}` stands for a password that is not shown",
            hint=f"leave it out, and set {PASSWORD} or, for PostgreSQL, PGPASSFILE",
        )
    try:
        url = sa.make_url(parts.whole)
        sa.make_url(parts.bare)
    except (sa_errors.ArgumentError, ValueError):
        # Without the original error, whose text quotes pieces of the URL.
        raise UsageError(f"`{parts.masked}` is not a database URL", hint=_HINT) from None
    secrets = {"password": str(url.password)} if url.password else {}
    for key, values in url.query.items():
        if is_secret(key):
            secrets[key] = values if isinstance(values, str) else values[-1]
    return StorageUrl(shown=parts.masked, bare=parts.bare, secrets=tuple(secrets.items()))


def with_password(url: StorageUrl, environ: Mapping[str, str]) -> StorageUrl:
    """Adds the password of the environment to a URL, unless the URL has one.

    The first of these counts: the URL's own, AUTOMESH_STORAGE_PASSWORD,
    AUTOMESH_STORAGE_PASSWORD_FILE, and for PostgreSQL PGPASSWORD. libpq itself reads PGPASSFILE and
    ~/.pgpass.

    Raises:
      UsageError: the file of AUTOMESH_STORAGE_PASSWORD_FILE cannot be read, holds no password, or
        others may read it.
    """
    if any(key.lower() in ("password", "passwd") for key, _ in url.secrets):
        return url
    # libpq finds it in any case; it must not be in libpq's error messages.
    postgres = environ.get("PGPASSWORD", "") if url.bare.startswith("postgres") else ""
    url = replace(url, hidden=(postgres,) if postgres else ())
    password = environ.get(PASSWORD, "")
    if not password and environ.get(PASSWORD_FILE):
        password = _password_in(environ[PASSWORD_FILE])
    password = password or postgres
    return replace(url, secrets=(*url.secrets, ("password", password))) if password else url


def _password_in(name: str) -> str:
    """Reads the first line of a file that only its owner may read."""
    hint = f"{PASSWORD_FILE} names a file with the password in its first line; `chmod 600` it"
    try:
        path = user_path(name)
    except UsageError as error:
        raise UsageError(f"{PASSWORD_FILE}: {error.message}", hint=hint) from None
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            data = file.read(MOST_PASSWORD_BYTES + 1)
    except Unreadable as error:
        raise UsageError(f"the password file {error.message}", hint=hint) from None
    # As libpq requires for keys: a group may read a file of root, as containers mount them.
    open_to = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
    if found.st_mode & open_to:
        raise UsageError(f"the password file `{path}` may be read by others", hint=hint)
    if len(data) > MOST_PASSWORD_BYTES:
        raise UsageError(
            f"the password file `{path}` has more than {MOST_PASSWORD_BYTES} bytes", hint=hint
        )
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"the password file `{path}` is not UTF-8 text", hint=hint) from None
    if not lines or not lines[0]:
        raise UsageError(f"the password file `{path}` has an empty first line", hint=hint)
    return lines[0]


def is_secret(key: str) -> bool:
    """Whether the value of an argument of a database driver is secret, by its name.

    >>> is_secret("sslpassword"), is_secret("passwd"), is_secret("passfile"), is_secret("sslmode")
    (True, True, False, False)
    """
    return _SECRET_KEY.search(unquote_plus(key)) is not None


# Texts.


def masked(text: str, secrets: Sequence[str] = ()) -> str:
    """Replaces each secret of the URLs in a text by `***`.

    Args:
      secrets: further values to replace, wherever and however they are quoted.

    >>> masked("postgresql://me:a b/c@host/db?sslpassword=x and host=h password=y")
    'postgresql://me:***@host/db?sslpassword=*** and host=h password=***'
    """
    text = _without_values(text, secrets)
    if "://" in text:
        text = _IN_TEXT.sub(_masked_match, text)
    return _SETTING.sub(rf"\1={MASK}", text) if "=" in text else text


def _masked_match(match: re.Match[str]) -> str:
    if match["quoted"] is not None:
        mark = match["quote"]
        return f"{mark}{match['before'] or ''}{masked_url(match['quoted'])}{mark}"
    return masked_url(match[0])


def masked_url(url: str) -> str:
    """Masks a text that is exactly one URL, whatever its password contains."""
    scheme, mark, _ = url.partition("://")
    if not mark:
        return url
    parts = _split(url)
    if parts is None:
        return f"{scheme}://{MASK}"
    return parts.masked if parts.password or parts.secret_pairs else url


def has_secret(word: str) -> bool:
    """Whether a word of a command has a URL with a secret in it."""
    return masked_word(word) != word


def masked_word(word: str) -> str:
    """Masks a word of a command: `URL`, `--option=URL`, or anything else."""
    match = re.match(rf"([\w.-]*=)?({_SCHEME}.*)", word, re.DOTALL)
    return f"{match[1] or ''}{masked_url(match[2])}" if match else masked(word)


def typeable(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words of a command of automesh so that they can be shown and typed again.

    >>> typeable(["search", "a.py", "--storage", "postgresql://me:secret@host/db"])
    ('search', 'a.py', '--storage', 'postgresql://me@host/db')
    """
    shown: list[str] = []
    is_ours, before = True, ""
    for word in words:
        is_ours = is_ours and word != "--"
        option, mark, value = word.partition("=")
        if is_ours and before == "--storage":
            shown.append(bare_url(word))
        elif is_ours and option == "--storage" and mark:
            shown.append(f"{option}={bare_url(value)}")
        else:
            shown.append(masked_word(word))
        before = word
    return tuple(shown)


def bare_url(url: str) -> str:
    """Removes the secrets of a storage, for a command that is typed again; keeps a file name."""
    if "://" not in url:
        return masked(url)
    parts = _split(url)
    return masked_url(url) if parts is None else parts.bare


def secrets_among(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Finds the secret values of a command line, and of the environment if it names a server.

    They are for `masked`: a password may be a common word that other texts contain, too.
    """
    names_server = any("://" in word for word in words)
    found = [environ.get(name, "") for name in (PASSWORD, "PGPASSWORD")] if names_server else []
    for word in words:
        _, mark, rest = word.partition("://")
        parts = _split(f"url{mark}{rest}") if mark else None
        if parts is not None:
            found += [unquote(parts.password or ""), parts.password or ""]
            found += [unquote_plus(value) for _, value in parts.secret_pairs]
    return tuple(value for value in dict.fromkeys(found) if value and value != MASK)


def _without_values(text: str, secrets: Sequence[str]) -> str:
    forms = {form for value in secrets if value for form in _spellings(value)}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= _SHORT:
            text = text.replace(form, MASK)
        else:
            text = re.sub(rf"(?<![^\W_]){re.escape(form)}(?![^\W_])", MASK, text)
    return text


def _spellings(value: str) -> Iterator[str]:
    """Lists the spellings of a value in texts: plain, in a URL, in Python, in JSON, in a shell."""
    yield value
    yield from (quote(value, safe=""), quote(value), quote(value, safe=" +"), quote_plus(value))
    yield from (repr(value)[1:-1], json.dumps(value)[1:-1], value.replace("'", "'\"'\"'"))
    yield " ".join(value.split()) or value


# A URL and its parts.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a URL, as written, so that secrets are separate.

    Attributes:
      user: empty if there is none.
      password: None if there is none.
      place: host, port and database.
      query: None if there is no `?`.
    """

    scheme: str
    user: str
    password: str | None = field(repr=False)
    place: str
    query: str | None = field(repr=False)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        pairs = self.query.split("&") if self.query else ()
        return tuple((key, value) for key, _, value in (pair.partition("=") for pair in pairs))

    @property
    def secret_pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, value) for key, value in self.pairs if value and is_secret(key))

    @property
    def whole(self) -> str:
        """Returns the URL in the form that SQLAlchemy understands."""
        password = None if self.password is None else self.password.replace("@", "%40")
        return self._joined(password, self._escaped(self.query))

    @property
    def masked(self) -> str:
        password = MASK if self.password else self.password
        secret = self.secret_pairs
        pairs = [(key, MASK if (key, value) in secret else value) for key, value in self.pairs]
        return self._joined(password, _query(pairs) if secret else self.query)

    @property
    def bare(self) -> str:
        secret, query = self.secret_pairs, self.query
        if secret:
            query = _query([one for one in self.pairs if one not in secret]) or None
        return self._joined(None, self._escaped(query))

    @staticmethod
    def _escaped(query: str | None) -> str | None:
        # After a port, SQLAlchemy would mistake the `@` for the end of a password.
        return query and query.replace("@", "%40")

    def _joined(self, password: str | None, query: str | None) -> str:
        user = self.user if password is None else f"{self.user}:{password}"
        place = f"{user}@{self.place}" if user else self.place
        return f"{self.scheme}://{place}" if query is None else f"{self.scheme}://{place}?{query}"


def _query(pairs: Sequence[tuple[str, str]]) -> str:
    return "&".join(f"{key}={value}" for key, value in pairs)


def _split(url: str) -> _Parts | None:
    """Splits a URL; None if it is ambiguous.

    As in SQLAlchemy, the password ends at the first `@`; but if the host would then contain an `@`,
    it ends at the last one before the `/`.
    """
    scheme, _, rest = url.partition("://")
    user, password, place = "", None, rest
    match = None if rest.startswith("/") else _USER.match(rest)
    if match is not None and _PORT_AND_QUERY.match(match["password"]):
        # `host:5432/database?password=p@ss`: SQLAlchemy would take all up to the `@` for a user and
        # a password. If nothing in the query is secret, it may even be right.
        place, _, query = rest.partition("?")
        parts = _Parts(scheme=scheme, user="", password=None, place=place, query=query)
        return parts if parts.secret_pairs else None
    if match is not None:
        user, password, place = match["user"], match["password"], rest[match.end() :]
        host = re.match(r"[^/?]*", place)
        more, at, _ = (host[0] if host else "").rpartition("@")
        if at:
            password, place = f"{password}@{more}", place[len(more) + 1 :]
    elif not rest.startswith("/") and re.match(r"[^:/@?]*@", rest):
        user, _, place = rest.partition("@")
    place, mark, query = place.partition("?")
    if password is not None and any(("?" in password, "@" in place, "@" in query)):
        return None
    # Hosts and databases have no such characters: they are the rest of a mistyped password.
    if _SERVER.match(scheme) and (
        _LEFT_OF_PASSWORD.search(place) or "%3a" in user.lower() or _SETTING.search(place)
    ):
        return None
    return _Parts(
        scheme=scheme, user=user, password=password, place=place, query=query if mark else None
    )
