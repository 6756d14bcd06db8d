"""What is secret in a storage URL: found as SQLAlchemy finds it, and hidden in every text."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.limits import MOST_PASSWORD_BYTES
from automesh.texts.storage_url import (
    PASSWORD,
    PASSWORD_FILE,
    StorageUrl,
    bare_url,
    has_secret,
    is_secret,
    masked,
    masked_url,
    masked_word,
    read_url,
    secrets_among,
    typeable,
    with_password,
)

HOST = "postgresql+psycopg"
# What is written, what is shown, what is left of it for a command, and what is secret.
FORMS = {
    "simple": ("://me:secret@h/db", "://me:***@h/db", "://me@h/db", "secret"),
    "slash": ("://me:se/cret@h:1/db", "://me:***@h:1/db", "://me@h:1/db", "se/cret"),
    "space": ("://me:se cret@h/db", "://me:***@h/db", "://me@h/db", "se cret"),
    "at": ("://me:se@cret@h:1/db?a=b", "://me:***@h:1/db?a=b", "://me@h:1/db?a=b", "se@cret"),
    "escapes": ("://me:se%40c%2Fret@h", "://me:***@h", "://me@h", "se@c/ret"),
    "colon": ("://me:se:cret@h/db", "://me:***@h/db", "://me@h/db", "se:cret"),
    "nobody": ("://:secret@h/db", "://:***@h/db", "://h/db", "secret"),
    "user-at-tenant": ("://me@org:secret@h/db", "://me@org:***@h/db", "://me@org@h/db", "secret"),
    "ipv6": (
        "://me:secret@[::1]:5432/db",
        "://me:***@[::1]:5432/db",
        "://me@[::1]:5432/db",
        "secret",
    ),
    "query": ("://h:1/db?password=se%2Fcret", "://h:1/db?password=***", "://h:1/db", "se/cret"),
    "query-at": ("://h:1/db?password=se@cret", "://h:1/db?password=***", "://h:1/db", "se@cret"),
    "query-user": ("://me@h/db?password=secret", "://me@h/db?password=***", "://me@h/db", "secret"),
    "query-plus": ("://h/db?password=se+cret", "://h/db?password=***", "://h/db", "se cret"),
    "among": (
        "://h/db?sslmode=require&sslpassword=se/cret&sslkey=/k.pem",
        "://h/db?sslmode=require&sslpassword=***&sslkey=/k.pem",
        "://h/db?sslmode=require&sslkey=/k.pem",
        "se/cret",
    ),
    "socket": (
        "://me:secret@/db?host=/tmp",
        "://me:***@/db?host=/tmp",
        "://me@/db?host=/tmp",
        "secret",
    ),
}
OPEN = {
    "nothing": "://me@h:5432/db",
    "port": "://h:5432/db",
    "passfile": "://me@h/db?passfile=/home/me/pass",
    "certificate": "://me@h/db?sslmode=verify-full&sslcert=/c.pem&sslkey=/k.pem",
    "socket": ":///db?host=/tmp",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_secret_is_found_and_hidden(form: str) -> None:
    """The former version showed all but the simple ones."""
    written, shown, bare, secret = (HOST + FORMS[form][0], *FORMS[form][1:])
    url = read_url(written)
    assert (url.shown, url.bare) == (HOST + shown, HOST + bare)
    assert url.values == (secret,)
    assert secret not in repr(url)
    assert masked_url(written) == masked_word(written) == url.shown
    assert masked_word(f"--db={written}") == f"--db={url.shown}"
    for text in ("`{}` is wrong", "'{}'", "could not read {}", "a={} b", '{{"url": "{}"}}'):
        text = text.format(written)
        assert masked(text) == text.replace(written, url.shown)
    assert bare_url(written) == url.bare
    assert has_secret(written) and not has_secret(url.bare)
    assert masked(url.shown) == url.shown


@pytest.mark.parametrize("form", OPEN)
def test_what_is_no_secret_is_left_as_it_is(form: str) -> None:
    written = HOST + OPEN[form]
    url = read_url(written)
    assert (url.shown, url.bare, url.values) == (written, written, ())
    assert masked(f"{written} cannot be reached") == f"{written} cannot be reached"
    assert not has_secret(written)


@pytest.mark.parametrize(
    "text",
    [
        "results/x/study.db",
        "sqlite:///a@b:c@d.db",
        "journal:///home/me@work/a.journal",
        "http://localhost:8080/metrics is down, ask root@localhost",
        "gs://bucket/path?generation=3",
        "12:30 me@host: a/b",
        "std::vector<int>://",
    ],
)
def test_other_texts_are_left_as_they_are(text: str) -> None:
    assert masked(text) == text
    if " " not in text:
        assert bare_url(text) == text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        *((key, True) for key in ("password", "PASSWD", "sslpassword", "ssl_key_password", "pwd")),
        *((key, True) for key in ("scram_client_key", "oauth_client_secret", "passphrase")),
        *((key, True) for key in ("access_token", "p%61ssword", "pass", "db_passwd", "api_key")),
        *((key, False) for key in ("passfile", "sslkey", "sslmode", "user", "application_name")),
        *((key, False) for key in ("connect_timeout", "options", "channel_binding", "charset")),
    ],
)
def test_which_arguments_of_a_driver_are_secret(key: str, expected: bool) -> None:
    assert is_secret(key) is expected
    shown = masked_url(f"mysql+pymysql://me@h/db?{key}=value")
    assert ("value" not in shown) is expected


@pytest.mark.parametrize(
    "rest",
    ["://me:a/kestrel@b/falcon@h/db", "://me:kestrel?falcon@h/db", "://me:kestrel@h/falcon@db"],
)
def test_what_can_be_read_in_two_ways_is_refused_and_hidden(rest: str) -> None:
    with pytest.raises(UsageError, match="not clear where the password ends") as caught:
        read_url(HOST + rest)
    assert "write `@` as `%40`" in caught.value.hint
    assert "kestrel" not in str(caught.value) and "falcon" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("rest", ["://me:kestrel@h:falcon/db", "://me:kestrel@h:port/db"])
def test_what_sqlalchemy_cannot_read_is_told_without_its_words(rest: str) -> None:
    with pytest.raises(UsageError, match="is not a database URL") as caught:
        read_url(HOST + rest)
    assert "kestrel" not in str(caught.value)
    # SQLAlchemy's own error quotes pieces of the URL.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize("rest", ["://me:***@h/db", "://h/db?password=***"])
def test_the_mask_is_no_password(rest: str) -> None:
    with pytest.raises(UsageError, match="stands for a password that is not shown") as caught:
        read_url(HOST + rest)
    assert PASSWORD in caught.value.hint


PASSWORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30
)


@given(PASSWORDS, st.sampled_from(["h", "10.0.0.1:5432", "[::1]:5432"]))
@example(" /@?#%&=+:'\"`", "h")
def test_any_password_is_read_as_sqlalchemy_writes_it(password: str, host: str) -> None:
    marked = f"kestrel{password}falcon"
    written = f"{HOST}://me:{quote(marked, safe='')}@{host}/db?sslpassword={quote_plus(marked)}"
    url = read_url(written)
    assert dict(url.secrets) == {"password": marked, "sslpassword": marked}
    known = sa.make_url(written)
    assert dict(url.secrets) == {
        "password": known.password,
        "sslpassword": known.query["sslpassword"],
    }
    assert (sa.make_url(url.bare).host, sa.make_url(url.bare).port) == (known.host, known.port)
    # However the text of an error quotes it.
    quotes = (
        str,
        repr,
        json.dumps,
        shlex.quote,
        quote,
        quote_plus,
        lambda one: quote(one, safe=""),
    )
    for spelled in quotes:
        text = masked(f"FATAL: {spelled(marked)} for user me", url.values)
        assert "kestrel" not in text and "falcon" not in text
        assert text.startswith("FATAL: ") and text.endswith(" for user me")


@example("@?")
@given(PASSWORDS)
def test_a_password_as_it_is_never_passes(password: str) -> None:
    """Whatever people type: read, or refused; shown in no case."""
    written = f"{HOST}://me:kestrel{password}falcon@h:1/db"
    texts = [masked_url(written), masked_word(written), *typeable(["--storage", written])]
    texts += typeable([f"--storage={written}", "--", written])
    try:
        read_url(written)
    except UsageError as error:
        texts.append(str(error))
    for text in texts:
        assert "kestrel" not in text and "falcon" not in text


@example("@@")
@example("@: @")
@given(st.text(st.sampled_from("a:/@?=&'\" \n*%h"), max_size=60))
def test_masking_changes_nothing_the_second_time(text: str) -> None:
    once = masked(f"db://{text}")
    assert masked(once) == once


def test_a_short_password_is_not_every_letter_of_a_text() -> None:
    text = masked("at a: password authentication failed for user a", ("a",))
    assert text == "at ***: password authentication failed for user ***"


@pytest.mark.parametrize(
    "unit",
    [
        "a://",
        "a://b:c ",
        "'a://",
        "a://'",
        "a://\"'",
        "x",
        "password='",
        "a.",
        "://",
        "a://b:c@d/ ",
    ],
)
def test_long_texts_take_no_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    masked(text, ("kestrel", "a"))
    assert time.process_time() - began < 2.0


def test_settings_of_libpq_are_hidden() -> None:
    text = "invalid dsn: host=h password=kestrel sslpassword = 'fal con' passfile=/x"
    assert masked(text) == "invalid dsn: host=h password=*** sslpassword=*** passfile=/x"


def test_a_command_can_be_typed_again_without_its_secrets() -> None:
    url = "postgresql://me:kestrel falcon@h/db"
    words = ("search", "train.py", "--storage", url, f"--storage={url}", "--", "--storage", url)
    bare = "postgresql://me@h/db"
    # What follows -- is the script's own: whether it can do without a password is not known.
    shown = "postgresql://me:***@h/db"
    expected = (
        "search",
        "train.py",
        "--storage",
        bare,
        f"--storage={bare}",
        "--",
        "--storage",
        shown,
    )
    assert typeable(words) == expected
    assert typeable(expected) == expected
    assert typeable(["search", "--storage"]) == ("search", "--storage")


def test_secrets_of_a_command_line_are_known() -> None:
    words = ["automesh", "--budget", "postgresql://me:kes%20trel@h/db", "--a=x://b/?password=f+n"]
    found = secrets_among(words, {PASSWORD: "falcon", "PGPASSWORD": "merlin", "HOME": "/root"})
    assert found == ("falcon", "merlin", "kes trel", "kes%20trel", "f n")


def test_a_password_of_the_environment_is_hidden_where_a_server_is_named() -> None:
    """It may be a common word: before, `automesh` became `***` in every error of every command."""
    words = ["automesh", "search", "train.py"]
    assert secrets_among(words, {"PGPASSWORD": "automesh", PASSWORD: "search"}) == ()
    found = secrets_among([*words, "--storage=postgresql://h/db"], {"PGPASSWORD": "automesh"})
    assert found == ("automesh",)


@pytest.mark.parametrize(
    "word",
    [
        "-dpostgresql://me:kestrel@h/db",
        "_url_postgresql://me:kestrel@h/db",
        "1postgresql://me:kestrel@h/db",
        "\xe9xpostgresql://me:kestrel@h/db",
        "x" * 60 + "postgresql://me:kestrel@h/db",
    ],
)
def test_a_url_is_one_whatever_stands_before_it(word: str) -> None:
    """Before, a short option with its value (`-dURL`) was kept and shown as it is."""
    assert "kestrel" not in masked_word(word)
    assert "kestrel" not in masked(f"see {word} there")
    assert "kestrel" not in " ".join(typeable(["search", "a.py", "--", word]))


@pytest.mark.parametrize(
    "rest",
    [
        "://me:kestrel%40host/db",
        "://corp/me:kestrel@localhost/db",
        ":///me:kestrel@host/db",
        "://me%3Akestrel@host/db",
        "://host/db#password=kestrel",
        "://host/db;password=kestrel",
    ],
)
def test_a_password_in_an_odd_place_is_refused_and_hidden(rest: str) -> None:
    """Before, the error for a mistyped storage showed it."""
    with pytest.raises(UsageError, match="it is not clear where the password ends") as error:
        read_url(HOST + rest)
    assert "kestrel" not in f"{error.value.message} {error.value.hint}"
    assert "kestrel" not in masked(f"{HOST}{rest} cannot be reached")


@pytest.mark.parametrize("text", ["gs://b/x?tokenizer=gpt2", "s3://b/x?max_tokens=512"])
def test_words_of_training_are_no_secrets(text: str) -> None:
    assert masked(text) == masked_word(text) == text


# Where the password comes from.


def url_of(text: str = "://me@h/db") -> StorageUrl:
    return read_url(HOST + text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("kestrel falcon \nnot this\n")
    path.chmod(0o600)
    return path


def test_the_environment_has_the_password(file: Path) -> None:
    every = {PASSWORD: "one", PASSWORD_FILE: str(file), "PGPASSWORD": "three"}
    assert with_password(url_of("://me:zero@h/db"), every).secrets == (("password", "zero"),)
    assert with_password(url_of(), every).secrets == (("password", "one"),)
    del every[PASSWORD]
    # Spaces belong to it, line ends do not.
    assert with_password(url_of(), every).secrets == (("password", "kestrel falcon "),)
    del every[PASSWORD_FILE]
    assert with_password(url_of(), every).secrets == (("password", "three"),)
    assert with_password(url_of(), {}) == url_of()


def test_a_password_of_a_key_is_another_one() -> None:
    url = with_password(url_of("://me@h/db?sslpassword=key"), {PASSWORD: "one"})
    assert url.secrets == (("sslpassword", "key"), ("password", "one"))
    assert url.shown.endswith("?sslpassword=***")


def test_pgpassword_is_for_postgresql_and_always_hidden() -> None:
    mysql = read_url("mysql+pymysql://me@h/db")
    assert with_password(mysql, {"PGPASSWORD": "three"}).values == ()
    url = with_password(url_of(), {PASSWORD: "one", "PGPASSWORD": "three"})
    assert set(url.values) == {"one", "three"}


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"kestrel", 0o644, "may be read by others"),
        (b"kestrel", 0o620, "may be read by others"),
        (b"", 0o600, "has an empty first line"),
        (b"\nkestrel", 0o600, "has an empty first line"),
        (b"kestrel\xff", 0o600, "is not UTF-8 text"),
        (b"k" * (MOST_PASSWORD_BYTES + 1), 0o600, "has more than 4096 bytes"),
    ],
)
def test_a_password_file_that_is_refused(
    file: Path, content: bytes, mode: int, message: str
) -> None:
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(UsageError, match=message) as caught:
        with_password(url_of(), {PASSWORD_FILE: str(file)})
    assert "kestrel" not in str(caught.value)
    assert PASSWORD_FILE in caught.value.hint


def test_a_password_file_of_nobody_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=f"{PASSWORD_FILE}: .*nobody_at_all"):
        with_password(url_of(), {PASSWORD_FILE: "~nobody_at_all/x"})


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe, 0o600)
    link.symlink_to(link)
    for path, message in (
        (pipe, "is a named pipe, not a file"),
        (link, "is a symbolic link that leads to itself"),
        (tmp_path / "none", "cannot be read: no such file"),
        (tmp_path, "is a folder, not a file"),
    ):
        with pytest.raises(UsageError, match=message):
            with_password(url_of(), {PASSWORD_FILE: str(path)})


def test_windows_wrote_the_file(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfkestrel\r\n")
    found = with_password(url_of(), {PASSWORD_FILE: str(file)})
    assert found.secrets == (("password", "kestrel"),)
