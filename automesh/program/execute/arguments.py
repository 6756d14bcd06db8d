"""Makes the arguments of the first step: the workload's own, and made-up ones (jax).

Results of `init` determine shardings before anything runs. Made-up arrays are made on the devices,
sharded, with the same global values on every mesh.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from automesh.errors import UsageError
from automesh.program.execute.value_domains import Domain
from automesh.program.lower.compiler_options import compile_quickly
from automesh.program.lower.static_args import is_concrete, leaf_dtype, leaf_shape
from automesh.program.notes import note
from automesh.program.script.leaf_forms import difference, forms_of, same_names
from automesh.program.script.workload import Workload
from automesh.texts.exceptions import in_one_line

Init = Callable[[Any], Any]

_LARGEST_CONSTANTS = 2**26
# Integers that are not seen to index anything run from 1 to this.
_LARGEST_INTEGER = 7
_SCALAR_EXPONENT = -6  # Scalars are learning rates and the like.


def with_init_shardings(init: Init | None, args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """Gives abstract leaves without a sharding the one of `init`'s result.

    `init` is traced and compiled for that. If it cannot be traced because it branches on values, or
    if its arrays are too large for constants of a program, it is called for real.

    Args:
      init: the workload's.
      args: positional arguments without the static ones.
      mesh: the mesh that the step was built for.

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
    # An array that `init` makes without the mesh does not show the sharding that the step wants.
    on_mesh = sharding is not None and sharding.device_set == set(mesh.devices.flat)
    return leaf.update(sharding=sharding) if _unsharded(leaf) and on_mesh else leaf


def _init_shapes(init: Init, mesh: Mesh) -> Any:
    try:
        traced = jax.jit(lambda: init(mesh)).trace()
        lowered = None if _constant_bytes(traced) > _LARGEST_CONSTANTS else traced.lower()
    # It branches on values, returns references, or a library in it needs real arrays ...
    except Exception as error:  # noqa: BLE001
        note(f"`init` cannot be traced ({in_one_line(error)}); calling it for real")
        return init(mesh)
    if lowered is None:
        note("`init` holds large arrays; calling it for real")
        return init(mesh)
    compiled: Any = compile_quickly(lowered, mesh.devices.flat[0])
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
    """Matches the results of `init` with the step's arguments; None for arguments that it leaves
    out.

    Raises:
      UsageError: too many arguments, or one of another structure, shape or type.
    """
    given = (
        tuple(cast("Sequence[Any]", returned)) if type(returned) in (tuple, list) else (returned,)
    )
    # The result may be a single argument that is itself a tuple.
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


# Finds the arguments of a step without values of the user (jax).


def made_up_arguments(workload: Workload) -> tuple[str, ...]:
    """Returns the arguments that are only described, so that their values are made up on the
    devices.

    Returns:
      Names of the step's parameters, or `args[1]` if they are unknown. Empty if the workload has an
      `init`, which may give any of them.
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
    """Returns the positional parameters of the step, as far as their names are known."""
    try:
        found = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # the parameters of a callable are unknown
        return []
    names: list[str] = []
    for one in found:
        if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            break
        names.append(one.name)
    return names


# Made-up arrays.


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The description of one array to make.

    Attributes:
      index: its index among all leaves; the seed of its values.
      dtype: may be a PRNG key type.
      domain: its possible values.
      sharding: its sharding.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    domain: Domain
    sharding: jax.sharding.Sharding


def plan_leaves(
    tree: Any, shardings: Any, domains: Sequence[Domain], mesh: Mesh
) -> tuple[Leaf, ...]:
    """Describes every array of `tree`.

    Args:
      tree: (args, kwargs) as the compiled step takes them.
      shardings: shardings of the leaves, in the same structure; None for an input that the program
        does not use.
      domains: possible values of each leaf.
      mesh: the mesh over which leaves without a sharding are replicated.
    """
    leaves, structure = jax.tree.flatten(tree)
    placed = structure.flatten_up_to(shardings)
    return tuple(
        Leaf(
            index=index,
            shape=leaf_shape(leaf),
            dtype=leaf_dtype(leaf),
            domain=domain,
            sharding=to
            or getattr(leaf, "sharding", None)
            or NamedSharding(mesh, jax.sharding.PartitionSpec()),
        )
        for index, (leaf, to, domain) in enumerate(zip(leaves, placed, domains, strict=True))
    )


def maker(leaves: Sequence[Leaf]) -> Callable[[], list[jax.Array]]:
    """Returns a function that makes the arrays, with one compiled program for each set of
    devices."""
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(position)
    programs = [(members, _program([leaves[k] for k in members])) for members in groups.values()]

    def make() -> list[jax.Array]:
        made: dict[int, jax.Array] = {}
        for members, program in programs:
            made.update(zip(members, program(), strict=True))
        return [made[position] for position in range(len(leaves))]

    return make


def _program(leaves: Sequence[Leaf]) -> Callable[[], list[jax.Array]]:
    def synthetic() -> list[jax.Array]:
        return [values(leaf.index, leaf.shape, leaf.dtype, leaf.domain) for leaf in leaves]

    return jax.jit(synthetic, out_shardings=[leaf.sharding for leaf in leaves])


def values(seed: int, shape: tuple[int, ...], dtype: Any, domain: Domain) -> jax.Array:
    """Makes values that depend only on `seed` and on the global position.

    Floats are scaled so that sums over the second-last dimension stay near 1 (1/sqrt(fan-in), as
    weights are initialized): magnitudes are 1/4 to 2 times this scale, or 1 to 2 times if all are
    positive; scalars are positive, 1/64 to 1/32. Integers are 1 to 7, a scalar 1; booleans are
    True.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        implementation = dtype._impl  # pyright: ignore[reportPrivateUsage]
        bits = _hash(seed, (*shape, *implementation.key_shape))
        return jax.random.wrap_key_data(bits, impl=implementation.name)
    if dtype == np.bool_:
        return jnp.ones(shape, dtype)
    bits = _hash(seed, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        largest = np.uint32(_largest(dtype, domain))
        number = bits % largest + np.uint32(1) if shape else jnp.ones(shape, np.uint32)
        return number.astype(dtype)
    scale = _scale(shape, dtype)
    # Whole numbers below 2**23 times powers of two are exact until the last conversion, in whatever
    # way the compiler orders the operations.
    twenty = bits >> 12
    if domain.positive or not shape:
        number = (twenty + np.uint32(2**20)).astype(np.float32) * np.float32(2.0**-20)
    else:
        magnitude = (twenty * np.uint32(7) + np.uint32(2**20)).astype(np.float32) * np.float32(
            2.0**-22
        )
        number = jnp.where((bits & 1).astype(bool), magnitude, -magnitude)
    return (number * scale).astype(dtype)


def values_in_words(shape: tuple[int, ...], dtype: Any, domain: Domain) -> str:
    """Describes the values that `values` makes: `positive floats`, `integers 1 to 7`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return "random keys"
    if dtype == np.bool_:
        return "True"
    if jnp.issubdtype(dtype, jnp.integer):
        largest = _largest(dtype, domain)
        return f"integers 1 to {largest}" if shape and largest > 1 else "the integer 1"
    if not shape:
        return "a small positive float"
    return "positive floats" if domain.positive else "floats of both signs"


def _largest(dtype: Any, domain: Domain) -> int:
    bound = _LARGEST_INTEGER + 1 if domain.below is None else domain.below
    return max(min(bound - 1, int(jnp.iinfo(dtype).max), 2**31), 1)


def _scale(shape: tuple[int, ...], dtype: Any) -> np.float32:
    """Returns the scale of floats as a power of two, by which multiplication is exact."""
    if not shape:
        return np.float32(2.0**_SCALAR_EXPONENT)
    fan_in = shape[-2] if len(shape) > 1 else 1
    exponent = -round(math.log2(max(fan_in, 1)) / 2)
    smallest = jnp.finfo(dtype).minexp if jnp.issubdtype(dtype, jnp.floating) else -126
    return np.float32(2.0 ** min(max(exponent, smallest + 4, -24), 0))


def _hash(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 well-mixed bits per element (Chris Wellons' lowbias32 over the flat position)."""
    flat = jnp.full(shape, np.uint32((seed * 0x9E3779B9 + 0x7F4A7C15) % 2**32), np.uint32)
    stride = 1
    for dimension in reversed(range(len(shape))):
        position = jax.lax.broadcasted_iota(np.uint32, shape, dimension)
        flat = flat + position * np.uint32(stride % 2**32)
        stride *= shape[dimension]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        flat = (flat ^ (flat >> shift)) * np.uint32(factor)
    return flat ^ (flat >> 16)
