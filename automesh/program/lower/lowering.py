"""Traces, lowers and compiles the step of a built workload (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from automesh.mesh.axes import Scalar
from automesh.program.execute.arguments import with_init_shardings
from automesh.program.execute.value_domains import Domain, domains
from automesh.program.lower import carry_state
from automesh.program.lower.compiled import compile_lowered
from automesh.program.lower.host_callbacks import without_host
from automesh.program.lower.lowered import (
    canonical_lines,
    communicated_axes,
    fingerprint,
    kept_arguments,
    sharded_axes,
    split_of_arguments,
)
from automesh.program.lower.program_text import TextLine
from automesh.program.lower.static_args import (
    Split,
    is_jitted,
    jitted,
    split_of,
    static_by_description,
    trace,
)
from automesh.program.script.build import Built
from automesh.program.script.contexts import entered
from automesh.program.script.pure_step import StepOutputs, returned_of
from automesh.program.script.workload import NamedWorkload, Workload, leaf_names_of

# Which arguments the jitted functions inside of a step donate (jax).
# A step may be a plain function, a method or a `partial` that calls functions which `jax.jit`,
# `nnx.jit` or `filter_jit` have made. If the step is traced as a whole, donations of these inner
# functions have no effect, since only the outermost function can donate. The step would need twice
# the memory that it needs in the user's own loop. So the outer function donates the same arguments.

Use = Literal["donated", "kept", "unused"]


def donated_inside(traced: jax.stages.Traced) -> list[Use]:
    """Returns, for each array that the step takes, whether a jitted function directly in the step
    donates it, others use it, or nothing uses it."""
    closed: Any = traced.jaxpr
    jaxpr = closed.jaxpr
    places = {id(variable): place for place, variable in enumerate(jaxpr.invars)}
    uses: list[Use] = ["unused"] * len(places)
    for equation in jaxpr.eqns:
        # Only a jitted function has donations.
        donated = equation.params.get("donated_invars", (False,) * len(equation.invars))
        for variable, gone in zip(equation.invars, donated, strict=True):
            place = places.get(id(variable))
            if place is not None and uses[place] != "donated":
                uses[place] = "donated" if gone else "kept"
    for variable in jaxpr.outvars:
        if (place := places.get(id(variable))) is not None and uses[place] == "unused":
            uses[place] = "kept"
    return uses


# How often the shardings of the carried state may change before they count as unsettled.
SETTLING_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleProgram:
    """A step, traced and lowered on one mesh.

    Attributes:
      args: positional arguments of the compiled step, without static ones.
      kwargs: keyword arguments of the compiled step.
      function: the jitted step; None if the user traced it.
      split: the static arguments of the workload.
    """

    built: Built
    function: Any
    split: Split
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered

    @property
    def compared_outputs(self) -> Any:
        """The return value of the step, whose scalar floats are compared."""
        return returned_of(self.traced.out_info)

    @property
    def changed_in_place(self) -> int:
        """The number of arguments that the step changes in place; they are its first outputs."""
        outputs = self.traced.out_info
        return len(outputs.changed) if isinstance(outputs, StepOutputs) else 0

    @property
    def stated_splits(self) -> Sequence[Sequence[Sequence[str]] | None]:
        """The mesh axes that split each argument of the program; see `split_of_arguments`."""
        return split_of_arguments(self.lowered)

    def domains(self) -> tuple[Domain, ...]:
        """Returns the possible values of each leaf of (args, kwargs)."""
        return domains(self.traced)

    def lines(self) -> tuple[TextLine, ...]:
        """Returns the text that the fingerprint is made from, line by line."""
        return canonical_lines(self.lowered)

    def named_axes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes in `names` over which the step splits arrays or communicates."""
        named = {*sharded_axes(self.lowered, names), *communicated_axes(self.traced)}
        return tuple(name for name in names if name in named)

    @property
    def carry(self) -> carry_state.Carry:
        return carry_state.default_carry(self.args, self.traced.out_info, self.donated)

    @property
    def carried_leaves(self) -> carry_state.CarriedLeaves | None:
        """The carried arrays one by one; None if the user's code has `advance`, or if it is unknown
        which arrays are arguments of the lowered program."""
        if self.built.workload.advance is not None:
            return None
        workload = self.built.workload
        given = leaf_names_of(workload)
        names = [name for name, _ in self.split.named_leaves(self.args, self.kwargs, given)]
        kept = kept_arguments(self.lowered, len(names))
        if kept is None:
            return None
        is_named = isinstance(workload, NamedWorkload)
        return carry_state.carried_leaves(
            self.carry,
            self.args,
            self.traced.out_info,
            names=names,
            kept=kept,
            unplaced=workload.unplaced if is_named else (),
            source=workload.source if is_named else carry_state.source_of(self.traced),
        )

    @property
    def donated(self) -> tuple[bool, ...]:
        """Whether each leaf of (args, kwargs) is donated."""
        return tuple(bool(info.donated) for info in jax.tree.leaves(self.traced.args_info))

    def fingerprint(self, options: Sequence[tuple[str, Scalar]]) -> str:
        """Returns the fingerprint of the program with the devices and options that it is compiled
        for."""
        devices = self.built.mesh.devices.flat
        return fingerprint(
            self.lowered,
            device_ids=[device.id for device in devices],
            compiler_options=options,
            platform=devices[0].platform,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step, traced on one mesh; the attributes are those of `SingleProgram`."""

    built: Built
    function: Any
    split: Split
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traced: jax.stages.Traced


def lower(built: Built, *, platforms: tuple[str, ...] | None = None) -> SingleProgram:
    """Traces and lowers the step on the mesh that it was built for, in the user's context.

    Args:
      platforms: platforms to lower for, by jax's names (cpu, cuda, tpu); by default that of the
        mesh.
    """
    with entered(built.ambient, built.workload.context):
        step = trace_here(built)
        return SingleProgram(
            built=step.built,
            function=step.function,
            split=step.split,
            args=step.args,
            kwargs=step.kwargs,
            traced=step.traced,
            lowered=lower_here(step.traced, platforms),
        )


def trace_here(built: Built, *, with_init: bool = True) -> TracedStep:
    """Traces the step. Call it inside the workload's context.

    Args:
      with_init: whether to compile `init`, which gives the shardings of arguments that `build` does
        not place.
    """
    workload = built.workload
    if built.traced is not None:
        args, kwargs = jax.tree.map(_struct, built.traced.in_avals)
        return TracedStep(
            built=built,
            function=None,
            split=Split(),
            args=args,
            kwargs=kwargs,
            traced=built.traced,
        )
    function = jitted(workload)
    static = static_by_description(workload, function)
    dynamic, _ = static.dynamic(workload.args, {})
    placed = with_init_shardings(workload.init if with_init else None, dynamic, built.mesh)
    workload = replace(workload, args=static.whole(placed, workload.args))
    traced = trace(function, workload)
    split = split_of(workload, function, traced)
    if given := () if is_jitted(workload.step) else _given_away(traced, split, workload):
        # This is fast: jax has the trace of the same function in its cache.
        function = jitted(workload, donated=given)
        traced = trace(function, workload)
    args, kwargs = split.dynamic(workload.args, workload.kwargs)
    return TracedStep(
        built=replace(built, workload=workload),
        function=function,
        split=split,
        args=args,
        kwargs=kwargs,
        traced=traced,
    )


def _given_away(traced: jax.stages.Traced, split: Split, workload: Workload) -> tuple[int, ...]:
    """Returns the positions of the arguments that the jitted functions in an unjitted step donate,
    and that the step as a whole must donate, too."""
    leaves = donated_inside(traced)
    found: list[int] = []
    start = 0
    for position, arg in enumerate(workload.args):
        if position in split.positions:
            continue
        size = len(jax.tree.leaves(arg))
        if "kept" not in (mine := leaves[start : start + size]) and "donated" in mine:
            found.append(position)
        start += size
    return tuple(found)


def lower_here(traced: jax.stages.Traced, platforms: tuple[str, ...] | None) -> jax.stages.Lowered:
    """Lowers a trace; the arguments are as for `lower`. Call it inside the workload's context."""
    if platforms is None:
        return traced.lower()
    anywhere: Any = traced
    if platforms == ("cpu",):  # The mesh has CPU devices, real ones or stand-ins.
        return anywhere.lower(lowering_platforms=platforms)
    with without_host(is_compiled=False):
        return anywhere.lower(lowering_platforms=platforms)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    is_ref = hasattr(aval, "inner_aval")
    inner = aval.inner_aval if is_ref else aval
    extra = {"is_ref": True} if is_ref else {}
    return jax.ShapeDtypeStruct(
        inner.shape, inner.dtype, weak_type=getattr(inner, "weak_type", False), **extra
    )


def compile_program(
    program: SingleProgram, options: Sequence[tuple[str, Scalar]]
) -> tuple[SingleProgram, jax.stages.Compiled, jax.stages.Compiled | None]:
    """Compiles the step as a training loop runs it: its inputs have the shardings of its outputs.

    If a step returns its state in other shardings than it took, jax compiles it again in the second
    iteration; this second program is the one that counts.

    Returns:
      The program, its executable, and the executable of the first iteration if it is another one.
    """
    first = compiled = compile_lowered(program.lowered, options)
    for _ in range(SETTLING_TRIES):
        following = after_one_step(program, compiled)
        if following is None:
            break
        program = following
        compiled = compile_lowered(program.lowered, options)
    return program, compiled, first if first is not compiled else None


def after_one_step(program: SingleProgram, compiled: jax.stages.Compiled) -> SingleProgram | None:
    """Returns the program of the second iteration; None if the state keeps its shardings, or if
    these are unknown."""
    if program.function is None or program.built.workload.advance is not None:
        return None
    changed = program.carry.shardings_after(program.args, compiled)
    return None if changed is None else _with_args(program, changed)


def _with_args(program: SingleProgram, args: tuple[Any, ...]) -> SingleProgram:
    workload = program.built.workload
    whole = program.split.whole(args, workload.args)
    with entered(program.built.ambient, workload.context):
        workload = replace(workload, args=whole)
        traced = trace(program.function, workload)
        lowered = traced.lower()
    built = replace(program.built, workload=workload)
    return replace(program, built=built, args=args, traced=traced, lowered=lowered)
