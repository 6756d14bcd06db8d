"""Runs cases of the systems that automesh learned from: `python -m tests.conformance FILE`.

FILE has the format of tests/data/conformance.json. Each case passes, or deviates as
tests/data/deviations.toml says, or fails, or is not covered, with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import paths
from tests.support.plugins import WITHOUT, is_installed

if TYPE_CHECKING:
    from tests.conformance.outcomes import Case, Verdict

DATA = paths.DATA / "conformance.json"
STATUSES = ("passed", "deviated", "failed", "not_covered")
# Each maps names of groups to functions; imported late, for they import jax.
_MODULES = ("mesh", "create", "jax", "partition", "shard", "jit", "pipeline", "runtime")
# What runs pipelines is a plug-in: module -> its name and the groups that need it.
IN_PLUGINS = {"runtime": ("pipeline", ("jaxpp_mpmd_mesh", "multimesh_microbatch"))}
NOT_COVERED = {
    "maxtext_fill_unspecified_mesh_axes": "MaxText is none of the systems that automesh replaces",
    "levanter_mesh": "Levanter's trainer is none of the systems that automesh replaces",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """One case of a file.

    Attributes:
      group: its name.
      index: of the case in its group.
      case: what the file says.
      about: the group, without its cases.
    """

    group: str
    index: int
    case: Case
    about: Case

    def __str__(self) -> str:
        return f"{self.group}[{self.index}]"


def cases_of(path: Path) -> Iterator[Numbered]:
    """The cases of a file, in its order.

    Raises:
      ValueError: it is not of the format.
    """
    tree = json.loads(path.read_text(encoding="utf-8"))
    groups = tree.get("groups") if isinstance(tree, dict) else None
    if not isinstance(groups, dict):
        raise ValueError(f"`{path}` has no object `groups`")
    for name, group in groups.items():
        if not isinstance(group.get("cases"), list):
            raise ValueError(f"group `{name}` of `{path}` has no list `cases`")
        about = {key: value for key, value in group.items() if key != "cases"}
        for index, case in enumerate(group["cases"]):
            yield Numbered(group=name, index=index, case=case, about=about)


def run_case(one: Numbered) -> Verdict:
    """Does what the case describes with automesh, and compares."""
    from tests.conformance.outcomes import Verdict, uncovered

    if one.group in NOT_COVERED:
        return uncovered(NOT_COVERED[one.group])
    for plugin, groups in IN_PLUGINS.values():
        if one.group in groups and not is_installed(plugin):
            return uncovered(WITHOUT[plugin])
    if one.group not in runners():
        return uncovered(f"the group `{one.group}` is not known")
    try:
        return runners()[one.group](one.case, one.about)
    except Exception as error:
        return Verdict(
            status="failed", detail=f"the case cannot be run: {type(error).__name__}: {error}"
        )


@cache
def runners() -> Mapping[str, Callable[[Case, Case], Verdict]]:
    """Group -> the function that runs one of its cases (imports jax)."""
    found: dict[str, Callable[[Case, Case], Verdict]] = {}
    for name in _MODULES:
        if name in IN_PLUGINS and not is_installed(IN_PLUGINS[name][0]):
            continue
        found |= importlib.import_module(f"tests.conformance.groups.{name}").GROUPS
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each case that did not simply pass, counts by group, and a JSON line.

    Returns:
      0 if no case failed, 1 if one did.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=DATA)
    path: Path = parser.parse_args(arguments).file
    try:
        cases = list(cases_of(path))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    counts: dict[str, Counter[str]] = {}
    for one in cases:
        verdict = run_case(one)
        counts.setdefault(one.group, Counter())[verdict.status] += 1
        if verdict.status not in ("passed", "not_covered"):
            why = f" ({verdict.deviation})" if verdict.deviation else ""
            print(f"{verdict.status:9} {one}{why}: {verdict.detail}".splitlines()[0])
        elif verdict.status == "not_covered" and one.group not in NOT_COVERED:
            print(f"{verdict.status} {one}: {verdict.detail}")
    _print_counts(counts)
    total = sum(counts.values(), Counter[str]())
    print(json.dumps({status: total[status] for status in STATUSES}))
    return 1 if total["failed"] else 0


def _print_counts(counts: Mapping[str, Counter[str]]) -> None:
    width = max(map(len, counts), default=5)
    print(f"\n{'group':{width}}  " + "  ".join(f"{status:>11}" for status in STATUSES))
    for group, count in counts.items():
        print(f"{group:{width}}  " + "  ".join(f"{count[status]:11}" for status in STATUSES))
