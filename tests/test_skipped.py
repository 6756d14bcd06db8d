"""What is said of damaged records: a short line each, that anybody may be shown."""

from __future__ import annotations

import pytest

from automesh.errors import AutomeshError, UsageError
from automesh.jsonio import from_json
from automesh.skipped import Skipped, reason_of


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("it is\n\ttorn", hint="mend it"), "it is torn"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError(), "ValueError"),
        (AutomeshError("x" * 1000), "x" * 197 + "..."),
    ],
)
def test_a_reason_is_one_short_line(error: Exception, said: str) -> None:
    assert reason_of(error) == said
    skipped = Skipped()
    skipped.note("row 1", error)
    assert skipped.notices() == (f"row 1 is damaged and left out: {said}",)


SECRETS = [
    "postgresql://me:hunter2@host/db",
    "postgresql://me:hunter2@host/" + "x" * 5_000,
    "host=db password=hunter2",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("kind", [UsageError, ValueError])
def test_a_damaged_record_does_not_give_its_password_away(
    secret: str, kind: type[Exception]
) -> None:
    skipped = Skipped()
    skipped.note(f"the note `{secret}`", kind(f"got {secret!r}"))
    assert "hunter2" not in "".join(skipped.notices())


@pytest.mark.parametrize("before", range(60, 100, 5))
def test_a_password_is_not_cut_before_it_is_masked(before: int) -> None:
    """Of a value that is wrong a hundred characters are shown: a URL without its `@` is none."""
    with pytest.raises(AutomeshError) as caught:
        from_json("-" * before + " postgresql://me:hunter2hunter2@host/db", int)
    assert "hun" not in reason_of(caught.value)


def test_a_damaged_record_does_not_reach_the_terminal_as_it_is() -> None:
    skipped = Skipped()
    skipped.note("the hold `\x1b]0;owned\x07a\u202eb`", KeyError("\x9b2J\n\x1b[31m\udce9"))
    (said,) = skipped.notices()
    assert said == "the hold `a b` is damaged and left out: KeyError: '\\x9b2J\\n\\x1b[31m\\udce9'"
    skipped = Skipped()
    skipped.note("row 1", ValueError("\x9b2Jred\n\x1b[31m\udce9"))
    assert skipped.notices() == ("row 1 is damaged and left out: ValueError: red \\xe9",)
