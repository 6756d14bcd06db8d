"""The search space of a command: the axes and knobs that its placeholders can express."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import MeshAxis, Plan, usual_batch_axes
from automesh.space.legal import Enumeration, find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, Constraint, Knob, SearchSpace
from automesh.tuner.command.template import RUN_DIR, Part, Template, masked_template


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpace:
    """The possible plans of a command.

    Attributes:
      space: the space; every axis and knob in it has a placeholder.
      notices: one sentence for each part of a shipped space that was left out.
    """

    space: SearchSpace
    notices: tuple[str, ...] = ()

    def enumerate(
        self, template: Template, *, num_devices: int, num_granules: int, platform: str
    ) -> Enumeration:
        """Returns all legal plans, one for each different command.

        Raises:
          NoFeasibleMesh: no plan is legal.
        """
        space = self.space
        # A word on a command line has no type: a knob may have the values `1` and `auto`.
        step = StepFacts(used_axes=space.names, takes_any_knob=True)
        found = find_legal(
            space, step, num_devices=num_devices, num_granules=num_granules, platform=platform
        )
        different: dict[tuple[str, ...], Plan] = {}
        for plan in found.legal:
            different.setdefault(template.for_plan(plan, run_dir=""), plan)
        same = len(found.legal) - len(different)
        if not same:
            return found
        notice = (
            f"{same} plans are left out: their command is another one's, since it does not say how "
            "an axis is split between granules"
        )
        return replace(
            found,
            legal=tuple(different.values()),
            num_plans=found.num_plans - same,
            notices=(*found.notices, notice),
        )


def space_of(template: Template) -> CommandSpace:
    """Returns the space of all axes that a template names, without any rule.

    Raises:
      UsageError: it names no axis, or only the part of one between granules.
    """
    parts = _parts(template)
    if not parts:
        raise UsageError(
            f"the command `{masked_template(str(template))}` names no mesh axis, so it is the same "
            "for every mesh",
            hint="put placeholders where the sizes stand: `--fsdp {fsdp} --tp {tp}`",
        )
    for name in parts:
        MeshAxis(name=name)  # This checks the name.
        _check_parts(name, parts[name])
    axes = tuple(AxisRange(name=name, dcn=_spans(parts[name])) for name in parts)
    return CommandSpace(
        space=SearchSpace(
            name="the command",
            shipped=False,
            names=tuple(parts),
            axes=axes,
            batch_axes=usual_batch_axes(tuple(parts)),
        )
    )


def restricted(space: SearchSpace, template: Template) -> CommandSpace:
    """Returns the part of a space that a template can express. The rest becomes a notice for a
    shipped space, and an error for a user's own.

    Raises:
      UsageError: a placeholder is unknown or does not suit; or a user's own space has something
        that the template cannot express.
    """
    parts, notices = _parts(template), list[str]()
    known = {axis.name: axis for axis in space.axes}
    knobs = {knob.name: knob for knob in space.knobs}
    for name, used in parts.items():
        if name in knobs and used != {""}:
            raise UsageError(
                f"the command names a part of `{name}`, which is a knob of the search space "
                f"`{space.name}`, not an axis",
                hint=f"write {{{name}}}",
            )
        if name in space.names:
            _check_parts(name, used)
        elif name not in knobs:
            raise UsageError(
                f"the command names `{{{name}}}`, which is neither an axis nor a knob of the "
                f"search space `{space.name}`{did_you_mean(name, [*space.names, *knobs])}",
                hint=f"its axes are {', '.join(known)}"
                + (f"; its knobs are {', '.join(knobs)}" if knobs else "")
                + "; without --space all names in braces are axes",
            )
    names = tuple(name for name in space.names if name in parts)
    if not names:
        raise UsageError(
            f"the command `{masked_template(str(template))}` names no axis of the search space "
            f"`{space.name}`",
            hint=f"its axes are {', '.join(known)}: write for example {{{space.axes[0].name}}}",
        )
    _leave_out(space, "axis", [name for name in known if name not in parts], notices)
    _leave_out(space, "knob", [name for name in knobs if name not in parts], notices)
    _refuse_what_commands_lack(space, notices)
    axes = tuple(
        replace(axis, dcn=axis.dcn and _spans(parts[axis.name]))
        for axis in space.axes
        if axis.name in parts
    )
    kept = [knob for knob in space.knobs if knob.name in parts]
    return CommandSpace(
        space=replace(
            space,
            names=names,
            axes=axes,
            batch_axes=tuple(name for name in space.batch_axes if name in names),
            knobs=tuple(kept),
            constraints=_constraints(space, names, kept, notices),
            compiler_options=(),
            mapping=(),
        ),
        notices=tuple(notices),
    )


def _parts(template: Template) -> dict[str, set[Part]]:
    parts: dict[str, set[Part]] = {}
    for placeholder in template.placeholders:
        if placeholder.name != RUN_DIR:
            parts.setdefault(placeholder.name, set()).add(placeholder.part)
    return parts


def _spans(parts: set[Part]) -> bool:
    """Whether the placeholders of an axis can pass its size between granules to the command."""
    return parts != {"ici"}


def _check_parts(name: str, parts: set[Part]) -> None:
    if parts == {"dcn"}:
        raise UsageError(
            f"the command has `{{dcn.{name}}}` alone, which says nothing of the part of `{name}` "
            "inside a granule",
            hint=f"add `{{ici.{name}}}`, or write `{{{name}}}` for the whole axis",
        )


def _leave_out(space: SearchSpace, kind: str, names: Sequence[str], notices: list[str]) -> None:
    if not names:
        return
    braces = ", ".join(f"{{{name}}}" for name in names)
    if not space.shipped:
        raise UsageError(
            f"the search space `{space.name}` has the {kind} `{names[0]}`, "
            "which the command does not name",
            hint=f"put {{{names[0]}}} into the command, or take it out of the space",
        )
    plural = "axes" if kind == "axis" else f"{kind}s"
    what = f"{kind if len(names) == 1 else plural} {', '.join(f'`{name}`' for name in names)}"
    notices.append(f"{what} left out: the command has no {braces}")


def _refuse_what_commands_lack(space: SearchSpace, notices: list[str]) -> None:
    for table, name, why in (
        (space.mapping, "mapping", "a command takes sizes and knobs, no mapping"),
        (space.compiler_options, "compiler_options", "automesh does not compile a command's step"),
    ):
        if table and not space.shipped:
            raise UsageError(
                f"the search space `{space.name}` has a table `{name}`, but {why}",
                hint="let the command take it as a knob, or drop the table",
            )
        if table:
            notices.append(f"`{name}` left out: {why}")


def _constraints(
    space: SearchSpace, axes: Sequence[str], knobs: Sequence[Knob], notices: list[str]
) -> tuple[Constraint, ...]:
    """Returns the constraints that can be applied; an axis that was left out has size 1."""
    values = {knob.name: knob.values for knob in knobs}
    kept: list[Constraint] = []
    for constraint in space.constraints:
        factors = tuple(
            name for name in constraint.factors if name in axes or name not in space.names
        )
        problem = ""
        if isinstance(constraint.bound, str):
            problem = f"refers to the fact `{constraint.bound}`, and a command states no facts"
        for name in factors:
            if name not in axes and not problem:
                if name not in values:
                    problem = f"names `{name}`, which the command does not"
                elif not all(type(value) is int and value > 0 for value in values[name]):
                    problem = f"needs positive integers, but `{name}` takes {list(values[name])}"
        if not problem:
            kept += [replace(constraint, factors=factors)] if factors else []
        elif space.shipped:
            notices.append(f"constraint `{constraint}` left out: it {problem}")
        else:
            raise UsageError(
                f"the constraint `{constraint}` of the search space `{space.name}` {problem}",
                hint="give a number, and name axes and integer knobs of the command",
            )
    return tuple(kept)
