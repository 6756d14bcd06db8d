"""The workload's own initial arguments: their shardings before anything runs, and their values
(jax)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding

from automesh.errors import UsageError
from automesh.program.lower.compiler_options import known, quick_options
from automesh.program.lower.static_args import is_concrete
from automesh.program.notes import in_one_line, note
from automesh.program.script.leaf_forms import difference, forms_of, same_names
from automesh.program.script.workload import Workload

Init = Callable[[Any], Any]

_LARGEST_CONSTANTS = 2**26


def with_init_shardings(init: Init | None, args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """The arguments, with abstract leaves that have no sharding given the one out of `init`.

    `init` is traced and compiled for that; if it cannot be traced because it decides by values,
    or holds arrays too large to be constants of a program, it is called for real.

    Args:
      init: the workload's.
      args: positional arguments without the static ones.
      mesh: that the step was built for.

    Raises:
      UsageError: what `init` gives does not fit the arguments.
    """
    if init is None or not any(_unsharded(leaf) for leaf in jax.tree.leaves(args)):
        return args
    initial = initial_args(_init_shapes(init, mesh), args)
    return tuple(
        arg if start is None else _all_placed(arg, start, mesh)
        for arg, start in zip(args, initial, strict=True)
    )


def _unsharded(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def _all_placed(arg: Any, start: Any, mesh: Mesh) -> Any:
    leaves, structure = jax.tree.flatten(arg)
    pairs = zip(leaves, jax.tree.leaves(start), strict=True)
    return structure.unflatten(_placed(leaf, new, mesh) for leaf, new in pairs)


def _placed(leaf: Any, new: Any, mesh: Mesh) -> Any:
    sharding = getattr(new, "sharding", None)
    # What `init` makes without regard to the mesh says nothing about where the step wants it.
    on_mesh = sharding is not None and sharding.device_set == set(mesh.devices.flat)
    return leaf.update(sharding=sharding) if _unsharded(leaf) and on_mesh else leaf


def _init_shapes(init: Init, mesh: Mesh) -> Any:
    try:
        traced = jax.jit(lambda: init(mesh)).trace()
        lowered = None if _constant_bytes(traced) > _LARGEST_CONSTANTS else traced.lower()
    # It decides by values, it returns references, a library in it wants real arrays ...
    except Exception as error:  # noqa: BLE001
        note(f"`init` cannot be traced ({in_one_line(error)}); calling it for real")
        return init(mesh)
    if lowered is None:
        note("`init` holds large arrays; calling it for real")
        return init(mesh)
    device = mesh.devices.flat[0]
    quick: Any = dict(known(quick_options(device.platform), device))
    compiled: Any = lowered.compile(compiler_options=quick)
    return jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(
            info.shape, info.dtype, sharding=_named(sharding, mesh)
        ),
        compiled.out_info,
        compiled.output_shardings,
    )


def _constant_bytes(traced: jax.stages.Traced) -> int:
    closed: Any = traced.jaxpr
    return sum(int(getattr(constant, "nbytes", 0)) for constant in closed.consts)


def _named(sharding: Any, mesh: Mesh) -> Any:
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def initial_args(returned: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Lines up what `init` returned with the step's arguments; None for arguments that it leaves
    out.

    Raises:
      UsageError: too many arguments, or one of another structure, shape or type.
    """
    given = (
        tuple(cast("Sequence[Any]", returned)) if type(returned) in (tuple, list) else (returned,)
    )
    # A single argument that is itself a tuple.
    if (
        args
        and type(args[0]) is type(returned)
        and same_names(forms_of(returned), forms_of(args[0]))
    ):
        given = (returned,)
    if len(given) > len(args):
        raise UsageError(
            f"`init` returned {len(given)} arguments, but the step has {len(args)}",
            hint="return the positional arguments in order, as a tuple, without static ones",
        )
    for position, (start, arg) in enumerate(zip(given, args)):
        _check(start, arg, position)
    return (*given, *[None] * (len(args) - len(given)))


def _check(start: Any, arg: Any, position: int) -> None:
    hint = "`init` must return what `args` describes"
    given, wanted = forms_of(start), forms_of(arg)
    where = f"args[{position}]"
    if not same_names(given, wanted):
        found = difference(given, wanted, where=where)
        raise UsageError(
            f"argument {position} out of `init` has other leaves than in `args`: {found}",
            hint=hint,
        )
    for new, old in zip(given, wanted, strict=True):
        if not new.has_type_of(old):
            raise UsageError(f"`{where}{old.name}` is {old}, but `init` gives {new}", hint=hint)


# Which arguments of a step have no values of the user's (jax).


def made_up_arguments(workload: Workload) -> tuple[str, ...]:
    """Arguments that are only described, and whose values are made up on the devices.

    Returns:
      Names of the step's parameters, or `args[1]` where they are not known. Empty if the workload
      has an `init`, which may give any of them.
    """
    if workload.init is not None:
        return ()
    parameters = _parameters(workload.step)
    named = [
        (parameters[place] if place < len(parameters) else f"args[{place}]", arg)
        for place, arg in enumerate(workload.args)
    ]
    named += list(workload.kwargs.items())
    return tuple(name for name, arg in named if _has_described(arg))


def _has_described(arg: Any) -> bool:
    return any(hasattr(leaf, "shape") and not is_concrete(leaf) for leaf in jax.tree.leaves(arg))


def _parameters(step: Any) -> list[str]:
    """Positional parameters of the step, as far as they have names of their own."""
    try:
        found = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of a callable that says nothing of its parameters
        return []
    names: list[str] = []
    for one in found:
        if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            break
        names.append(one.name)
    return names
