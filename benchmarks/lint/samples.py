"""The broken steps, with the findings that their first lines state."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "steps"
_FIELD = re.compile(r"^(finding|mesh|line|only): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One broken step and its mended twin.

    Attributes:
      finding: the rule that names it.
      mesh: axes and sizes, one of them -1.
      line: where it is broken.
      only: the platforms whose compilers do so; empty: all.
    """

    name: str
    finding: str
    mesh: tuple[tuple[str, int], ...]
    line: int
    only: tuple[str, ...]

    @property
    def source(self) -> str:
        return f"{self.name}.py:{self.line}"

    def sizes(self, devices: int) -> tuple[tuple[str, int], ...]:
        """Of each axis on so many devices."""
        known = math.prod(size for _, size in self.mesh if size > 0)
        return tuple((axis, size if size > 0 else devices // known) for axis, size in self.mesh)

    def build(self, *, is_mended: bool) -> Callable[[Any], Any]:
        """The function that builds the step."""
        module = importlib.import_module(f"benchmarks.lint.steps.{self.name}")
        return module.mended if is_mended else module.build


def samples(names: Sequence[str] = ()) -> list[Sample]:
    """All of them, or those that are named."""
    files = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
    return [_read(path) for path in files if not names or path.stem in names]


def _read(path: Path) -> Sample:
    fields = dict(_FIELD.findall(path.read_text(encoding="utf-8").partition('"""\n')[0]))
    mesh = tuple(
        (axis, int(size))
        for axis, _, size in (one.partition(":") for one in fields["mesh"].split(","))
    )
    return Sample(
        name=path.stem,
        finding=fields["finding"],
        mesh=mesh,
        line=int(fields["line"]),
        only=tuple(fields.get("only", "").split()),
    )
