"""The answers of a service: each one becomes a class of this module, or one sentence about what is
wrong.

Any program may listen at the address of a service: a login proxy, another server, or one that lies.
So this module checks the type of each answer, its keys, and the type and size of every value. It
removes control characters from texts, because a terminal would obey them. It ignores unknown keys:
a newer service may send more.
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
    """The answer is not one that a service gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of a service; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def check_type(self, *types: str) -> None:
        """Checks that the body has one of some media types, and is not compressed.

        Raises:
          WrongAnswer: it has another type, or is compressed.
        """
        check_type(self.headers, *types)

    def text(self, *types: str) -> str:
        """Returns the body as text; raises as `check_type`, and if it is no UTF-8."""
        self.check_type(*types)
        try:
            return self.body.decode()
        except UnicodeDecodeError:
            raise WrongAnswer(
                "the service has answered with what is not UTF-8", hint=IS_IT
            ) from None

    def read(self, kind: type[_T]) -> _T:
        """Reads the body as one of the classes below.

        Raises:
          WrongAnswer: it does not fit the class; names the first value that is wrong.
        """
        self.check_type(*JSON)
        return read(self.body, kind)

    def json_object(self, needed: str) -> dict[str, Any]:
        """Reads the body as a JSON object, within the bounds of what is read.

        Args:
          needed: a key that the object must have; other keys are not checked.

        Raises:
          WrongAnswer: it is no such object.
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
    """Checks headers as `Answer.check_type` does."""
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        said = f"the service has answered with what is packed as {_quoted(packed)}, unasked"
        raise WrongAnswer(said, hint=IS_IT)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind not in types:
        said = f"the service has answered with {_quoted(kind)}, not with {types[0]}"
        raise WrongAnswer(said, hint=IS_IT)


def read(data: bytes | str, kind: type[_T]) -> _T:
    """Reads JSON of a service as one of the classes below.

    Raises:
      WrongAnswer: it does not fit the class; names the first value that is wrong.
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
"""A sentence from the service: one line of bounded length that is safe to show."""
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
    """A submission, in the answer to the request that makes or resumes it."""

    number: Number
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class HowItIs:
    """The state of a submission."""

    state: State
    said: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionNow:
    """A submission with the names of its studies."""

    submission: HowItIs
    studies: Annotated[tuple[StudyName, ...], Field(max_length=_MOST_STUDIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """The summary of a study, as far as a client needs it."""

    state: Line
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyNow:
    """A study with its rule, or the reason why it has none."""

    study: StudySummary
    rule: RuleText
    missing: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines of a search's log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatHeard:
    """The answer to an agent's beat."""

    is_cancelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKept:
    """The number of bytes of a log that the service has."""

    bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The state of a submission after its search has ended."""

    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The reason why a request is refused."""

    detail: Line = ""
    hint: Line = ""
