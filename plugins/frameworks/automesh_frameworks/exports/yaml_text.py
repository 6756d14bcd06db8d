"""Reads YAML that anybody may have written, within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from automesh.limits import NESTING, YAML_NUMBER_CHARS, YAML_VALUES
from automesh.reading import Malformed, OutOfBounds, check_values

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SHOWN_CHARS = 60
# What PyYAML raises, besides errors of its own, for a value that is not what its tag says, as in
# `!!int ""`, `!!bool maybe` or `!!timestamp x`, and for a number that no float holds.
_OF_VALUES = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)


def yaml_tree(text: str) -> Mapping[str, Any]:
    """Returns the mapping in a YAML text; empty if the text contains something else.

    Raises:
      Malformed: the text is no YAML; has the line.
      OutOfBounds: nested too deep, a number out of all bounds, or aliases that stand for too much.
    """
    try:
        tree = _values_of(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise Malformed(f"the file is not YAML: {error.problem}{line}") from None
    except yaml.YAMLError as error:
        raise Malformed(f"the file is not YAML: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    check_values(tree)
    return cast("Mapping[str, Any]", tree) if isinstance(tree, Mapping) else {}


def _values_of(text: str) -> Any:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        _Bounds().check(root, 0)
        return loader.construct_document(root)
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, which names a value that is not what its tag says."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _OF_VALUES:
            kind = node.tag.rpartition(":")[2]
            shown = f"`{str(node.value)[:_SHOWN_CHARS]}`"
            raise Malformed(f"the file is not YAML: {shown} is no {kind}{_line_of(node)}") from None


@dataclass(slots=True)
class _Bounds:
    """The check of a text's nodes before values are made of them.

    A node that is named (`&a`) can be used again (`*a`) inside of another one that is used again:
    ten lines then stand for a million values. Making them is quick, as they are shared, but whoever
    walks through them or prints them never ends.
    """

    # By the address of a node: how many values it stands for, and how deep they are nested; None
    # while its parts are being looked at.
    _known: dict[int, tuple[int, int] | None] = field(default_factory=dict[int, Any])

    def check(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """Returns how many values a node stands for, and how deep they are nested.

        Raises:
          OutOfBounds: too many, too deep, a number with too many digits, or a node in itself.
        """
        if depth > NESTING:
            raise _too_deep()
        if id(node) in self._known:
            known = self._known[id(node)]
            if known is None:
                raise OutOfBounds(f"a value contains itself{_line_of(node)}")
            return known
        self._known[id(node)] = None
        count, height = 1, 0
        for part in _parts_of(node):
            more, below = self.check(part, depth + 1)
            count, height = count + more, max(height, below + 1)
        if count > YAML_VALUES:
            raise OutOfBounds(f"more than {YAML_VALUES:,} values, aliases included{_line_of(node)}")
        if height > NESTING:
            raise _too_deep()
        self._known[id(node)] = count, height
        return count, height


def _parts_of(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if node.tag in _NUMBERS and len(node.value) > YAML_NUMBER_CHARS:
        # `1:1:1:...` is a number as well, which takes as long as the square of its length.
        raise OutOfBounds(f"a number of {len(node.value):,} characters{_line_of(node)}")
    return []


def _too_deep() -> OutOfBounds:
    return OutOfBounds(f"nested more than {NESTING} deep")


def _line_of(node: yaml.Node) -> str:
    return f", line {node.start_mark.line + 1}" if node.start_mark else ""
