"""Reads `mesh_rules.toml` (or `.json`), and merges rules into it without losing users' text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit
from filelock import Timeout
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from automesh import files
from automesh.errors import UsageError, unwritable
from automesh.limits import EDIT_SETTLES_S, EDITED_MEANWHILE, PEOPLE_FILE_BYTES, RULES_LOCK_S
from automesh.mesh.config import Rules
from automesh.mesh.evidence import NO_EVIDENCE
from automesh.mesh.rules.rule import MeshRule, escape, first_match
from automesh.mesh.rules.tree import rules_from_tree, tree_of_rule, tree_of_rules
from automesh.mesh.strict_files import parse_tree
from automesh.reading import check_regular, decoded, kind_of_file, read_bytes, read_text
from automesh.texts.user_text import user_path

# Writes the text of a TOML file: a new one, or with one rule added and all comments kept.

_TITLE = "Written by `{by}`. `match` is a regular expression for the whole name of a\n"
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


def new_text(rules: Rules, *, by: str = "automesh search") -> str:
    """Returns the text of a new file; `by` is the command that writes it."""
    tree = tree_of_rules(rules)
    document = tomlkit.document()
    for key in ("schema", "axes", "batch_axes"):
        document.add(key, tomlkit.item(tree[key]))
    blocks = [_new_block(rule, rules.axes_of(rule)) for rule in rules.rules]
    return "\n".join([f"# {_TITLE.format(by=by)}{_TITLE_2}{document.as_string()}", *blocks])


def merged_text(
    text: str, rule: MeshRule, axes: tuple[str, ...], *, position: int, replaced: int
) -> str:
    """Puts a rule into the text of a file.

    Args:
      axes: of the rule.
      position: the rule's index in the file as it is now; the number of rules to append.
      replaced: index of the replaced rule, not below `position`; -1 for none.
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
    """Counts the `[[rule]]` tables."""
    return len(_block_starts(text))


def _block_starts(text: str) -> list[int]:
    """Finds where each rule begins: at its header, or at the comment lines right above it."""
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
    """Returns the block of the old rule with the new values and the old comments."""
    document = tomlkit.parse(block)
    rules: Any = document["rule"]
    _update(rules[0], tree_of_rule(rule, axes))
    return document.as_string()


def _update(table: Any, tree: Mapping[str, Any]) -> None:
    for key in [key for key in table if key not in tree]:
        del table[key]
    for key, value in tree.items():
        if key in _TABLES and isinstance(table.get(key), Table):
            _update(table[key], value)
            # The first pattern that matches decides, so that the order of patterns is theirs.
            if list(table[key]) != list(value):
                table[key] = _item(key, value)
        else:
            table[key] = _item(key, value)


def _table(tree: Mapping[str, Any]) -> Table:
    table = tomlkit.table()
    for key, value in tree.items():
        table.add(key, _item(key, value))
    return table


# Nested tables of a rule that get their own lines; all others are written in one line.
_TABLES = ("shardings", "evidence")


def _item(key: str, value: Any) -> Item:
    if key in _TABLES:
        return _table(value)
    return _inline(value) if isinstance(value, dict) else tomlkit.item(value)


def _inline(values: Mapping[str, Any]) -> Item:
    # tomlkit prints a fresh inline table without spaces inside the braces.
    pairs = [f"{tomlkit.key(key).as_string()} = {_text(value)}" for key, value in values.items()]
    return tomlkit.value(f"{{ {', '.join(pairs)} }}" if pairs else "{}")


def _text(value: Any) -> str:
    return tomlkit.item(value).as_string()


_MOST_LINKS = 40  # the kernel's limit of links in a row
_ANOTHER = "choose another file with --rules"


def read_rules(path: Path | str) -> Rules:
    """Reads a rules file: JSON if its name ends in `.json`, else TOML.

    Raises:
      UsageError: unreadable, or wrong; names the file, the key, what was expected and what was got.
    """
    path = user_path(path)
    return rules_from_tree(parse_tree(read_text(path), source=path), source=path)


def parse_rules(text: str, *, name: str) -> Rules:
    """Reads the text of a rules file.

    Args:
      name: of the file, for messages; JSON if it ends in `.json`.

    Raises:
      UsageError: as `read_rules`.
    """
    source = Path(name)
    return rules_from_tree(parse_tree(text, source=source), source=source)


def rules_of(rule: MeshRule) -> Rules:
    """Makes the content of a new file with one rule, whose axes become those of the file."""
    empty = Rules(axes=rule.axes, batch_axes=rule.batch_axes or ())
    return replace(empty, rules=(_without_defaults(rule, empty),))


def format_rules(rules: Rules, *, as_json: bool = False, by: str = "automesh search") -> str:
    """Returns the text of a new rules file by the command `by`; it reads back as an equal value."""
    if as_json:
        return json.dumps(tree_of_rules(rules), indent=2, ensure_ascii=False) + "\n"
    return new_text(rules, by=by)


class RuleEdited(UsageError):
    """A user has edited the rule that a merge would replace while the search ran."""


def check_mergeable(path: Path) -> tuple[MeshRule, ...]:
    """Checks, before a long search, that `merge_rule` will not fail.

    Returns:
      The rules in the file; with them `merge_rule` notices later edits.

    Raises:
      UsageError: the file is broken, or cannot be written.
    """
    path = user_path(path)
    if kind := kind_of_file(path):
        raise UsageError(f"`{path}` is {kind}, not a file", hint="name a file with --rules")
    check_regular(path)
    path = _follow_links(path)
    if not path.parent.is_dir():
        raise UsageError(
            f"the folder of `{path}` does not exist",
            hint="make the folder, or choose another file with --rules",
        )
    try:
        files.check_place(path)
        return read_rules(path).rules if path.exists() else ()
    except OSError as error:
        raise unwritable(path, error, hint=_ANOTHER) from None
    except UsageError as error:
        hint = error.hint or "mend it (it is left as it is), or choose another with --rules"
        raise UsageError(error.message, hint=hint) from None


def merge_rule(
    path: Path, rule: MeshRule, *, selector: str, before: Sequence[MeshRule] | None = None
) -> Rules:
    """Adds a rule at the position where it decides for `selector`, and keeps the rest of the file.

    An existing rule for exactly `selector` is replaced. The rule goes before the first one that
    matches `selector`, or to the end. This is safe with other writers, and if the process is killed
    at any time; edits that are saved meanwhile are kept.

    Args:
      rule: with its own axes. A new file gets these axes; in an existing one the rule keeps them,
        unless they are those of the file.
      before: the rules in the file when the search began; None if unknown.

    Returns:
      The content of the file.

    Raises:
      RuleEdited: since `before`, somebody has written a rule for `selector` by hand.
      UsageError: the file is broken (and is left alone), or cannot be written.
    """
    path = user_path(path)
    try:
        path = _follow_links(path)
        with files.lock_beside(path, timeout_s=RULES_LOCK_S):
            for _ in range(EDITED_MEANWHILE):
                merged = _merge(path, rule, selector, before)
                if merged is not None:
                    return merged
    except Timeout:
        raise UsageError(
            f"another process has kept `{path}` locked for {RULES_LOCK_S:.0f} s"
        ) from None
    except OSError as error:
        raise unwritable(path, error, hint=_ANOTHER) from None
    raise UsageError(
        f"`{path}` was written by another program again and again, {EDITED_MEANWHILE} times",
        hint="find that program, or choose another file with --rules",
    )


def merged_rules(text: str, rule: MeshRule, *, selector: str, source: Path) -> str:
    """Returns the text that `merge_rule` would make of a file; writes nothing.

    Args:
      source: the name of the file, for messages; a `.json` is read and written as JSON.

    Raises:
      UsageError: the text is no rules file, or cannot be merged into.
    """
    found = rules_from_tree(parse_tree(text, source=source), source=source)
    return _with_rule(source, text, found, rule, selector)[1]


def _follow_links(path: Path) -> Path:
    """Follows links to the file itself, so that the links stay.

    Raises:
      UsageError: an account that may not decide where we write has made the link.
    """
    seen = path.absolute()
    for _ in range(_MOST_LINKS):
        if not seen.is_symlink():
            # The user has chosen links in the folders of the path.
            return seen.parent.resolve() / seen.name
        if files.is_foreign_link(seen):
            raise UsageError(
                f"`{seen}` is a link that another account made, which could lead anywhere",
                hint="remove the link, or name the file itself with --rules",
            )
        seen = seen.parent / seen.readlink()
    raise UsageError(f"`{path}` is a link that leads in a circle", hint=_ANOTHER)


def _merge(
    path: Path, rule: MeshRule, selector: str, before: Sequence[MeshRule] | None
) -> Rules | None:
    """Merges once; None if the file changed meanwhile, and nothing was written."""
    as_json = path.suffix == ".json"
    check_regular(path)
    if not path.exists():
        merged = rules_of(rule)
        made = files.write_new(path, format_rules(merged, as_json=as_json))
        return merged if made else None
    raw = read_bytes(path, limit_bytes=PEOPLE_FILE_BYTES)
    try:
        text = decoded(raw, path)
        found = rules_from_tree(parse_tree(text, source=path), source=path)
    except UsageError:
        if _is_being_written(path, raw):
            return None
        raise
    if before is not None:
        _check_not_edited(path, selector, before, found.rules)
    merged, new = _with_rule(path, text, found, rule, selector)
    return merged if files.replace_unchanged(path, new, expected=raw) else None


def _is_being_written(path: Path, raw: bytes) -> bool:
    """Whether the text may be incomplete, because an editor is just writing the file."""
    time.sleep(EDIT_SETTLES_S)
    return read_bytes(path, limit_bytes=PEOPLE_FILE_BYTES) != raw


def _check_not_edited(
    path: Path, selector: str, before: Sequence[MeshRule], now: Sequence[MeshRule]
) -> None:
    """Checks that no rule is replaced that a user has edited since `before`.

    A rule of another search has new evidence; an edited rule keeps its old evidence.
    """
    old, new = _for_exactly(before, selector), _for_exactly(now, selector)
    if new is None or new == old:
        return
    if new.evidence == NO_EVIDENCE or (old is not None and new.evidence == old.evidence):
        raise RuleEdited(
            f"the rule for {selector} in `{path}` was edited while the search ran, and stays",
            hint="run the same command again to replace it, or choose another file with --rules",
        )


def _for_exactly(rules: Sequence[MeshRule], selector: str) -> MeshRule | None:
    return next((rule for rule in rules if rule.match in _exact(selector)), None)


def _with_rule(
    path: Path, text: str, before: Rules, rule: MeshRule, selector: str
) -> tuple[Rules, str]:
    """Returns the content of a file with the rule merged into it, and its text.

    Raises:
      UsageError: no rule can be merged into the text.
    """
    rule = _without_defaults(rule, before)
    kept = list(before.rules)
    position = first_match(kept, selector)
    exact = [index for index, old in enumerate(kept) if old.match in _exact(selector)]
    replaced = exact[0] if exact else -1
    if exact:
        del kept[replaced]
    kept.insert(position, rule)
    merged = replace(before, rules=tuple(kept))
    if path.suffix == ".json":
        return merged, format_rules(merged, as_json=True)
    new = _merged(text, before, rule, position, replaced)
    if not _says(new, merged, path):
        raise UsageError(
            f"`{path}` is laid out in a way that a rule cannot be merged into",
            hint="write each rule as a `[[rule]]` table, or choose another file with --rules",
        )
    return merged, new


def _merged(text: str, before: Rules, rule: MeshRule, position: int, replaced: int) -> str:
    """Returns the new text; empty if not all rules are written as `[[rule]]` tables."""
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


def _without_defaults(rule: MeshRule, rules: Rules) -> MeshRule:
    """Returns a rule without the values that the file states for all its rules."""
    own = rule.axes if rule.axes != rules.axes else ()
    bare = replace(rule, axes=own, batch_axes=None)
    is_usual = rule.batch_axes in (None, rules.batch_axes_of(bare))
    return bare if is_usual else replace(bare, batch_axes=rule.batch_axes)
