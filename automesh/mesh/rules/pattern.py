"""Matches the regular expressions of rules in bounded time, whatever they contain.

Python's engine tries one way to match after the other, and some patterns (`(a+)+b`) have
exponentially many. So Python's engine only gets patterns whose text shows that they have few ways.
All others go to Rust's engine, which pydantic contains: its time grows with the length of the name,
not with the number of ways. Patterns with features that this engine lacks (lookahead, lookbehind,
backreferences) are refused when the rule is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

from automesh import limits
from automesh.errors import UsageError

# Escapes, comments, the beginnings of groups, sets of characters: parts without alternatives.
_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<comment>\(\?#[^)]*\))|(?P<open>\((?:\?[^)]?)?)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<once>[?|])|(?P<repeat>[*+{])|(?P<other>.)",
    re.DOTALL,
)
# Syntax that the engines read differently: possessive repeats (`a*+`), nested sets.
_NO_WAY_BACK = re.compile(r"[*+?}]\+")
# With this flag, spaces and comments may be between a group and its repeat.
_SPACED = re.compile(r"\(\?[A-Za-z-]*x")
_SET_IN_SET = re.compile(r"\[|&&|--|~~")


def check_pattern(pattern: str) -> None:
    """Checks that a rule's match is a regular expression that can be matched in bounded time.

    Raises:
      UsageError: it is not.
    """
    if len(pattern) > limits.PATTERN_CHARS:
        raise UsageError(
            f"a rule's match has {len(pattern)} characters, and {limits.PATTERN_CHARS} are the most"
            f": `{pattern[:40]}...`",
            hint="write a rule for each kind of target",
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise UsageError(
            f"the rule's match `{pattern}` is not a regular expression: {error}",
            hint="a backslash before a special character makes it plain",
        ) from None
    _matcher(pattern, ignore_case=False)


def matches(pattern: str, selector: str, *, ignore_case: bool = False) -> bool:
    """Whether a pattern matches the whole of a name.

    Raises:
      UsageError: as `check_pattern`.
    """
    return _matcher(pattern, ignore_case=ignore_case)(selector)


def nearest(pattern: str, selector: str) -> tuple[str, bool]:
    """Returns the part of a name that a pattern matches, if it does not match the whole.

    Returns:
      The part, empty if there is none; and whether it is the beginning.
    """
    if has_few_choices(pattern):
        found = re.match(pattern, selector)
        if found and found[0]:
            return found[0], True
        found = re.search(pattern, selector)
        return (found[0], False) if found and found[0] else ("", False)
    does_match, length = _matcher(pattern, ignore_case=False), len(selector)
    for start in range(length):
        for end in range(length, start, -1):
            if does_match(selector[start:end]):
                return selector[start:end], start == 0
    return "", False


def has_few_choices(pattern: str) -> bool:
    """Whether Python's engine has so few ways to match a name that it may try them all.

    Each alternative or optional part doubles the ways; repeats of characters or sets have as many
    ways as the name can be divided among them. For a repeated group the number is unknown.
    """
    if _SPACED.search(pattern):
        return False
    choices, repeats, before = 0, 0, ""
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind == "comment":
            continue
        if kind == "repeat" and before == ")":
            return False
        repeats += kind == "repeat"
        choices += kind == "once"
        before = token[0] if kind == "other" else ""
    return (
        math.log2(math.comb(limits.TARGET_CHARS + repeats, repeats)) + choices <= limits.MATCH_BITS
    )


@lru_cache(maxsize=256)
def _matcher(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    if has_few_choices(pattern):
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        return lambda selector: compiled.fullmatch(selector) is not None
    return _linear(pattern, ignore_case=ignore_case)


def _linear(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    """Returns a matcher of Rust's engine."""
    # Imported here, as a config without such rules must not wait for pydantic.
    from pydantic import StringConstraints, TypeAdapter, ValidationError
    from pydantic_core import SchemaError

    if _is_read_differently(pattern):
        raise _too_many_choices(pattern)
    tokens = [one[0] for one in _TOKEN.finditer(pattern) if one.lastgroup != "comment"]
    known = "".join(r"\z" if one == r"\Z" else one for one in tokens)  # Rust's `\Z`
    whole = rf"{'(?i)' if ignore_case else ''}\A(?:{known})\z"
    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=whole)])
    except SchemaError:
        raise _too_many_choices(pattern) from None

    def does_match(selector: str) -> bool:
        try:
            adapter.validate_python(selector)
        except ValidationError:
            return False
        return True

    return does_match


def _is_read_differently(pattern: str) -> bool:
    tokens = list(_TOKEN.finditer(pattern))
    plain = "".join("." if one["set"] or one["escape"] else one[0] for one in tokens)
    return (
        _NO_WAY_BACK.search(plain) is not None
        or any(one["escape"] in (r"\<", r"\>") for one in tokens)
        or any(_SET_IN_SET.search(one["set"][1:-1]) for one in tokens if one["set"])
        or _SPACED.search(pattern) is not None
    )


def _too_many_choices(pattern: str) -> UsageError:
    return UsageError(
        f"the rule's match `{pattern}` may take too long to match",
        hint="repeat characters or sets, as in `[a-z]*`, not groups; or do without looking ahead "
        "or behind and referring back",
    )
