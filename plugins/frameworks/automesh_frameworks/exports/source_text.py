"""Reads the configuration of a framework: `key=value` words, and Python, which is never executed.

YAML is read by `yaml_text`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import cast

from automesh.errors import UsageError
from automesh.mesh.axes import Scalar
from automesh.reading import Malformed, OutOfBounds, check_values

_WORD = re.compile(
    r"""(?:^|[\s"'])(?:--)?([A-Za-z_][A-Za-z0-9_.]*)=("[^"\n]*"|'[^'\n]*'|[^\s"';\\]+)"""
)


def key_values(text: str) -> dict[str, str]:
    """Reads `key=value` words, as on a command line or in a shell script; the last value of a key
    counts.

    >>> key_values("python -m train base.yml a_b=8 c='x y'  # d=1")
    {'a_b': '8', 'c': 'x y'}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0]
        for match in _WORD.finditer(words):
            found[match[1]] = match[2].strip("\"'")
    return found


def as_size(value: object, what: str) -> int:
    """Reads a size of a mesh: at least 1, or -1.

    Raises:
      UsageError: the value is something else.

    >>> as_size("8", "ici_fsdp_parallelism"), as_size(-1, "data")
    (8, -1)
    """
    number = as_count(value)
    if number is None or (number < 1 and number != -1):
        raise UsageError(f"`{what}` is {value!r}, and must be a whole number above 0, or -1")
    return number


def as_count(value: object) -> int | None:
    """Returns a whole number, from a number or a text; None if it is none."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,12}", value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_scalar(value: object) -> Scalar | None:
    """Returns a boolean, number or text; None if it is something else."""
    return value if isinstance(value, (bool, int, float, str)) else None


def python_tree(text: str) -> ast.Module:
    """Returns the syntax tree of a Python text, which is parsed and never run.

    Raises:
      Malformed: the text is no Python; has the line.
      OutOfBounds: nested too deep, or a number out of all bounds.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Malformed(f"the file is not Python: {error.msg}, line {error.lineno}") from None
    except ValueError as error:
        raise Malformed(f"the file is not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise OutOfBounds("the file is nested too deep for Python's parser") from None
    check_values([node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)])
    return tree


def values_named(tree: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yields the values of `name`: from assignments, keyword arguments, and keys of dicts."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                if any(_is_called(target, name) for target in targets):
                    yield value
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                if _is_called(target, name):
                    yield value
            case ast.keyword(arg=arg, value=value) if arg == name:
                yield value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield value
            case _:
                pass


def _is_called(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Attribute):
        return target.attr == name
    return isinstance(target, ast.Name) and target.id == name


def literal(node: ast.expr) -> object:
    """Returns the value of a literal; None if the node is no literal, or is the literal None.

    >>> literal(ast.parse("(1, -1)", mode="eval").body)
    (1, -1)
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def python_literal(value: object) -> str:
    """Returns a value as Python source with double quotes; a text in it cannot end the literal.

    >>> python_literal(("data",)), python_literal((1, None)), python_literal('a"b')
    ('("data",)', '(1, None)', '"a\\\\"b"')
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        parts = [python_literal(part) for part in cast("tuple[object, ...]", value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return repr(value)


def as_sizes(value: object, what: str) -> tuple[int, ...]:
    """Reads sizes of axes in order.

    Raises:
      UsageError: the value is no sequence of sizes.
    """
    if isinstance(value, (list, tuple)):
        return tuple(as_size(size, what) for size in cast("Sequence[object]", value))
    raise UsageError(f"`{what}` is {value!r}, and must be a sequence of sizes")


def as_strings(value: object, what: str) -> tuple[str, ...]:
    """Reads names of axes in order.

    Raises:
      UsageError: the value is no sequence of texts.
    """
    if isinstance(value, (list, tuple)):
        names = cast("Sequence[object]", value)
        if all(isinstance(name, str) for name in names):
            return tuple(cast("Sequence[str]", names))
    raise UsageError(f"`{what}` is {value!r}, and must be a sequence of names")
