"""docs/api, a page for each public package, made from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from automesh.report.blocks.reportable import Reportable
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "api"
MODULES = ("automesh", "automesh.partition", "automesh.pipeline")
_HEAD = """\
# {module}

{about}

Made from the docstrings by `python -m tests.regenerate.update_golden`; every example here is run
by the tests, on eight virtual CPU devices. Other packages: {others}.

{links}
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
_WIDTH = 88


def public(module: str) -> dict[str, Any]:
    """The public names of a module, sorted, without regard to case; modules left out."""
    found = importlib.import_module(module)
    names = {name: getattr(found, name) for name in sorted(found.__all__, key=str.lower)}
    return {name: one for name, one in names.items() if not inspect.ismodule(one)}


def functions(module: str) -> dict[str, Any]:
    """The public functions of a module."""
    return {name: one for name, one in public(module).items() if inspect.isroutine(one)}


def page(module: str) -> str:
    """The page of a package."""
    names = public(module)
    links = ", ".join(f"[`{name}`](#{_anchor(module, name)})" for name in names)
    others = ", ".join(f"[{one}]({path_of(one).name})" for one in MODULES if one != module)
    about = inspect.getdoc(importlib.import_module(module)) or ""
    head = _HEAD.format(module=module, about=about, links=links, others=others)
    return "\n".join([head, *(_entry(module, name, one) for name, one in names.items())])


def path_of(module: str) -> Path:
    """The file of a package's page."""
    return FOLDER / f"{module.rpartition('.')[2]}.md"


def write() -> None:
    """Writes the pages anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        path_of(module).write_text(page(module), encoding="utf-8")


def _anchor(module: str, name: str) -> str:
    # As GitHub makes them of headings.
    return re.sub(r"[^\w-]", "", f"{module}.{name}".lower())


def _entry(module: str, name: str, one: Any) -> str:
    lines = [f"## {module}.{name}", ""]
    if inspect.isclass(one):
        lines += _class_lines(name, one)
    elif inspect.isroutine(one):
        lines += _callable_lines(name, one)
    else:
        about = _alias_docs(module.replace(".", "/")).get(name, "")
        lines += [f"`{_plain(repr(one))}`", "", *([about, ""] if about else [])]
    return "\n".join(lines)


def _class_lines(name: str, one: type) -> list[str]:
    lines: list[str] = []
    if issubclass(one, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in one)
        lines += [f"One of {members}.", ""]
    elif issubclass(one, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in one.__bases__)
        lines += [f"An exception; derives from {bases}.", ""]
    elif dataclasses.is_dataclass(one):
        made = inspect.signature(one).replace(return_annotation=inspect.Signature.empty)
        lines += _fenced(_call(name, made))
    lines += _doc_lines(one)
    for method, value in _methods(one):
        lines += [f"### {name}.{method}", ""]
        if isinstance(value, property):
            lines += ["A property.", "", *_doc_lines(value)]
        else:
            lines += _callable_lines(method, value)
    return lines


def _methods(one: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that say what they do, its own first."""
    if issubclass(one, (enum.Enum, Exception)):
        return
    found = dict(vars(one))
    if issubclass(one, Reportable):
        found |= {name: value for name, value in vars(Reportable).items() if name not in found}
    for name, value in found.items():
        held = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        is_method = isinstance(held, property) or inspect.isroutine(held)
        if not name.startswith("_") and is_method and inspect.getdoc(held):
            yield name, held


def _callable_lines(name: str, one: Any) -> list[str]:
    return [*_fenced(_call(name, inspect.signature(one))), *_doc_lines(one)]


def _call(name: str, signature: inspect.Signature) -> str:
    """A signature on one line, or with a line for each parameter."""
    signature = signature.replace(
        parameters=[
            one.replace(default=_Shown(one.default)) if _is_long(one.default) else one
            for one in signature.parameters.values()
            if one.name != "self"
        ]
    )
    text = _plain(f"{name}{signature}")
    if len(text) <= _WIDTH:
        return text
    inside = _plain(str(signature.replace(return_annotation=inspect.Signature.empty)))[1:-1]
    returns = text[text.rindex(" -> ") :] if " -> " in text else ""
    lines = "\n".join(f"    {part}," for part in _split(inside))
    return f"{name}(\n{lines}\n){returns}"


class _Shown:
    """A default value that says no more than its type."""

    def __init__(self, value: object) -> None:
        self.name = type(value).__name__

    def __repr__(self) -> str:
        return f"{self.name}(...)"


def _is_long(default: Any) -> bool:
    return dataclasses.is_dataclass(default) and not isinstance(default, type)


@functools.cache
def _alias_docs(folder: str) -> dict[str, str]:
    """What stands as a string below the assignments of a package's modules."""
    found: dict[str, str] = {}
    for path in sorted((FOLDER.parent.parent / folder).rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for one, below in itertools.pairwise(body):
            if not isinstance(one, (ast.Assign, ast.AnnAssign)) or not isinstance(below, ast.Expr):
                continue
            target = one.targets[0] if isinstance(one, ast.Assign) else one.target
            if isinstance(target, ast.Name) and isinstance(below.value, ast.Constant):
                found[target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _split(text: str) -> list[str]:
    """Parts between the commas that no bracket or quote holds."""
    parts, depth, quoted = [""], 0, ""
    for sign in text:
        if quoted:
            quoted = "" if sign == quoted else quoted
        elif sign in "'\"":
            quoted = sign
        depth += not quoted and (sign in "([{")
        depth -= not quoted and (sign in ")]}")
        if sign == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _plain(text: str) -> str:
    """Without the quotes that postponed annotations have, and without addresses and paths."""
    text = re.sub(r"(?<=: )'([^']+)'|(?<=-> )'([^']+)'", lambda found: found[1] or found[2], text)
    return re.sub(r"<(?:function |class ')?([\w.]+)[^>]*>", r"\1", text)


def _fenced(code: str) -> list[str]:
    return ["```python", code, "```", ""]


def _doc_lines(one: Any) -> list[str]:
    """A docstring as Markdown: its sections are lists, its examples code."""
    lines: list[str] = []
    for title, text in _sections(inspect.getdoc(one) or ""):
        if title == "Example":
            lines += _example_lines(text)
        elif title:
            lines += [f"{title}:", "", *_items(text), ""]
        elif text.strip():
            lines += [text.strip(), ""]
    return lines


def _sections(doc: str) -> list[tuple[str, str]]:
    """Pairs of a section's title, empty for what comes first, and its text, dedented."""
    heads = "|".join(_SECTIONS)
    pieces = re.split(rf"^({heads})s?:\n", doc, flags=re.MULTILINE)
    titles = ["", *pieces[1::2]]
    return [
        (title, textwrap.dedent(text).strip("\n"))
        for title, text in zip(titles, pieces[::2], strict=True)
    ]


def _example_lines(text: str) -> list[str]:
    """Prose as it is, code and what it prints in fences."""
    lines: list[str] = []
    for block in re.split(r"\n\n+", text):
        if ">>>" in block:
            before, _, code = block.partition(">>>")
            lines += [before.strip(), ""] if before.strip() else []
            lines += _fenced(f">>>{code}")
        elif block.strip():
            lines += [block.strip(), ""]
    return lines


def _items(text: str) -> list[str]:
    """`name: what it is`, with lines that go on indented, as a list."""
    joined = re.sub(r"\n\s+", " ", text)
    items: list[str] = []
    for line in joined.splitlines():
        found = re.match(r"([\w*, .]+?): (.*)", line)
        if found:
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            items.append(f"- {names}: {found[2]}")
        elif items and line.strip() and items[-1].startswith("- "):
            items.append(f"- {line.strip()}")
        else:
            items.append(line.strip())
    return items
