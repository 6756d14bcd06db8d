"""The groups of Haliax's mappings and queries: how a case becomes calls, where automesh departs."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from automesh import partition
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
from tests.support.fakes.worlds import cpus

_REFUSED = Wanted(raises="ValueError")
DATA4_MODEL2 = "data4,model2"


def mesh_named(text: str, *, types: AxisType = AxisType.Auto) -> Mesh:
    """The mesh that a case names, such as `data4,model2`, on CPU devices."""
    parts = [re.fullmatch(r"([a-z_]+)(\d+)", part.strip()) for part in text.split(",")]
    assert all(parts), f"the mesh `{text}` is not understood"
    names, sizes = [part[1] for part in parts if part], [int(part[2]) for part in parts if part]
    devices = np.array(cpus(int(np.prod(sizes)))).reshape(sizes)
    return Mesh(devices, tuple(names), axis_types=(types,) * len(names))


def spec_text(spec: Any) -> str:
    """A partition spec as the cases write it: `P('data', None)`."""
    return f"P{tuple(spec)!r}"


@contextmanager
def legacy(mesh: Mesh) -> Generator[None]:
    """`with mesh:`, which jax deprecates."""
    with ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(mesh)
        yield


def _context(mesh: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if mesh is None else jax.set_mesh(mesh_named(mesh))


def round_axis(case: Case, _: Case) -> Verdict:
    """`round_axis_for_partitioning`: up to a multiple of the mesh axes."""
    name, size = case["axis"]
    mapping, outer = case["mapping"], case.get("context_mapping")

    def rounded() -> dict[str, Any]:
        with (
            _context(case["mesh"]),
            nullcontext() if outer is None else partition.axis_mapping(outer),
        ):
            axis = partition.round_axis_for_partitioning(hax.Axis(name, size), mapping)
        return {"axis": [axis.name, axis.size]}

    held = mapping if mapping is not None else outer or {}
    departures = []
    if name not in held and case["mesh"] is None:
        same = Wanted(returns={"axis": [name, size]})
        departures.append(Departure(name="unmapped-axes-need-no-mesh", wanted=same))
    if case["expect"].get("raises") == "KeyError":
        departures.append(Departure(name="unknown-mesh-axes-are-named", wanted=_REFUSED))
    return judge([wanted(case["expect"])], attempt(rounded), *departures)


def physical_axis(case: Case, _: Case) -> Verdict:
    """`physical_axis_name` and `physical_axis_size`."""
    functions: Mapping[str, Any] = {
        "name": partition.physical_axis_name,
        "size": partition.physical_axis_size,
    }
    axis, mapping = case["axis"], case["mapping"]
    axis = hax.Axis(*axis) if isinstance(axis, list) else axis
    verdicts = []
    for key, function in functions.items():
        if key not in case:
            continue
        departures = []
        if case[key].get("raises") == "KeyError":
            departures.append(Departure(name="unknown-mesh-axes-are-named", wanted=_REFUSED))
        with _context(case.get("mesh", DATA4_MODEL2)):
            got = attempt(lambda function=function: function(axis, mapping))
        verdicts.append(judge([wanted(case[key])], got, *departures))
    return max(verdicts, key=lambda one: ["passed", "deviated", "failed"].index(one.status))


def axis_mapping(case: Case, _: Case) -> Verdict:
    """`axis_mapping`: nesting, merging, threads, exceptions."""
    text, original = case["case"], wanted(case["expect"])
    scenario = _nesting(text)
    if scenario is None:
        return uncovered(f"the case `{text}` is not understood")
    outer, inner, merge, extra = scenario
    if "exception" in text:
        return judge([original], attempt(lambda: _after_exception(inner)))
    if "thread" in text:
        return judge([original], attempt(lambda: _in_another_thread(inner)))

    def held() -> Any:
        around = nullcontext() if outer is None else partition.axis_mapping(outer)
        with around, partition.axis_mapping(inner, merge=merge, **extra):
            return partition.current_thread_local_mapping()

    departures = []
    if merge and outer is not None:
        name = "merge-lets-the-inner-win"
        inner_wins = Wanted(returns={**outer, **inner, **extra})
        departures.append(Departure(name=name, wanted=inner_wins))
    return judge([original], attempt(held), *departures)


_Nesting = tuple[dict[str, Any] | None, dict[str, Any], bool, dict[str, Any]]


def _nesting(text: str) -> _Nesting | None:
    """Outer mapping, inner mapping, `merge` and keyword arguments of a case's sentence."""
    merge = "merge=True" in text
    if found := re.search(r"conflicting (\w+): outer (\w+), inner (\w+)", text):
        return {found[1]: found[2]}, {found[1]: found[3]}, merge, {}
    if found := re.search(
        r"kwarg (\w+)='(\w+)' over mapping \w+='(\w+)' and outer \w+='(\w+)'", text
    ):
        name = found[1]
        return {name: found[4]}, {name: found[3]}, merge, {name: found[2]}
    parts = {
        key: dict(pair.split(":") for pair in re.sub(r"\s", "", held).split(",") if pair)
        for key, held in re.findall(r"(outer|inner) \{([^}]*)\}", text)
    }
    extra = dict(re.findall(r"(?:kwarg |, )(\w+)='(\w+)'", text))
    if "outer" in parts and "inner" in parts:
        return parts["outer"], parts["inner"], merge, extra
    if extra or re.search(r"no outer|exception|thread", text):
        return None, parts.get("inner", {} if extra else {"b": "model"}), merge, extra
    return None


def _after_exception(mapping: Mapping[str, Any]) -> Any:
    try:
        with partition.axis_mapping(mapping):
            raise RuntimeError
    except RuntimeError:
        return partition.current_thread_local_mapping()


def _in_another_thread(mapping: Mapping[str, Any]) -> Any:
    seen: list[Any] = []
    with partition.axis_mapping(mapping):
        thread = threading.Thread(
            target=lambda: seen.append(partition.current_thread_local_mapping())
        )
        thread.start()
        thread.join()
    (only,) = seen
    return only


_AXES = {name: hax.Axis(name, 16) for name in ("batch", "embed", "head", "both", "a", "b")}


def sharding_for_axis(case: Case, _: Case) -> Verdict:
    """`sharding_for_axis` and `pspec_for_axis`."""
    text: str = case["axes"]
    axes = _axes_of(text)
    if axes is None:
        return uncovered(f"the axes `{text}` are not understood")
    shared = re.search(r"both mapped to (\w+)", text)
    mapping = {"a": shared[1], "b": shared[1]} if shared else case.get("mapping", {"batch": "data"})

    def found() -> dict[str, Any]:
        sharding = partition.sharding_for_axis(axes, mapping)
        return {"spec": spec_text(sharding.spec), "mesh": dict(sharding.mesh.shape)}

    with _context(None if "no mesh" in text else DATA4_MODEL2):
        got = attempt(found)
        spec = attempt(lambda: spec_text(partition.pspec_for_axis(axes, mapping)))
    departures = []
    if case["expect"].get("raises") == "DuplicateSpecError":
        departures.append(Departure(name="one-mesh-axis-twice-is-named", wanted=_REFUSED))
    verdict = judge([wanted(case["expect"])], got, *departures)
    if "pspec" in case and verdict.status == "passed":
        return judge([wanted(case["pspec"])], spec)
    return verdict


def _axes_of(text: str) -> Any:
    if found := re.fullmatch(r"'(\w+)'( str)?", text):
        return found[1]
    if re.fullmatch(r"\(('\w+',? ?)+\)", text):
        return tuple(re.findall(r"\w+", text))
    if found := re.match(r"\(([\w,]*)\)", text):
        names = [name for name in found[1].split(",") if name]
        return tuple(_AXES[name] for name in names) if set(names) <= set(_AXES) else None
    name = text.split(",")[0]
    return _AXES.get(name)


def literal(text: str) -> Any:
    """`{dim2:data, dim3:[a,b]}` as the cases write mappings, as a dict."""
    quoted = re.sub(r"[A-Za-z_]\w*", lambda word: repr(word[0]), text)
    return ast.literal_eval(quoted)


def fully_replicated(spec: PartitionSpec) -> bool:
    """Whether a spec splits nothing."""
    return all(one is None for one in spec)


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "round_axis_for_partitioning": round_axis,
    "physical_axis": physical_axis,
    "axis_mapping": axis_mapping,
    "sharding_for_axis": sharding_for_axis,
}
