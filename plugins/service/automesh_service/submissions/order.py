"""An order: a script of a bundle, with the options of the search. It is checked when the service
receives it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from automesh import limits
from automesh.errors import UsageError
from automesh.jsonio import to_json
from automesh.options.table import SEARCH
from automesh.texts.user_text import check_text
from automesh.units import parse_duration

_ENTRY = re.compile(r"(?P<path>[^:\0]+\.py)(?::(?P<function>[A-Za-z_]\w*))?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._:@*?-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One search that a user orders.

    Attributes:
      entry: `train.py` or `train.py:make_step`, its path relative to the bundle's folder.
      args: the script's own arguments.
      targets: as for `--target`; at least one.
      space: name of a shipped search space, or the path of a TOML file in the bundle; empty for the
        default.
      budget: time for each run of the search, as `10m`.
      baseline, top, timeout, step, split, xla, reserve_hbm: as for the options of `automesh
        search`.
      hardware: path of a TOML file in the bundle; empty for none.
      needs: the labels that a host must have to run the search; an agent declares the labels of its
        host.
    """

    entry: str
    args: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("local",)
    space: str = ""
    budget: str = "10m"
    baseline: str = ""
    top: int = 0
    timeout: str = ""
    step: str = ""
    split: tuple[str, ...] = ()
    xla: tuple[str, ...] = ()
    reserve_hbm: str = ""
    hardware: str = ""
    needs: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """The path of the script in the bundle."""
        found = _ENTRY.fullmatch(self.entry)
        return found["path"] if found else self.entry

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the bundle that the order names."""
        own = [one for one in (self.space, self.hardware) if one.endswith(".toml")]
        return (self.script, *own)

    def to_json(self) -> dict[str, Any]:
        """Returns the order as JSON; empty values that former versions do not have are left out."""
        found: dict[str, Any] = to_json(self, Order)
        return {name: value for name, value in found.items() if value or name != "needs"}

    def with_budget(self, budget: str) -> Order:
        """Returns the same order with another budget, which is checked."""
        return checked(replace(self, budget=budget))


def checked(order: Order) -> Order:
    """Returns the order, if it may be run at all.

    Raises:
      UsageError: names what is wrong.
    """
    words = [word for one in fields(order) for word in _words(getattr(order, one.name))]
    if len(words) > limits.ORDER_WORDS:
        raise UsageError(f"the order has more than {limits.ORDER_WORDS} words")
    for word in words:
        if len(check_text(word)) > limits.ORDER_CHARS:
            raise UsageError(f"`{word[:20]}...` has more than {limits.ORDER_CHARS} characters")
    if not _ENTRY.fullmatch(order.entry):
        raise UsageError(
            f"`{order.entry}` is no script of the bundle",
            hint="write `train.py` or `train.py:make_step`, relative to the bundle's folder",
        )
    for name in order.files:
        check_inside(name)
    if order.space and not order.space.endswith(".toml") and not _NAME.fullmatch(order.space):
        raise UsageError(
            f"`{order.space}` is no search space: name a shipped one, or a TOML file of the bundle"
        )
    if order.hardware and not order.hardware.endswith(".toml"):
        raise UsageError(f"`{order.hardware}` is no TOML file of the bundle")
    if not order.targets or any(not one.strip() for one in order.targets):
        raise UsageError("the order names no target", hint="`local` are the attached devices")
    for need in order.needs:
        check_label(need)
    if order.top < 0:
        raise UsageError(f"`top` is {order.top}; at least one finalist must be measured")
    if order.top > limits.ORDER_TOP:
        raise UsageError(f"`top` is more than the {limits.ORDER_TOP} finalists that are measured")
    if parse_duration(order.budget) > limits.LONGEST_BUDGET_S:
        raise UsageError(f"`{order.budget}` is longer than the week that a search may take here")
    return order


def _words(value: str | int | tuple[str, ...]) -> list[str]:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, tuple) else []


def check_label(text: str) -> str:
    """Checks a label: one word for something that a host has and a submission needs.

    Raises:
      UsageError: the text is no label.
    """
    if not _LABEL.fullmatch(text):
        raise UsageError(
            f"`{text}` is no word for what a host has",
            hint="write letters, digits, dots, dashes and colons, such as gpu-h100-8",
        )
    return text


def check_pattern(text: str) -> str:
    """Checks a pattern of targets, such as `cpu:*`.

    Raises:
      UsageError: the text is no pattern.
    """
    if not _PATTERN.fullmatch(text):
        raise UsageError(
            f"`{text}` is no pattern of targets", hint="write `cpu:*`, `tpu-v5p-*` or `local`"
        )
    return text


def check_inside(name: str) -> str:
    """Checks the path of a file in a bundle.

    Raises:
      UsageError: it is absolute, leads out of the folder, or would be an option of a command.
    """
    parts = name.split("/")
    if (
        name.startswith(("/", "~", "-"))  # A command would read a name with a dash as an option.
        or "\\" in name
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise UsageError(
            f"`{name}` is no path inside of the bundle",
            hint="write it relative to the bundle's folder, without `..` or a dash in front",
        )
    return name


def words_of(order: Order, folder: Path) -> list[str]:
    """Returns the command line that runs an order; it is started in the folder of its bundle.

    Args:
      folder: the folder for the results of the search.
    """
    # `-m` alone would look for modules in the bundle first. The process of the search runs none of
    # the bundle's code; only its workers do.
    words = [sys.executable, "-P", "-m", "automesh", "search", order.entry]
    for option in SEARCH:
        if not option.has_order:
            continue
        value = order.targets if option.name == "target" else getattr(order, option.name)
        for one in value if isinstance(value, tuple) else [value]:
            # Name and value as one word: a value that begins with a dash is then no option of its
            # own.
            words += [f"--{option.word}={one}"] if one else []
    words += [f"--results={folder / 'results'}", f"--rules={folder / 'mesh_rules.toml'}", "--json"]
    return [*words, "--", *order.args] if order.args else words
