"""What the exceptions of libraries and of users are in one sentence."""

from __future__ import annotations

import pytest

from automesh.texts.exceptions import in_one_line, sentence_of


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("127 does not divide.\nTraceback", "ValueError: 127 does not divide."),
        ("", "ValueError"),
        # jax's message on 640 columns that become (5, 128) goes on with a mesh, over two lines.
        (
            f"it does not divide 5. Got shape: (32, {'5, ' * 80})",
            "ValueError: it does not divide 5",
        ),
        ("a" * 200, "ValueError: " + "a" * 185 + "..."),
    ],
)
def test_a_long_message_ends_with_a_whole_sentence(message: str, sentence: str) -> None:
    assert sentence_of(ValueError(message)) == sentence


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("127 does not divide\nby 2"), "ValueError: 127 does not divide"),
        # As that of `assert len(devices) == 8`; before, it ended in a colon, and the second run
        # of a script ended by an IndexError of automesh.
        (AssertionError(), "AssertionError"),
        (RuntimeError("\nwhat jax says below its first line"), "RuntimeError: what jax says below"),
    ],
)
def test_an_error_is_one_line_without_a_colon_for_no_message(error: Exception, said: str) -> None:
    line = in_one_line(error)
    assert line.startswith(said) and "\n" not in line and not line.endswith((":", ": "))
