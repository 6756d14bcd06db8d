"""What the user should know of the world in which a script was run: one sentence each (no jax)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _MessagesState:
    """Of this process.

    Attributes:
      sentences: of the last run, each once, in the order in which they came up.
      devices: how many devices the script wanted instead of those that it was shown; 0 if it took
        what there was.
      failed_at: file and line of the script's code that raised; none if it did not fail.
    """

    sentences: dict[str, None] = field(default_factory=dict[str, None])
    devices: int = 0
    failed_at: tuple[str, int] | None = None


_STATE = _MessagesState()


def forget() -> None:
    """A new run begins."""
    _STATE.sentences.clear()
    _STATE.devices, _STATE.failed_at = 0, None


def tell(sentence: str) -> None:
    """Keeps a sentence for the user."""
    _STATE.sentences.setdefault(sentence)


def told() -> tuple[str, ...]:
    """The sentences of the last run."""
    return tuple(_STATE.sentences)


def want_devices(count: int) -> None:
    """The script failed, because it makes a mesh of `count` devices."""
    _STATE.devices = count


def wanted_devices() -> int:
    """How many devices the last run wanted; 0 if it took those that it was shown."""
    return _STATE.devices


def fail_at(file: str, line: int) -> None:
    """The script raised something in a line of its own."""
    _STATE.failed_at = (file, line)


def failed_at() -> tuple[str, int] | None:
    """File and line at which the last run failed; None if it did not."""
    return _STATE.failed_at
