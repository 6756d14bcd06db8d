"""`automesh check-script`: which dimensions must be split alike, and what each array is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from automesh.program.infer.nouns import ArrayClasses, DimensionClass, StepClasses
from automesh.report.script_check.names import NUMBER, argument_end, common_name, shorter
from automesh.report.words import count
from automesh.texts.terminal import clean

_MOST_CLASSES = 16
_MOST_NAMES = 4
Lines = list[tuple[str, str]]


def class_lines(classes: StepClasses, *, show_all: bool) -> Lines:
    """Lists each class with its arrays and their roles, why it stays whole, and notices.

    Args:
      show_all: all classes and arrays; else the first ones, of which most numbers are.
    """
    names = shorter([one.name for one in classes.arguments])
    arguments = [
        replace(one, name=name) for one, name in zip(classes.arguments, names, strict=True)
    ]
    classes = replace(classes, arguments=tuple(arguments))
    shown = classes.classes if show_all else classes.classes[:_MOST_CLASSES]
    said = [_of_class(one, classes, show_all) for one in shown]
    if len(shown) < len(classes.classes):
        more = count(len(classes.classes) - len(shown), "smaller one")
        said.append(f"{more}, not shown: --all shows each")
    lines = _labelled("classes", said)
    lines += _labelled("roles", _of_roles(classes, show_all))
    lines += _labelled("inside", _of_inner(classes))
    return lines + _labelled("mind", [clean(one.text) for one in classes.cautions])


def _labelled(label: str, said: Sequence[str]) -> Lines:
    return list(zip([label, *[""] * len(said)], said))


def _of_class(one: DimensionClass, classes: StepClasses, show_all: bool) -> str:
    members = [
        (array.name, place)
        for array in _owners(classes)
        for place, name in enumerate(array.dims)
        if name == one.name
    ]
    named = _listed(members, show_all) if members else "in no argument"
    pieces = ""
    if one.pieces:
        parts = " + ".join(f"{name} {size:,}".strip() for name, size in one.pieces)
        pieces = f" ({clean(parts)} end to end)"
    whole = f"; whole: {one.whole}" if one.whole else ""
    cure = f" ({one.cure})" if one.cure else ""
    return f"{clean(one.name)} {one.size:,}{pieces}: {named}{whole}{cure}"


def _owners(classes: StepClasses) -> list[ArrayClasses]:
    """Returns all arrays except moments and copies, which have the classes of their parameters."""
    return [one for one in (*classes.arguments, *classes.held) if one.of is None]


def _listed(members: Iterable[tuple[str, int | None]], show_all: bool) -> str:
    """Lists names of arrays or dimensions, those that differ in numbers of layers as one."""
    groups: dict[tuple[str, str, int | None], list[str]] = {}
    for name, place in members:
        start = argument_end(name)
        key = (name[:start], NUMBER.sub("#", name[start:]), place)
        groups.setdefault(key, []).append(name if place is None else f"{name}.{place}")
    rows = [clean(common_name(group)) for group in groups.values()]
    if show_all or len(rows) <= _MOST_NAMES:
        return ", ".join(rows)
    return ", ".join(rows[:_MOST_NAMES]) + f" and {len(rows) - _MOST_NAMES} more"


def _of_roles(classes: StepClasses, show_all: bool) -> list[str]:
    by_role: dict[str, list[ArrayClasses]] = {}
    for array in (*classes.arguments, *classes.held):
        by_role.setdefault(array.role.value, []).append(array)
    return [
        f"{role}: {_listed(((array.name, None) for array in arrays), show_all)}"
        for role, arrays in by_role.items()
    ]


def _of_inner(classes: StepClasses) -> list[str]:
    """Lists arrays inside the step that need a constraint, each kind once."""
    found: dict[str, None] = {}
    for one in classes.inner:
        names = ", ".join(name or str(size) for name, size in zip(one.dims, one.shape, strict=True))
        found[f"({clean(names)}) needs a constraint: {one.why}"] = None
    return list(found)
