"""The text of a TOML rules file: made anew, or with one rule put in and all comments kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Item, Table

from automesh.mesh.config import Rules
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.rules.tree import tree_of_rule, tree_of_rules

_TITLE = "Written by `automesh search`. `match` is a regular expression for the whole name of a\n"
_TITLE_2 = "# target; the first rule that matches wins.\n"
# Strings and comments are tokens too, so that a `[[rule]]` inside one is passed over.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|^[ \t]*(?P<header>\[\[[ \t]*rule[ \t]*\]\])",
    re.DOTALL | re.MULTILINE,
)


def new_text(rules: Rules) -> str:
    """The text of a new file."""
    tree = tree_of_rules(rules)
    document = tomlkit.document()
    for key in ("schema", "axes", "batch_axes"):
        document.add(key, tomlkit.item(tree[key]))
    blocks = [_new_block(rule, rules.axes_of(rule)) for rule in rules.rules]
    return "\n".join([f"# {_TITLE}{_TITLE_2}{document.as_string()}", *blocks])


def merged_text(
    text: str, rule: MeshRule, axes: tuple[str, ...], *, position: int, replaced: int
) -> str:
    """Puts a rule into the text of a file.

    Args:
      axes: of the rule.
      position: the rule's index in the file as it is now; the number of rules to append.
      replaced: index of the rule that gives way, not below `position`; -1 for none.
    """
    line_end = "\r\n" if "\r\n" in text else "\n"
    starts = _block_starts(text)
    bounds = [*starts, len(text)]
    if replaced >= 0:
        start, end = bounds[replaced], bounds[replaced + 1]
        block = _updated_block(text[start:end], rule, axes)
        if replaced == position:
            return text[:start] + block + text[end:]
        text = text[:start] + text[end:]
    else:
        block = _new_block(rule, axes).replace("\n", line_end)
    if position >= len(starts):
        return text.rstrip("\r\n") + line_end * 2 + block
    return text[: bounds[position]] + block.rstrip("\r\n") + line_end * 2 + text[bounds[position] :]


def count_rules(text: str) -> int:
    """How many `[[rule]]` tables there are."""
    return len(_block_starts(text))


def _block_starts(text: str) -> list[int]:
    """Where each rule begins: at its header, or at the comment lines right above it."""
    starts: list[int] = []
    for token in _TOKEN.finditer(text):
        if token["header"]:
            start = token.start()
            while start > 0:
                above = text.rfind("\n", 0, start - 1) + 1
                if not text[above:start].lstrip().startswith("#"):
                    break
                start = above
            starts.append(start)
    return starts


def _new_block(rule: MeshRule, axes: tuple[str, ...]) -> str:
    tables = tomlkit.aot()
    tables.append(_table(tree_of_rule(rule, axes)))
    document = tomlkit.document()
    document.add("rule", tables)
    return document.as_string()


def _updated_block(block: str, rule: MeshRule, axes: tuple[str, ...]) -> str:
    """The block of the old rule with the new values, its comments kept."""
    document = tomlkit.parse(block)
    rules: Any = document["rule"]
    _update(rules[0], tree_of_rule(rule, axes))
    return document.as_string()


def _update(table: Any, tree: Mapping[str, Any]) -> None:
    for key in [key for key in table if key not in tree]:
        del table[key]
    for key, value in tree.items():
        if key == "evidence" and isinstance(table.get(key), Table):
            _update(table[key], value)
        else:
            table[key] = _item(key, value)


def _table(tree: Mapping[str, Any]) -> Table:
    table = tomlkit.table()
    for key, value in tree.items():
        table.add(key, _item(key, value))
    return table


def _item(key: str, value: Any) -> Item:
    if key == "evidence":
        return _table(value)
    return _inline(value) if isinstance(value, dict) else tomlkit.item(value)


def _inline(values: Mapping[str, Any]) -> Item:
    # tomlkit prints a fresh inline table without spaces inside the braces.
    pairs = [f"{tomlkit.key(key).as_string()} = {_text(value)}" for key, value in values.items()]
    return tomlkit.value(f"{{ {', '.join(pairs)} }}" if pairs else "{}")


def _text(value: Any) -> str:
    return tomlkit.item(value).as_string()
