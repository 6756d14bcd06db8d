"""`automesh check-script`: what was found out about a script, to be read at a glance.

As JSON it is the record by the names of its attributes, with `schema` and `ready` before them:
bytes are integers, a shape is a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from automesh import jsonio
from automesh.mesh.axes import Scalar
from automesh.program.step_summary import Argument, StepSummary
from automesh.report.blocks.columns import KEY, Column, figures_column, text_column
from automesh.report.blocks.nouns import KeyValues, Line, Report, Section, Table
from automesh.report.script_check.classes import class_lines
from automesh.report.script_check.names import NUMBER, argument_end, common_name, shorter
from automesh.report.script_check.nouns import CheckedScript, KnobUse, PlanCount
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_count

_MOST_ROWS = 20
_SHORT_TYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))
# What a narrow terminal does without, in this order.
_DROPPED = ("total", "values", "donated", "per device")
Lines = list[Line]
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of the table, with the arrays that share it.

    Attributes:
      like: the part of the arguments whose arrays these are like, all together; empty for arrays
        that are alike except for the numbers in their names.
    """

    name: str
    members: tuple[Argument, ...]
    like: str = ""

    def total(self, of: Callable[[Argument], int]) -> int:
        return sum(map(of, self.members))

    @property
    def array(self) -> str:
        """Returns `f32[48,256]`, as jax writes it."""
        one = self.members[0]
        if self.like:
            return f"as {self.like}"
        dtype = one.dtype
        for long, short in _SHORT_TYPES:
            if dtype.startswith(long):
                dtype = short + dtype.removeprefix(long)
                break
        return f"{'Ref ' * one.is_ref}{dtype}[{','.join(map(str, one.shape))}]"

    @property
    def split(self) -> str:
        """Returns `P(None, tp)`, without the quotes of names."""
        return "" if self.like else self.members[0].spec.replace("'", "") or "not said"

    @property
    def donated(self) -> str:
        return "yes" if all(member.is_donated for member in self.members) else "no"

    @property
    def values(self) -> str:
        kinds = [
            member.values if member.origin == "made up" else member.origin
            for member in self.members
        ]
        return ", ".join(dict.fromkeys(kinds))


def report_of(found: CheckedScript, *, show_all: bool = False) -> Report:
    """Reports what was found.

    Args:
      show_all: a line for each array; else arrays that are alike share one, and only the largest
        are shown.
    """
    step = found.step
    lines = [*_step_lines(step, show_all), *_space_lines(found), *_check_lines(found)]
    if step is not None and step.classes is not None:
        lines += class_lines(step.classes, show_all=show_all)
    lines += [("note", clean(text)) for text in found.notes]
    return Report(
        title=_heading(found),
        sections=(
            Section(blocks=(_arrays(step, show_all=show_all),) if step and step.arguments else ()),
            Section(blocks=(KeyValues(lines=tuple(lines)),)),
            Section(blocks=(KeyValues(lines=tuple(_verdict(found))),)),
        ),
        facts=lambda: {
            "schema": SCHEMA,
            "ready": found.is_ready,
            **jsonio.to_json(found, CheckedScript),
        },
    )


def _heading(found: CheckedScript) -> str:
    where = f" for {found.target}" if found.target else ""
    devices = f" ({found.device_count} x {found.device})" if found.device_count else ""
    mesh = f", as it is on {found.mesh}" if found.mesh else ""
    return clean(f"{found.script}{where}{devices}{mesh}")


def _arrays(step: StepSummary, *, show_all: bool) -> Table:
    rows = _rows(_named(step.arguments), show_all=show_all)
    shown = rows if show_all else _largest(rows)

    def column(
        name: str, cell: Callable[[_Row], str], *, most: int = 0, of_keys: bool = False
    ) -> Column:
        cells = [clean(cell(row)) for row in shown]
        if most:
            return text_column(name, cells, most=most, of_keys=of_keys)
        return figures_column(name, cells, justify="left")

    def figures(name: str, of: Callable[[Argument], int]) -> Column:
        return figures_column(name, [format_bytes(row.total(of)) for row in shown])

    columns = [
        column("argument", lambda row: row.name, most=24, of_keys=True),
        column("array", lambda row: row.array, most=22, of_keys=True),
        column("split", lambda row: row.split, most=18),
        figures("per device", lambda one: one.device_bytes),
        figures("total", lambda one: one.total_bytes),
        column("donated", lambda row: row.donated),
        column("values", lambda row: row.values, most=12),
    ]
    telling = [one for one in columns if one.name not in ("donated", "values") or _tells(one)]
    return Table(columns=tuple(telling), dropped=_DROPPED)


def _tells(column: Column) -> bool:
    """Whether the cells of a column are neither empty nor all the same."""
    return len(set(column.cells)) > 1


def _named(arguments: Sequence[Argument]) -> list[Argument]:
    """Returns the arrays by shorter names: of nodes with a single leaf, the number of that is left
    out."""
    names = shorter([argument.name for argument in arguments])
    return [replace(argument, name=name) for argument, name in zip(arguments, names, strict=True)]


def _rows(arguments: Sequence[Argument], *, show_all: bool) -> list[_Row]:
    if show_all:
        return [_Row(name=argument.name, members=(argument,)) for argument in arguments]
    groups: dict[object, list[Argument]] = {}
    for one in arguments:
        start = argument_end(one.name)  # The number of the argument itself is no layer's.
        key = (one.name[:start], NUMBER.sub("#", one.name[start:]), one.shape, one.dtype, one.spec,
               one.is_donated, one.is_ref, one.origin, one.values)  # fmt: skip
        groups.setdefault(key, []).append(one)
    rows = [
        _Row(name=common_name([member.name for member in members]), members=tuple(members))
        for members in groups.values()
    ]
    return _mirrors_folded(rows)


def _parts(name: str) -> tuple[str, ...]:
    """Splits a name into that of the argument and the keys in it."""
    end = argument_end(name)
    return (name[:end], *filter(None, KEY.split(name[end:])))


def _mirrors_folded(rows: Sequence[_Row]) -> list[_Row]:
    """Puts into one row what has the same arrays as something before it, by other names: the
    moments of an optimizer have those of the parameters."""
    keys = [_parts(row.name) for row in rows]
    under: dict[tuple[str, ...], list[int]] = {}
    for place, path in enumerate(keys):
        for length in range(1, len(path)):
            under.setdefault(path[:length], []).append(place)

    def arrays(prefix: tuple[str, ...]) -> object:
        return tuple(
            (keys[k][len(prefix) :], rows[k].array, rows[k].split, len(rows[k].members))
            for k in under[prefix]
        )

    first: dict[object, tuple[str, ...]] = {}
    folded: list[_Row] = []
    done: set[int] = set()
    for place, path in enumerate(keys):
        prefixes = [path[:length] for length in range(1, len(path))]
        for prefix in prefixes if place not in done else []:
            known = first.setdefault(arrays(prefix), prefix)
            if known != prefix and len(under[prefix]) > 1:
                members = [member for k in under[prefix] for member in rows[k].members]
                name, like = "".join(prefix), "".join(known)
                folded.append(_Row(name=name, members=tuple(members), like=like))
                done.update(under[prefix])
                break
        if place not in done:
            folded.append(rows[place])
    return folded


def _largest(rows: Sequence[_Row]) -> list[_Row]:
    """Returns the rows with the most bytes, in their order."""
    by_size = sorted(range(len(rows)), key=lambda k: -rows[k].total(lambda one: one.total_bytes))
    kept = set(by_size[:_MOST_ROWS])
    return [row for place, row in enumerate(rows) if place in kept]


def _step_lines(step: StepSummary | None, show_all: bool) -> Lines:
    if step is None:
        return []
    arguments = step.arguments
    lines: Lines = [("arrays", _sum_of(arguments))]
    if not show_all:
        rows = _rows(arguments, show_all=False)
        shown = {id(member) for row in _largest(rows) for member in row.members}
        hidden = [argument for argument in arguments if id(argument) not in shown]
        if hidden:
            size = format_bytes(sum(one.total_bytes for one in hidden))
            lines.append(("", f"{count(len(hidden), 'smaller one')} of them, {size}, not shown: "
                          "--all shows each"))  # fmt: skip
    lines += [("static", f"{name} = {clean(value)}") for name, value in step.static]
    lines += _values_lines(step)
    lines.append(("next step", _carry_of(step)))
    if step.losses:
        first, *others = step.losses
        more = f" and {len(others)} more" if others else ""
        lines.append(("loss", f"{first}{more}: compared between meshes"))
    return lines


def _sum_of(arguments: Sequence[Argument]) -> str:
    total, each = (
        format_bytes(sum(of(argument) for argument in arguments))
        for of in (lambda one: one.total_bytes, lambda one: one.device_bytes)
    )
    given = sum(argument.is_donated for argument in arguments)
    donated = "all donated" if given == len(arguments) else f"{given or 'none'} of them donated"
    return f"{count(len(arguments), 'array')}, {total}, {each} on each device; {donated}"


def _values_lines(step: StepSummary) -> Lines:
    arguments = step.arguments
    words = {"init": "from `init`", "build": "made by the script", "made up": "made up"}
    said: list[str] = []
    for origin, text in words.items():
        number = sum(argument.origin == origin for argument in arguments)
        if number:
            said.append(f"{'all' if number == len(arguments) else number} {text}")
    if not said:
        return []
    kinds: dict[str, list[str]] = {}
    for one in arguments:
        if one.origin == "made up":
            kinds.setdefault(one.values, []).append(one.name)
    hint = "; `Workload(init=...)` can give real ones" if kinds else ""
    lines = [("values", ", ".join(said) + hint)]
    for values, (first, *others) in kinds.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(("", f"{values}: {first}{more}"))
    return lines


def _carry_of(step: StepSummary) -> str:
    if step.has_advance:
        return "what `advance` makes of the outputs"
    parts = [
        (
            f"{one.output} replaces {one.argument} "
            if one.output
            else f"{one.argument} is changed in place "
        )
        + f"({count(one.arrays, 'array')})"
        for one in step.carried
    ]
    if any(argument.is_ref for argument in step.arguments):
        parts.append("references stay in place")
    return ", ".join(parts) or "the same arguments again"


def _space_lines(found: CheckedScript) -> Lines:
    lines: Lines = []
    if found.step is not None:
        groups = [
            ("searched", found.searched_axes),
            ("used, but 1 in every plan", set(found.used_axes) - set(found.searched_axes)),
            ("not used by the step", set(found.axes) - set(found.used_axes)),
        ]
        said = [
            f"{what}: {', '.join(name for name in found.axes if name in names)}"
            for what, names in groups
            if names
        ]
        lines.append(("axes", "; ".join(said)))
    if set(found.axis_types) - {"auto"}:
        pairs = zip(found.axes, found.axis_types)
        lines.append(("types", ", ".join(f"{name} {kind}" for name, kind in pairs)))
    if found.baseline:
        lines.append(("baseline", found.baseline))
    if found.facts:
        lines.append(("facts", ", ".join(f"{name} = {value}" for name, value in found.facts)))
    if found.tokens_per_step:
        lines.append(("tokens", f"{format_count(found.tokens_per_step)} in a step"))
    knobs = [_knob_of(knob) for knob in found.knobs]
    lines += zip(["knobs", *[""] * len(knobs)], knobs)
    dropped = [clean(text) for text in found.left_out]
    lines += zip(["note", *[""] * len(dropped)], dropped)
    if found.plans is not None:
        lines.append(("plans", _plans(found.plans)))
    return lines


def _plans(plans: PlanCount) -> str:
    rules = ", ".join(f"{rule} ({number})" for rule, number in plans.ruled_out)
    said = f"{plans.legal} of {count(plans.enumerated, 'plan')} are legal"
    if rules:
        said += f"; ruled out: {clean(rules)}"
    if plans.built < plans.legal:
        said += (
            f"; the step was built on {plans.built or 'none'} of the legal ones in the time of "
            "this check, and may refuse more"
        )
    return said


def _knob_of(knob: KnobUse) -> str:
    name = f"{knob.name} ({knob.kind})"
    default = "" if knob.default is None else f" = {_scalar(knob.default)}"
    tried = ", ".join(map(_scalar, knob.values))
    return f"{name}{default}; " + (f"searched: {tried}" if tried else "not searched")


def _scalar(value: Scalar) -> str:
    return f'"{clean(value)}"' if isinstance(value, str) else str(value)


def _check_lines(found: CheckedScript) -> Lines:
    step, program = found.step, found.program
    if step is None:
        return []
    lines: Lines = []
    if not step.change:
        others = f"; called on {' and '.join(found.meshes[1:])}, too" if found.meshes[1:] else ""
        lines.append(("build", f"gave the same arguments twice on {found.mesh}{others}"))
    if program.found == "same":
        seeds = f"PYTHONHASHSEED {program.hash_seed} and {program.other_seed}"
        lines.append(("program", f"the same in two processes ({seeds})"))
    return lines


def _verdict(found: CheckedScript) -> Lines:
    if found.is_ready:
        return [("ready", found.command)]
    lines: Lines = []
    for number, problem in enumerate(found.problems):
        lines.append((f"mend {number + 1}", clean(problem.what)))
        hints = [line.rstrip() for line in problem.hint.splitlines() if line.strip()]
        lines += zip(["hint", *[""] * len(hints)], hints)
    return [*lines, ("then", found.command)]
