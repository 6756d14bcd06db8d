"""`mesh_rules.toml` (or `.json`): read, and merged into without losing what people wrote there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit
from filelock import FileLock, Timeout
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.rules.rule import MeshRule, escape, first_match
from automesh.mesh.rules.tree import rules_from_tree, tree_of_rule, tree_of_rules
from automesh.mesh.strict_files import parse_tree, replace_file
from automesh.reading import check_regular, kind_of_file, read_text, real_path
from automesh.user_text import user_path

# The text of a TOML file: made anew, or with one rule put in and all comments kept.

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


LOCK_WAIT_S = 60.0


def read_rules(path: Path | str) -> Rules:
    """Reads a rules file: JSON if its name ends in `.json`, else TOML.

    Raises:
      UsageError: unreadable, or wrong; names the file, the key, what was expected and what was got.
    """
    path = user_path(path)
    return rules_from_tree(parse_tree(read_text(path), source=path), source=path)


def format_rules(rules: Rules, *, as_json: bool = False) -> str:
    """The text of a new rules file, which is read back as an equal value."""
    if as_json:
        return json.dumps(tree_of_rules(rules), indent=2, ensure_ascii=False) + "\n"
    return new_text(rules)


def check_mergeable(path: Path) -> None:
    """Makes sure, before a long search, that `merge_rule` will not fail.

    Raises:
      UsageError: the file is broken, or cannot be written.
    """
    path = real_path(user_path(path))
    if kind := kind_of_file(path):
        raise UsageError(f"`{path}` is {kind}, not a file", hint="name a file with --rules")
    check_regular(path)
    if path.exists():
        try:
            read_rules(path)
        except UsageError as error:
            hint = error.hint or "mend it (it is left as it is), or choose another with --rules"
            raise UsageError(error.message, hint=hint) from None
    existing = path if path.exists() else path.parent
    if not path.parent.is_dir():
        raise UsageError(
            f"the folder of `{path}` does not exist",
            hint="make the folder, or choose another file with --rules",
        )
    if not (os.access(existing, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UsageError(f"`{path}` cannot be written", hint="choose another file with --rules")


def merge_rule(path: Path, rule: MeshRule, *, selector: str) -> Rules:
    """Puts a rule where it decides for `selector`, and keeps everything else in the file.

    An existing rule for exactly `selector` is replaced. The rule goes before the first one that
    matches `selector`, or to the end. Safe with other writers, and against a kill at any time.

    Args:
      rule: with axes of its own. They are those of a file that does not exist yet; in another one
        they stand with the rule, unless they are those of the file.

    Returns:
      What the file now says.

    Raises:
      UsageError: the file is broken (and is left alone), or cannot be written.
    """
    path = real_path(user_path(path))
    # flock: the kernel releases it when its holder is killed.
    lock = FileLock(str(path.with_name(f".{path.name}.lock")))
    try:
        with lock.acquire(timeout=LOCK_WAIT_S):
            return _merge(path, rule, selector)
    except Timeout:
        raise UsageError(
            f"another process has kept `{path}` locked for {LOCK_WAIT_S:.0f} s"
        ) from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"`{path}` cannot be written: {reason}", hint="choose another file with --rules"
        ) from None


def _merge(path: Path, rule: MeshRule, selector: str) -> Rules:
    as_json = path.suffix == ".json"
    if not path.exists():
        empty = Rules(axes=rule.axes, batch_axes=rule.batch_axes or ())
        merged = replace(empty, rules=(_in_file(rule, empty),))
        replace_file(path, format_rules(merged, as_json=as_json))
        return merged
    text = read_text(path)
    before = rules_from_tree(parse_tree(text, source=path), source=path)
    rule = _in_file(rule, before)
    kept = list(before.rules)
    position = first_match(kept, selector)
    exact = [index for index, old in enumerate(kept) if old.match in _exact(selector)]
    replaced = exact[0] if exact else -1
    if exact:
        del kept[replaced]
    kept.insert(position, rule)
    merged = replace(before, rules=tuple(kept))
    if as_json:
        replace_file(path, format_rules(merged, as_json=True))
        return merged
    text = _merged(text, before, rule, position, replaced)
    if not _says(text, merged, path):
        raise UsageError(
            f"`{path}` is laid out in a way that a rule cannot be merged into",
            hint="write each rule as a `[[rule]]` table, or choose another file with --rules",
        )
    replace_file(path, text)
    return merged


def _merged(text: str, before: Rules, rule: MeshRule, position: int, replaced: int) -> str:
    """The new text; empty if the rules are not all written as `[[rule]]` tables."""
    if count_rules(text) != len(before.rules):
        return ""
    try:
        axes = before.axes_of(rule)
        return merged_text(text, rule, axes, position=position, replaced=replaced)
    except TOMLKitError:
        return ""


def _says(text: str, rules: Rules, path: Path) -> bool:
    try:
        return rules_from_tree(parse_tree(text, source=path), source=path) == rules
    except UsageError:
        return False


def _exact(selector: str) -> tuple[str, ...]:
    return (escape(selector), re.escape(selector))


def _in_file(rule: MeshRule, rules: Rules) -> MeshRule:
    """A rule without what the file says for all its rules."""
    own = rule.axes if rule.axes != rules.axes else ()
    bare = replace(rule, axes=own, batch_axes=None)
    is_usual = rule.batch_axes in (None, rules.batch_axes_of(bare))
    return bare if is_usual else replace(bare, batch_axes=rule.batch_axes)
