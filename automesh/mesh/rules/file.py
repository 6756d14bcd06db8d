"""`mesh_rules.toml` (or `.json`): read, and merged into without losing what people wrote there."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout
from tomlkit.exceptions import TOMLKitError

from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.rules.rule import MeshRule, escape, first_match
from automesh.mesh.rules.text import count_rules, merged_text, new_text
from automesh.mesh.rules.tree import rules_from_tree, tree_of_rules
from automesh.mesh.strict_files import parse_tree, read_text

LOCK_WAIT_S = 60.0


def read_rules(path: Path | str) -> Rules:
    """Reads a rules file: JSON if its name ends in `.json`, else TOML.

    Raises:
      UsageError: unreadable, or wrong; names the file, the key, what was expected and what was got.
    """
    path = Path(path)
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
    path = path.resolve()
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder, not a file", hint="name a file with --rules")
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
    path = path.resolve()
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
        _write(path, format_rules(merged, as_json=as_json))
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
        _write(path, format_rules(merged, as_json=True))
        return merged
    text = _merged(text, before, rule, position, replaced)
    if not _says(text, merged, path):
        raise UsageError(
            f"`{path}` is laid out in a way that a rule cannot be merged into",
            hint="write each rule as a `[[rule]]` table, or choose another file with --rules",
        )
    _write(path, text)
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


def _write(path: Path, text: str) -> None:
    """Replaces the file in one step; only the holder of the lock may call it."""
    # One fixed name: what a killed writer left behind is overwritten, not collected.
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        temporary.chmod(path.stat().st_mode & 0o777)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
