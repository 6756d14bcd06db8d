"""Collects what the user should know of a run of a script, one sentence each (no jax)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _MessagesState:
    """The data of this process about the last run.

    Attributes:
      sentences: what the user should know, each sentence once, in the order in which they were
        added.
      devices: how many devices the script wanted instead of those that it was shown; 0 if it used
        those.
      undivided: what the script's mesh does not divide, if it wanted others therefore.
      failed_at: file and line of the script's code that raised an error; None if the script did not
        fail.
      refuses_axes: whether it failed because of the types of axes that jax gave its mesh.
    """

    sentences: dict[str, None] = field(default_factory=dict[str, None])
    devices: int = 0
    undivided: str = ""
    failed_at: tuple[str, int] | None = None
    refuses_axes: bool = False


_STATE = _MessagesState()


def forget() -> None:
    """Forgets the last run, as a new one begins."""
    _STATE.sentences.clear()
    _STATE.devices, _STATE.undivided, _STATE.failed_at = 0, "", None
    _STATE.refuses_axes = False


def tell(sentence: str) -> None:
    """Keeps a sentence for the user."""
    _STATE.sentences.setdefault(sentence)


def told() -> tuple[str, ...]:
    """Returns the sentences of the last run."""
    return tuple(_STATE.sentences)


def want_devices(count: int, undivided: str = "") -> None:
    """Notes down that the script failed because it makes a mesh of `count` devices, or because its
    mesh of all devices does not divide an array, and one of `count` does."""
    _STATE.devices, _STATE.undivided = count, undivided


def undivided() -> str:
    """Returns what the mesh of the last run did not divide; empty if it wanted other devices for
    another reason, or none."""
    return _STATE.undivided


def wanted_devices() -> int:
    """Returns how many devices the last run wanted; 0 if it used those that it was shown."""
    return _STATE.devices


def fail_at(file: str, line: int) -> None:
    """Notes down at which line of its own code the script raised an error."""
    _STATE.failed_at = (file, line)


def failed_at() -> tuple[str, int] | None:
    """Returns the file and line at which the last run failed; None if it did not fail."""
    return _STATE.failed_at


def refuse_axes() -> None:
    """Notes down that the script failed because of the types of axes that jax gave its mesh."""
    _STATE.refuses_axes = True


def refuses_axes() -> bool:
    """Returns whether the last run failed because of the types of axes that jax gave its mesh."""
    return _STATE.refuses_axes
