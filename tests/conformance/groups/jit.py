"""The groups of Haliax's `named_jit`, and of its own partitioning tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from automesh import partition
from tests.conformance.groups.partition import (
    DATA4_MODEL2,
    fully_replicated,
    legacy,
    mesh_named,
    spec_text,
)
from tests.conformance.groups.shard import MAPPING, Dim1, Dim2, Dim3, placed, trimmed, wished
from tests.conformance.outcomes import (
    Case,
    Departure,
    Outcome,
    Verdict,
    Wanted,
    attempt,
    judge,
    uncovered,
)


class Pair(eqx.Module):
    """A module with a named array, a plain one and a number."""

    named: hax.NamedArray
    unnamed1: jax.Array
    static_field: int = eqx.field(static=True)

    def __init__(self) -> None:
        self.named = hax.ones((Dim1, Dim2, Dim3))
        self.unnamed1 = jnp.ones(Dim2.size)
        self.static_field = 1


class Nested(eqx.Module):
    """A module in a module."""

    inner: Pair
    array: hax.NamedArray

    def __init__(self) -> None:
        self.inner = Pair()
        self.array = hax.ones((Dim2, Dim3))


class Scalars(eqx.Module):
    """A module with a named array and a scalar."""

    named: hax.NamedArray
    scalar: jax.Array

    def __init__(self) -> None:
        self.named = hax.ones((Dim1, Dim2, Dim3))
        self.scalar = jnp.zeros(())


def named_jit(case: Case, _: Case) -> Verdict:
    """`named_jit` and `fsdp`."""
    text: str = case["case"]
    found = next((call for key, call in _JITTED if re.search(key, text)), None)
    if found is None:
        return uncovered(f"the case `{text}` is not understood")
    departures = []
    if "keyword form" in text:
        wish = Wanted(returns=trimmed("P(None, 'data')"))
        departures.append(Departure(name="fsdp-by-keyword", wanted=wish))
    mesh = mesh_named(DATA4_MODEL2)
    if "no mesh" in text:
        context: AbstractContextManager[Any] = nullcontext()
    else:
        # Where a mesh is set, jax makes every new array on all its devices: a result that was left
        # where it was can be told from a replicated one only under the legacy context.
        context = legacy(mesh) if "no mapping" in text else jax.set_mesh(mesh)
    with context:
        got = attempt(found)
    if got.error is None:
        got = Outcome(returned=trimmed(got.returned))
    return judge([wished(case["expect"])], got, *departures)


def _follows_axis_resources() -> str:
    make = partition.named_jit(lambda: hax.ones((Dim1, Dim2, Dim3)), axis_resources=MAPPING)
    return placed(make())


def _without_mapping() -> str:
    return placed(partition.named_jit(lambda x: x)(hax.ones((Dim1, Dim2))))


def _context_mapping() -> str:
    with partition.axis_mapping(MAPPING):
        return placed(partition.named_jit(lambda: hax.ones((Dim1, Dim2)))())


def _output_overrides() -> str:
    make = partition.named_jit(
        lambda: hax.ones((Dim1, Dim2)), MAPPING, out_axis_resources={"dim1": "data"}
    )
    return placed(make())


def _mapping_inside() -> Any:
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(partition.current_thread_local_mapping())
        return x

    partition.named_jit(body, axis_resources=MAPPING)(hax.ones((Dim1, Dim2)))
    return seen[0]


def _lowered() -> bool:
    jitted = partition.named_jit(lambda x: x * 2, MAPPING, in_axis_resources=MAPPING)
    return bool(jitted.lower(hax.ones((Dim1, Dim2))).as_text())


_Batch, _Embed = hax.make_axes(batch=8, embed=16)
_PARAMETERS, _COMPUTE = {"embed": "data"}, {"batch": "data"}


def _fsdp_function() -> Any:
    seen: list[Any] = []

    def step(w: Any, x: Any) -> Any:
        seen.append(partition.current_thread_local_mapping())
        return w * 2, hax.ones((_Batch, hax.Axis("head", 4)))

    w, out = partition.fsdp(step, _PARAMETERS, _COMPUTE)(
        hax.ones((_Embed, hax.Axis("head", 4))), hax.ones((_Batch,))
    )
    return {"context_inside": seen[0], "out": placed(out), "w": placed(w)}


def _fsdp_decorator() -> str:
    @partition.fsdp(MAPPING, _COMPUTE)
    def double(x: Any) -> Any:
        return x * 2

    return placed(double(hax.ones((Dim1, Dim2))))


def _fsdp_keywords() -> str:
    double: Any = partition.fsdp(
        lambda x: x * 2, parameter_mapping=MAPPING, compute_mapping=_COMPUTE
    )
    return placed(double(hax.ones((Dim1, Dim2))))


def _too_many_donated() -> Any:
    add = partition.named_jit(lambda x, y: x + y, MAPPING, donate_args=(True, False, True))
    return placed(add(hax.ones((Dim1, Dim2)), hax.ones((Dim1, Dim2))))


def _without_mesh() -> Any:
    return placed(partition.named_jit(lambda x: x, axis_resources=MAPPING)(hax.ones((Dim1, Dim2))))


def _changing_rank() -> list[int]:
    double = partition.named_jit(lambda x: x * 2, axis_resources=MAPPING)
    double(jnp.ones(8))
    return list(double(jnp.ones((8, 4))).shape)


def _plain_output() -> str:
    return placed(partition.named_jit(lambda: jnp.ones((8, 4)), axis_resources=MAPPING)())


def _keeps_shardings() -> str:
    seen: list[Any] = []
    x = partition.shard(hax.ones((Dim1, Dim2)), MAPPING)
    compiled = partition.named_jit(lambda x: x, {}).lower(x).compile()
    seen.extend(jax.tree.leaves(compiled.input_shardings))
    return trimmed(spec_text(seen[0].spec))


# Tried in order: the more special first.
_JITTED: Sequence[tuple[str, Callable[[], Any]]] = (
    (r"no mesh", _without_mesh),
    (r"keyword form", _fsdp_keywords),
    (r"fsdp.* as decorator", _fsdp_decorator),
    (r"fsdp\(fn", _fsdp_function),
    (r"too many donate", _too_many_donated),
    (r"rank changes", _changing_rank),
    (r"out_axis_resources overrides", _output_overrides),
    (r"context mapping inside", _mapping_inside),
    (r"context mapping used for the output", _context_mapping),
    (r"in_axis_resources with \.lower", _lowered),
    (r"no mapping at all", _without_mapping),
    (r"axis_resources only", _follows_axis_resources),
    (r"inputs? keep", _keeps_shardings),
    (r"plain array outputs?", _plain_output),
)


def upstream(case: Case, _: Case) -> Verdict:
    """What Haliax's own partitioning tests assert, under `jax.set_mesh`."""
    text: str = case["call"]
    found = next((call for key, call in _UPSTREAM if key in text), None)
    if found is None:
        return uncovered(f"the call `{text}` is not understood")
    with jax.set_mesh(mesh_named(DATA4_MODEL2)):
        return judge([Wanted(returns=True)], attempt(lambda: found(case["expect"])))


def _same(spec: Any, text: str) -> bool:
    return trimmed(spec_text(spec)) == trimmed(text)


def _infer_in_module(expect: Any) -> bool:
    with partition.axis_mapping(MAPPING):
        module = partition.infer_resource_partitions(Pair(), preserve_existing_shardings=False)
    named = (
        jax.tree.leaves(module.named)[0]
        if isinstance(module.named, hax.NamedArray)
        else module.named
    )
    return (
        _same(named.spec, expect["named"])
        and expect["unnamed1"] == "fully replicated"
        and fully_replicated(module.unnamed1.spec)
    )


def _infer_nested(expect: Any) -> bool:
    with partition.axis_mapping(MAPPING):
        module = partition.infer_resource_partitions(Nested(), preserve_existing_shardings=False)
    named = (
        jax.tree.leaves(module.array)[0]
        if isinstance(module.array, hax.NamedArray)
        else module.array
    )
    return _same(named.spec, expect)


def _made_in_jit(_: Any) -> bool:
    with partition.axis_mapping(MAPPING):
        module = partition.named_jit(Scalars)()
    full = module.named.array.shape == (Dim1.size, Dim2.size, Dim3.size)
    return (
        full and module.scalar.shape == () and not module.named.array.sharding.is_fully_replicated
    )


def _sharded_outside(expect: Any) -> bool:
    one = partition.shard(hax.ones((Dim1, Dim2)), MAPPING)
    other = partition.shard(hax.ones((Dim2, Dim3)), MAPPING)
    return [placed(one), placed(other)] == trimmed(expect)


def _identity(_: Any) -> bool:
    return partition.named_jit(lambda x: x)(
        hax.ones((Dim1, Dim2))
    ).array.sharding.is_fully_replicated


def _sharded_inside(expect: Any) -> bool:
    @partition.named_jit(out_axis_resources=MAPPING)
    def both() -> Any:
        return partition.shard(hax.ones((Dim1, Dim2)), MAPPING), partition.shard(
            hax.ones((Dim2, Dim3)), MAPPING
        )

    return [placed(one) for one in both()] == trimmed(expect)


def _plain_fields(_: Any) -> bool:
    with partition.axis_mapping(MAPPING):
        pair, scalars = partition.named_jit(lambda: (Pair(), Scalars()))()
    return (
        pair.unnamed1.sharding.is_fully_replicated and scalars.scalar.sharding.is_fully_replicated
    )


def _donates(_: Any) -> bool:
    add = partition.named_jit(lambda x, y: x + y, MAPPING, donate_args=(True, False))
    lowered = add.lower(hax.ones((Dim1, Dim2)), hax.ones((Dim1, Dim2)))
    return bool(lowered.as_text()) and lowered.cost_analysis() is not None


def _on_all_devices(_: Any) -> bool:
    x = partition.shard(hax.ones((Dim1, Dim2)), {})
    result = partition.named_jit(lambda x: x + 1, axis_resources=MAPPING)(x)
    mesh = mesh_named(DATA4_MODEL2)
    return result.array.sharding.device_set == set(np.ravel(mesh.devices))


# Tried in order: the more special first.
_UPSTREAM: Sequence[tuple[str, Callable[[Any], bool]]] = (
    ("nested in another module", _infer_nested),
    ("infer_resource_partitions(module", _infer_in_module),
    ("named_jit(ModuleClass)", _made_in_jit),
    ("shard outside jit", _sharded_outside),
    ("without mapping", _identity),
    ("shard inside named_jit", _sharded_inside),
    ("scalar and plain array module fields", _plain_fields),
    ("donate_args=", _donates),
    ("input replicated by shard(x,{})", _on_all_devices),
)

GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "named_jit": named_jit,
    "haliax_upstream_tests": upstream,
}
