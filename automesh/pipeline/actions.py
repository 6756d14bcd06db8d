"""The noun `Action` and its text form: what one rank does for one microbatch on one stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from automesh.errors import UsageError

ActionKind = Literal["F", "B", "I", "W"]
KIND_WORDS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
_KINDS: dict[str, ActionKind] = {kind: kind for kind in KIND_WORDS}
_ACTION = re.compile(r"([FBIW])(\d+)(?:@(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One unit of work of a pipeline.

    Attributes:
      kind: `F` forward, `B` whole backward, or its two halves: `I` the gradient of the stage's
        input, `W` the gradient of its weights (Qi et al. 2023, arXiv:2401.10241).
      microbatch: from 0.
      stage: from 0; stage 0 reads the batch, the last one computes the loss.
    """

    kind: ActionKind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


Ranks = tuple[tuple[Action, ...], ...]


def format_actions(actions: Sequence[Action], *, rank: int) -> str:
    """Prints the actions of a rank in order; `@stage` only where it is not the rank's own number.

    Example:
      >>> from automesh.pipeline import Action, format_actions
      >>> format_actions([Action(kind="F", microbatch=0, stage=1)], rank=1)
      'F0'
    """
    return " ".join(
        f"{action.kind}{action.microbatch}" if action.stage == rank else str(action)
        for action in actions
    )


def parse_actions(text: str, *, rank: int) -> tuple[Action, ...]:
    """Reads the actions of a rank, in order.

    Args:
      text: actions with white space between them: `F0 F1 B0`, and `F0@4` where the stage is not the
        rank's own number.
      rank: whose actions these are.

    Raises:
      UsageError: something in `text` is not an action.

    Example:
      >>> from automesh.pipeline import parse_actions
      >>> [str(action) for action in parse_actions("F0 B0 F0@3", rank=1)]
      ['F0@1', 'B0@1', 'F0@3']
    """
    actions: list[Action] = []
    for piece in text.split():
        match = _ACTION.fullmatch(piece)
        if match is None:
            raise UsageError(
                f"`{piece}` in the schedule of rank {rank} is not an action",
                hint="write a kind (F, B, I or W), a microbatch and, if it is not the rank's "
                "own number, a stage: `F0`, `B3@2`",
            )
        kind = _KINDS[match[1]]
        stage = rank if match[3] is None else int(match[3])
        actions.append(Action(kind=kind, microbatch=int(match[2]), stage=stage))
    return tuple(actions)
