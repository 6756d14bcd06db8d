"""Skips damaged records, and names them in a way that is safe to show to anybody."""

from __future__ import annotations

from dataclasses import dataclass, field

from automesh import limits
from automesh.errors import AutomeshError
from automesh.texts.storage_url import masked
from automesh.texts.terminal import clean

DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that Optuna, SQLAlchemy, `json` and readers of other formats raise for a damaged
record. A storage that cannot be read as a whole raises others."""
_SAID_CHARS = 200  # of what is wrong with one


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records that were skipped because they are damaged, so that the others can still be read.

    Attributes:
      named: what each is, in a few words, with what is wrong with it.
    """

    named: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, what: str, error: BaseException) -> None:
        """Adds a record, once.

        Args:
          what: the record, such as `trial 7 of measure`.
          error: why it cannot be read.
        """
        self.named.setdefault(_shown(what), reason_of(error))

    def notices(self) -> tuple[str, ...]:
        """Returns a sentence for each of the first few, and one for the others."""
        said = [
            f"{what} is damaged and left out: {reason}"
            for what, reason in list(self.named.items())[: limits.NAMED_DAMAGES]
        ]
        more = len(self.named) - len(said)
        if more:
            is_one = more == 1
            said.append(f"{more} more {'record is' if is_one else 'records are'} damaged as well")
        return tuple(said)


def name_of_note(key: str) -> str:
    """Names a study's note, as in `Skipped.named`; `key` may have the prefix `automesh.`."""
    return f"the note `{key.removeprefix('automesh.')}`"


def reason_of(error: BaseException) -> str:
    """Describes an error as part of a sentence: one short line that is safe to show to anybody."""
    text = _shown(error.message if isinstance(error, AutomeshError) else str(error))
    if not isinstance(error, AutomeshError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _SAID_CHARS else f"{text[: _SAID_CHARS - 3]}..."


def _shown(text: str) -> str:
    """Masks secrets and control characters, which a damaged record may hold."""
    return clean(masked(text))
