"""Registers the lowerings of one step at one choice of knobs, of this and of other workers.

Workers that estimate at the same time lower the same step on different meshes. They exchange the
hashes of texts and the numbers of their lowerings through the parent, so that few are made twice.
The program itself stays in the worker that made it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from automesh.sharding.size_dependence import Numbers, Sample

# Sends new items to the parent, and returns those of other workers: see `Lowerings.share`.
Exchange = Callable[[dict[str, Any]], Mapping[str, Any]]
# Whether the programs of a step with these knobs differ only in the sizes of their axes.
State = Literal["open", "alike", "varied"]
_Key = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """The step lowered at some sizes.

    Attributes:
      module: in StableHLO and Shardy alone; None in the register, and if another worker has it.
      text: hash of the program without the sizes of its mesh.
      signature: hash of the program without its numbers.
      sample: its sizes (of all axes) and its numbers.
      is_asked: the terms at these sizes are wanted; False if it was only lowered to learn about
        others.
    """

    module: Any
    text: str
    signature: str
    sample: Sample
    is_asked: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sample.sizes


@dataclass(slots=True, kw_only=True)
class Lowerings:
    """A register of lowerings of one step with the same mapping and knobs.

    Attributes:
      exchange: exchange with the other workers; None if there are none.
      state: what is known about all meshes, also sent to the others.
      is_alike_elsewhere: True once the step was found alike on all meshes with other knobs, and
        different with none.
    """

    exchange: Exchange | None = None
    state: State = "open"
    is_alike_elsewhere: bool = False
    _found: dict[_Key, Lowering] = field(default_factory=dict[_Key, Lowering])
    _refused: set[_Key] = field(default_factory=set[_Key])
    _claimed: set[_Key] = field(default_factory=set[_Key])
    _unsent: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _heard: int = 0

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Lowering]:
        return iter(self._found.values())

    def of(self, signature: str) -> list[Lowering]:
        """Lists the lowerings of one kind of program."""
        return [one for one in self if one.signature == signature]

    def find(self, sizes: Mapping[str, int]) -> Lowering | None:
        """Finds the lowering at sizes of all axes."""
        return self._found.get(_key(sizes))

    def is_refused(self, sizes: Mapping[str, int]) -> bool:
        """Whether the user's code is known to refuse these sizes."""
        return _key(sizes) in self._refused

    def is_claimed(self, sizes: Mapping[str, int]) -> bool:
        """Whether another worker is known to lower the step at these sizes."""
        return _key(sizes) in self._claimed

    def add(self, lowering: Lowering) -> None:
        """Adds a lowering of this worker, and sends it to the others."""
        self._take(replace(lowering, module=None))
        if self.exchange is not None:
            self._unsent.append(_packed(lowering))
            self.share()

    def refuse(self, sizes: Mapping[str, int]) -> None:
        """Records that the user's code refuses these sizes."""
        self._refused.add(_key(sizes))
        if self.exchange is not None:
            self._unsent.append({"sizes": dict(sizes), "refused": True})
            self.share()

    def settle(self, state: State) -> None:
        """Sends what is known about the step with these knobs to the others."""
        if state != self.state:
            self.state = state
            self.share()

    def share(self, claim: Mapping[str, int] | None = None) -> None:
        """Sends new lowerings, and adds those of other workers.

        Args:
          claim: sizes that are lowered here next.
        """
        if self.exchange is None:
            return
        new, self._unsent = self._unsent, []
        reply = self.exchange(
            {
                "new": new,
                "heard": self._heard,
                "claim": None if claim is None else dict(claim),
                "state": self.state,
            }
        )
        self._heard = int(reply.get("heard", 0))
        for record in reply.get("known", ()):
            if record.get("refused"):
                self._refused.add(_key(record["sizes"]))
                continue
            try:
                self._take(_unpacked(record))
            except (ValueError, zlib.error):
                continue  # Unreadable: these sizes are lowered here.
        self._claimed = {_key(sizes) for sizes in reply.get("claimed", ())}
        self.is_alike_elsewhere = bool(reply.get("alike", False))

    def _take(self, lowering: Lowering) -> None:
        key = _key(lowering.sizes)
        before = self._found.get(key)
        is_asked = lowering.is_asked or (before is not None and before.is_asked)
        self._found[key] = replace(lowering, is_asked=is_asked)


def _key(sizes: Mapping[str, int]) -> _Key:
    return frozenset(sizes.items())


def _packed(lowering: Lowering) -> dict[str, Any]:
    return {
        "sizes": dict(lowering.sizes),
        "text": lowering.text,
        "signature": lowering.signature,
        "asked": lowering.is_asked,
        "numbers": _text(lowering.sample.numbers),
        "elements": _text(lowering.sample.elements),
    }


def _unpacked(record: Mapping[str, Any]) -> Lowering:
    sizes = {str(axis): int(size) for axis, size in record["sizes"].items()}
    numbers, elements = _numbers(record["numbers"]), _numbers(record["elements"])
    return Lowering(
        module=None,
        text=str(record["text"]),
        signature=str(record["signature"]),
        sample=Sample(sizes=sizes, numbers=numbers, elements=elements),
        is_asked=bool(record["asked"]),
    )


def _text(numbers: Numbers) -> str:
    return base64.b64encode(zlib.compress(numbers.astype("<f8").tobytes(), 1)).decode()


def _numbers(text: str) -> Numbers:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8").astype(np.float64)
