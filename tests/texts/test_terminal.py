"""Text that others wrote: what a terminal would obey is gone, what people read is left."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.texts.terminal import (
    as_unicode,
    clean,
    clean_lines,
    is_unicode,
    shortened,
    without_controls,
)

# Every text, lone surrogates included, with escape sequences more often than by chance.
ANY = st.text(st.characters(codec=None, exclude_categories=[]) | st.sampled_from("\x1b\x9b[]m;0\\"))
OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\n b\tc", "a b c"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("bell\x07 null\x00 end…", "bell null end..."),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1bPq#0\x1b\\text", "text"),
        ("\x1b_Gi=1\x1b\\text", "text"),
        ("\x1bctext", "text"),
        ("\x1b(0text", "text"),
        ("\x9b2Jtext", "text"),
        ("\x9d0;title\x9ctext", "text"),
        ("\x1b[text", "ext"),
        ("text\x1b", "text"),
        ("exe.\u202egnp", "exe. gnp"),
        ("\u2066a\u2069\u200fb\ufeff", "a b"),
        ("caf\udce9.py", "caf\\xe9.py"),
        ("\ud800", "\\ud800"),
        ("caf\xe9 \u65e5\u672c \U0001f600", "caf\xe9 \u65e5\u672c \U0001f600"),
        ("a\x85b\u2028c\u2029d", "a b c d"),
    ],
)
def test_foreign_text_is_made_safe(raw: str, expected: str) -> None:
    assert clean(raw) == expected


def test_long_text_ends_at_a_word() -> None:
    assert clean("one two three", 8) == "one ..."


def test_lines_and_indents_are_kept() -> None:
    assert clean_lines("a:\r\n  b\x1b[2J\tc\rd\n\x9b1me") == "a:\n  b\tc\nd\ne"
    # What is not ended on its line takes nothing of the next one with it.
    assert clean_lines("a\x1b]0;title\nb") == "a\nb"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = shortened("<" + "9" * 100_000 + ">", 1_000)
    assert len(text) < 1_000 and text[0] == "<" and text[-1] == ">"
    assert "[... 99252 characters ...]" in text
    assert shortened("short", 5) == "short"


@given(ANY)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert clean(text).isprintable()
    assert all(
        part.isprintable() for line in clean_lines(text).split("\n") for part in line.split("\t")
    )
    left = without_controls(text).replace("\n", "")
    assert not {unicodedata.category(char) for char in left} & set(OBEYED)
    assert len(left) <= len(text)


@given(ANY)
def test_what_is_clean_stays_as_it_is(text: str) -> None:
    assert clean(clean(text)) == clean(text)
    assert clean_lines(clean_lines(text)) == clean_lines(text)
    assert without_controls(clean(text)) == clean(text)


@given(ANY)
def test_any_text_becomes_utf8(text: str) -> None:
    assert is_unicode(as_unicode(text))
    assert as_unicode(text).encode().decode() == as_unicode(text)
    if is_unicode(text):
        assert as_unicode(text) == text
