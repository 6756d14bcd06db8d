"""What the exceptions of libraries and of users are in one sentence."""

from __future__ import annotations

import pytest

from automesh.texts.exceptions import sentence_of


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
