"""The table of deviations, tests/data/deviations.toml, and the page that shows it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache

from tests.support.paths import DATA, ROOT

PAGE = ROOT / "docs" / "deviations.md"
_DATA = DATA / "deviations.toml"
_HEAD = """\
# Where automesh departs from the systems it learned from

automesh's mesh and partitioning libraries offer what Loadax, AXLearn, eformer and Haliax offer,
under the same names. `tests/data/conformance.json` holds cases that were run on those systems;
`python -m tests.conformance` runs them on automesh. A case passes, or departs in one of the ways
below. This page is made from `tests/data/deviations.toml`, which the tests hold every case to.
Schedules of pipelines have a table in [pipelines.md](pipelines.md).

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One way in which automesh departs.

    Attributes:
      name: what the verdict of a case calls it.
      systems: whose behaviour is `old`.
      cases: those of tests/data/conformance.json, as `group[index]`; empty if it holds none.
    """

    name: str
    title: str
    systems: tuple[str, ...]
    old: str
    new: str
    why: str
    cases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """Cases that nothing of these libraries answers to.

    Attributes:
      cases: as `group[index]`.
      groups: whole groups.
    """

    what: str
    why: str
    cases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@cache
def deviations() -> tuple[Deviation, ...]:
    """The ways in which automesh departs, in the order of the table."""
    return tuple(
        Deviation(**{**one, "systems": tuple(one["systems"]), "cases": tuple(one["cases"])})
        for one in _tree()["deviation"]
    )


@cache
def not_covered() -> tuple[Uncovered, ...]:
    """What is not covered, with the reasons."""
    return tuple(
        Uncovered(
            what=one["what"],
            why=one["why"],
            cases=tuple(one.get("cases", ())),
            groups=tuple(one.get("groups", ())),
        )
        for one in _tree()["not_covered"]
    )


def page() -> str:
    """docs/deviations.md."""
    rows = "\n".join(map(_row, deviations()))
    rest = "\n".join(
        f"| {one.what} | {', '.join(one.groups or one.cases)} | {one.why} |"
        for one in not_covered()
    )
    return (
        f"{_HEAD}"
        "| what | before (of whom) | in automesh | why |\n|---|---|---|---|\n"
        f"{rows}\n\n## Not covered\n\n"
        f"| what | cases | why |\n|---|---|---|\n{rest}\n"
    )


def write() -> None:
    """Writes the page anew."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def _row(one: Deviation) -> str:
    return f"| {one.title} | {one.old} ({', '.join(one.systems)}) | {one.new} | {one.why} |"


def _tree() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads(_DATA.read_text(encoding="utf-8"))
