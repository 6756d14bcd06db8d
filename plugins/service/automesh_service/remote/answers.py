"""What a service may answer: whatever it sends becomes one of these, or one sentence.

Anybody may listen at the address of a service: a proxy that logs people in, another program, or
somebody who lies. So each answer is checked here for its type, its keys, and the type and size of
every value. A text of the service loses here what a terminal would obey. Keys that are unknown are
passed over: a newer service may say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from automesh import limits
from automesh.errors import UsageError
from automesh.jsonio import adapter_of
from automesh.reading import Malformed, parse_json
from automesh.texts.terminal import clean, shortened

IS_IT = "is an `automesh serve` at this address?"
_MOST_STUDIES = 1_000
_NAME_CHARS = 1_000
JSON = ("application/json", "application/problem+json")
_T = TypeVar("_T")


class WrongAnswer(UsageError):
    """What was answered is not what a service answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a service has answered; names of headers in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def check_type(self, *types: str) -> None:
        """Checks that the body is of one of some media types, and not packed.

        Raises:
          WrongAnswer: it is not.
        """
        check_type(self.headers, *types)

    def text(self, *types: str) -> str:
        """The body as text; raises as `check_type`, or it is no UTF-8."""
        self.check_type(*types)
        try:
            return self.body.decode()
        except UnicodeDecodeError:
            raise WrongAnswer(
                "the service has answered with what is not UTF-8", hint=IS_IT
            ) from None

    def read(self, kind: type[_T]) -> _T:
        """The body as one of the classes below.

        Raises:
          WrongAnswer: it is none; names the first value that is wrong.
        """
        self.check_type(*JSON)
        return read(self.body, kind)

    def json_object(self, needed: str) -> dict[str, Any]:
        """The body as an object of JSON within the bounds of what is read.

        Args:
          needed: a key that it has; what else it has is not looked at.

        Raises:
          WrongAnswer: it is none.
        """
        try:
            found = parse_json(self.text(*JSON))
        except Malformed as error:
            raise WrongAnswer(_no_answer(error.message), hint=IS_IT) from None
        if not isinstance(found, dict):
            raise WrongAnswer(_no_answer("it is no object"), hint=IS_IT)
        if needed not in found:
            raise WrongAnswer(_no_answer(f"it has no `{needed}`"), hint=IS_IT)
        return found


def check_type(headers: Mapping[str, str], *types: str) -> None:
    """As `Answer.check_type`, of headers."""
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        said = f"the service has answered with what is packed as {_quoted(packed)}, unasked"
        raise WrongAnswer(said, hint=IS_IT)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind not in types:
        said = f"the service has answered with {_quoted(kind)}, not with {types[0]}"
        raise WrongAnswer(said, hint=IS_IT)


def read(data: bytes | str, kind: type[_T]) -> _T:
    """JSON of a service as one of the classes below.

    Raises:
      WrongAnswer: it is none; names the first value that is wrong.
    """
    try:
        return adapter_of(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        said = f"`{path}`: {first['msg']}" if path else first["msg"]
        raise WrongAnswer(_no_answer(said), hint=IS_IT) from None


def _no_answer(said: str) -> str:
    return f"the service has not answered as one does: {shortened(clean(said), 300)}"


def _quoted(text: str) -> str:
    return f"`{clean(text, 60)}`"


# Values


def _one_line(text: str) -> str:
    return shortened(clean(text), limits.MESSAGE_CHARS)


def _shown_as_it_is(text: str) -> str:
    if text != clean(text):
        raise ValueError("it has characters that no name has")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
"""A sentence of the service: one line, of bounded length, that can be shown."""
Number = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
State = Literal["queued", "running", "found", "nothing", "failed", "cancelled"]
StudyName = Annotated[str, StringConstraints(min_length=1, max_length=_NAME_CHARS)]
Target = Annotated[
    str,
    StringConstraints(max_length=limits.TARGET_CHARS),
    AfterValidator(_shown_as_it_is),
]
RuleText = Annotated[str, StringConstraints(max_length=limits.PEOPLE_FILE_BYTES)]
Size = Annotated[int, Field(ge=0, le=limits.SEARCH_LOG_BYTES)]


# Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionTaken:
    """A submission, as an answer to who sends it or goes on with it."""

    number: Number
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class HowItIs:
    """What has become of a submission."""

    state: State
    said: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionNow:
    """A submission with the names of its studies."""

    submission: HowItIs
    studies: Annotated[tuple[StudyName, ...], Field(max_length=_MOST_STUDIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """Of a study, what a client needs."""

    state: Line
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyNow:
    """A study with its rule, or why it has none."""

    study: StudySummary
    rule: RuleText
    missing: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines of a search's log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatHeard:
    """What an agent hears when it says that it is there."""

    is_cancelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKept:
    """How much of a log a service has."""

    bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """What has become of a submission whose search has ended."""

    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Why a request is refused."""

    detail: Line = ""
    hint: Line = ""
