"""Configurations: a YAML file and `--a.b value` arguments over it, as dataclasses."""

import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from types import NoneType

import yaml


def main(fn, *, args):
    """As Levanter's: what the parser refuses ends the process, what does not decode is raised."""
    (kind,) = inspect.getfullargspec(fn).annotations.values()

    def wrapped():
        args_left, tree = list(args), {}
        if "--config_path" in args_left:
            place = args_left.index("--config_path")
            tree = yaml.safe_load(Path(args_left[place + 1]).read_text())
            del args_left[place : place + 2]
        while args_left:
            key, equals, value = args_left.pop(0).partition("=")
            names = _names(kind)
            if key.removeprefix("--") not in names:
                listed = " ".join(f"[--{name} str]" for name in names)
                print(
                    f"usage: x {listed}\nx: error: unrecognized arguments: {key}", file=sys.stderr
                )
                sys.exit(2)
            _put(
                tree,
                key.removeprefix("--").split("."),
                yaml.safe_load(value if equals else args_left.pop(0)),
            )
        return fn(_decoded(kind, tree, ""))

    return wrapped


def _names(kind, prefix=""):
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        found.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            found += _names(hint, f"{prefix}{name}.")
    return found + ([f"{prefix}type"] if hasattr(kind, "get_choice_name") else [])


def _put(tree, path, value):
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    old = tree.get(path[-1])
    both = isinstance(old, dict) and isinstance(value, dict)
    tree[path[-1]] = {**old, **value} if both else value


def _decoded(kind, tree, where):
    if not dataclasses.is_dataclass(kind):
        if kind is int and not isinstance(tree, int):
            raise ValueError(f"`{where}`: Couldn't parse {tree!r} into an int")
        return tree
    tree = {key: value for key, value in tree.items() if key != "type"}
    hints = typing.get_type_hints(kind)
    if strange := [key for key in tree if key not in hints]:
        raise ValueError(f"`{where}`: The fields `{strange[0]}` are not valid for {kind.__name__}")
    values = {}
    for key, value in tree.items():
        choices = [one for one in typing.get_args(hints[key]) if one is not NoneType]
        values[key] = _decoded(choices[0] if len(choices) == 1 else hints[key], value, key)
    return kind(**values)
