"""The group of Haliax's `shard`: sentences of cases become scenarios."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from automesh import partition
from tests.conformance.groups.partition import (
    DATA4_MODEL2,
    legacy,
    literal,
    mesh_named,
    spec_text,
)
from tests.conformance.outcomes import (
    Case,
    Departure,
    Verdict,
    Wanted,
    attempt,
    judge,
    uncovered,
    wanted,
)

REFUSED = Wanted(raises="ValueError")
Dim1, Dim2, Dim3 = hax.make_axes(dim1=8, dim2=16, dim3=32)
AXES = {axis.name: axis for axis in (Dim1, Dim2, Dim3)}
MAPPING = {"dim2": "data", "dim3": "model"}


def placed(array: Any) -> str:
    """How an array lies, as the cases write it; specs without what they end in that is None."""
    sharding = getattr(array, "array", array).sharding
    if isinstance(sharding, SingleDeviceSharding):
        return "SingleDeviceSharding"
    return trimmed(spec_text(sharding.spec))


def trimmed(text: Any) -> Any:
    """Specs that differ only in what they end in that is None mean the same."""
    if isinstance(text, Mapping):
        return {key: trimmed(one) for key, one in text.items()}
    if isinstance(text, (list, tuple)):
        return [trimmed(one) for one in text]
    if not isinstance(text, str) or not text.startswith("P("):
        return text
    entry = ast.literal_eval(text[1:])
    entries = list(entry) if isinstance(entry, tuple) else [entry]
    while entries and entries[-1] is None:
        entries.pop()
    return spec_text(entries)


def wished(expect: Mapping[str, Any]) -> Wanted:
    wish = wanted(expect)
    return Wanted(returns=trimmed(wish.returns), raises=wish.raises)


def shard(case: Case, _: Case) -> Verdict:
    """`shard`, `auto_sharded`, inside and outside of jit, under each kind of context."""
    text: str = case["case"]
    scenario = _shard_scenario(text)
    if scenario is None:
        return uncovered(f"the case `{text}` is not understood")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = attempt(scenario)
    said = [one for one in caught if issubclass(one.category, RuntimeWarning)]
    if bool(said) != bool(case["expect"].get("warns")):
        return Verdict(status="failed", detail=f"{len(said)} RuntimeWarnings; {got}")
    return judge([wished(case["expect"])], got, *_shard_departures(text))


def _shard_departures(text: str) -> list[Departure]:
    spread = Wanted(returns=trimmed("P(None, 'data')"))
    if re.search(r"dim of size \d+ on", text) or "out_axis_resources" in text:
        return [Departure(name="indivisible-sizes-are-named", wanted=REFUSED)]
    if "legacy" in text and "inside jit" in text:
        return [Departure(name="shard-acts-in-every-context", wanted=spread)]
    if "Explicit" in text:
        return [Departure(name="explicit-axes-are-resharded", wanted=spread)]
    if _repeated(text):
        return [Departure(name="one-mesh-axis-twice-is-named", wanted=REFUSED)]
    if _unknown(text):
        return [Departure(name="unknown-mesh-axes-are-named", wanted=REFUSED)]
    return []


def _repeated(text: str) -> bool:
    several = r"(two|both) .*(same|one|single) (mesh|physical) axis"
    return bool(re.search(rf"{several}|twice|both .*to data", text))


def _unknown(text: str) -> bool:
    kinds = "(unknown|absent|missing|nonexistent)"
    return bool(re.search(rf"{kinds} ((mesh|physical) )?axis|not in the mesh", text))


def _shard_scenario(text: str) -> Callable[[], Any] | None:
    """What to call for a case's sentence; None if it says something else than is known here."""
    value, mapping = _value_and_mapping(text)
    if value is None:
        return None
    types = AxisType.Explicit if "Explicit" in text else AxisType.Auto
    mesh = mesh_named(DATA4_MODEL2, types=types)
    if "out_axis_resources" in text:
        return lambda: _under(mesh, lambda: _through_jit_output(value, mapping))
    argument = mesh if "explicit mesh argument" in text else None
    call = _shard_call(text, mapping, argument)
    if "inside jit" in text:
        inside = call
        call = lambda x: jax.jit(inside)(x)  # noqa: E731
    if argument is not None or "no mesh" in text:
        context: AbstractContextManager[Any] = nullcontext()
    elif "legacy" in text:
        context = legacy(mesh)
    else:
        context = jax.set_mesh(mesh)

    def scenario() -> Any:
        with context:
            result = call(value)
        if isinstance(result, Mapping):
            return [placed(result["named"]), placed(result["plain"])]
        return placed(result)

    return scenario


def _value_and_mapping(text: str) -> tuple[Any, Any]:
    if found := re.search(r"dim of size (\d+) on (\w+)=\d+", text):
        return hax.ones(hax.Axis("dim", int(found[1]))), {"dim": found[2]}
    if "out_axis_resources" in text:
        return hax.ones(hax.Axis("dim", 6)), {"dim": "data"}
    if "pytree" in text:
        return {"named": hax.ones((Dim2,)), "plain": jnp.ones(4)}, MAPPING
    if _repeated(text):
        return hax.ones((Dim1, Dim2)), {"dim1": "data", "dim2": "data"}
    if _unknown(text):
        return hax.ones((Dim1, Dim2)), {"dim2": "absent"}
    mapping: Any = MAPPING
    if re.search(r"without (a )?mapping|no (resource )?mapping", text):
        mapping = None
    elif found := re.search(r"\{[^}]*\}", text):
        mapping = literal(found[0])
    dims = re.search(r"\(((?:dim\d,?\s*)+)\)", text)
    names = re.findall(r"dim\d", dims[1]) if dims else ["dim1", "dim2"]
    known = r"jit|mesh|mapping|auto_sharded|replicates|re-shard"
    return (
        hax.ones(tuple(AXES[name] for name in names)) if re.search(known, text) else None
    ), mapping


def _shard_call(text: str, mapping: Any, mesh: Mesh | None) -> Callable[[Any], Any]:
    if "auto_sharded" in text:
        if mapping is None:
            return lambda x: partition.auto_sharded(x, mesh)

        def in_context(x: Any) -> Any:
            with partition.axis_mapping(mapping):
                return partition.auto_sharded(x, mesh)

        return in_context
    if "re-shard" in text:
        return lambda x: partition.shard(partition.shard(x, MAPPING, mesh), mapping, mesh)
    if re.search(r"existing|already", text):
        return lambda x: partition.shard(partition.shard(x, {"dim1": "data"}, mesh), mapping, mesh)
    if "shard_with_axis_mapping" in text:
        return lambda x: partition.shard_with_axis_mapping(x, mapping, mesh)
    return lambda x: partition.shard(x, mapping, mesh)


def _under(mesh: Mesh, call: Callable[[], Any]) -> Any:
    with jax.set_mesh(mesh):
        return call()


def _through_jit_output(value: Any, mapping: Any) -> Any:
    return placed(partition.named_jit(lambda x: x, out_axis_resources=mapping)(value))


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "shard": shard,
}
