"""What a case wants, what automesh did, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from automesh.errors import AutomeshError

Case = Mapping[str, Any]
Status = Literal["passed", "deviated", "failed", "not_covered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call did.

    Attributes:
      returned: its value, as plain data; None if it raised.
      error: what it raised, if it did.
    """

    returned: Any = None
    error: Exception | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"returned {self.returned!r}"
        return f"raised {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a call should do.

    Attributes:
      returns: plain data; tuples and lists are the same.
      raises: name of an exception class, or of one that it derives from; empty if none.
    """

    returns: Any = None
    raises: str = ""

    def __str__(self) -> str:
        return f"raises {self.raises}" if self.raises else f"returns {self.returns!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How automesh's table of deviations says that it departs from the original in this case.

    Attributes:
      name: of the deviation, a key of tests/data/deviations.toml.
      wanted: what automesh should do instead.
    """

    name: str
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one case.

    Attributes:
      deviation: its name, if `status` is `deviated`.
      detail: what was wanted and got, or why the case is not covered.
    """

    status: Status
    deviation: str = ""
    detail: str = ""


def attempt(call: Callable[[], Any]) -> Outcome:
    """Calls, and keeps what is returned or raised."""
    try:
        return Outcome(returned=plain(call()))
    except Exception as error:
        return Outcome(error=error)


def wanted(expect: Mapping[str, Any]) -> Wanted:
    """Reads an entry `{"returns": ...}` or `{"raises": ..., "message": ...}` of a case."""
    if "raises" in expect:
        return Wanted(raises=expect["raises"])
    return Wanted(returns=plain(expect["returns"]))


def judge(
    originals: Sequence[Wanted], got: Outcome, *departures: Departure, foreign: bool = False
) -> Verdict:
    """`passed` if all original systems do the same; else `deviated` if a departure says so.

    Args:
      originals: what each original system does; one at least.
      departures: those that apply to this case; nothing of what automesh did has a say in them.
      foreign: True if it is jax itself that was called: errors need not be automesh's own.
    """
    if not foreign and got.error is not None and not isinstance(got.error, AutomeshError):
        return Verdict(status="failed", detail=f"an error that is not automesh's own: {got}")
    if all(fits(one, got) for one in originals):
        return Verdict(status="passed")
    for departure in departures:
        if fits(departure.wanted, got):
            return Verdict(status="deviated", deviation=departure.name, detail=str(got))
    wishes = " / ".join(map(str, (*originals, *(one.wanted for one in departures))))
    return Verdict(status="failed", detail=f"{got}; wanted: {wishes}")


def uncovered(why: str) -> Verdict:
    """A case that nothing of automesh answers to, with the reason."""
    return Verdict(status="not_covered", detail=why)


def fits(wish: Wanted, got: Outcome) -> bool:
    """Whether a call did what was wanted; the words of errors are not compared."""
    if wish.raises:
        return got.error is not None and wish.raises in {
            one.__name__ for one in type(got.error).__mro__
        }
    return got.error is None and plain(wish.returns) == got.returned


def plain(value: Any) -> Any:
    """Lists for tuples, at every depth, so that values compare as JSON would."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
