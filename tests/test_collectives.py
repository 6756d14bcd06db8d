"""The table of collectives against what the installed jaxlib has."""

from __future__ import annotations

import importlib
import mmap
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh import collectives
from automesh.collectives import KINDS, MEASURED, STABLEHLO, is_kind, kind_named, why_unpriced
from automesh.cost.terms import value_of
from automesh.hlo.nouns import Computation, Instruction, Shape
from automesh.hlo.schedule.core_work import compute_of
from automesh.hlo.work.memories import Touched
from automesh.ir.graph import Operation
from automesh.ir.op_kinds import COLLECTIVES
from automesh.ir.terms.collect import collect, uncounted_in
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import partitioned

# What tells an operation between devices: whom it talks to, or where its result lies instead.
_TELLS = {"replica_groups", "source_target_pairs", "channel_handle", "out_sharding"}
# Every device keeps a part of what it has.
_MOVES_NOTHING = {"all_slice"}
# Opcodes of HLO between devices, as they stand in the libraries.
_OPCODE = re.compile(
    rb"\0(all-(?:reduce|gather|to-all)|reduce-scatter|ragged-all-to-all|cross-replica-sum"
    rb"|collective-[a-z]+)(?=\0)"
)


def operations_of(dialect: str) -> dict[str, Any]:
    module = importlib.import_module(f"jaxlib.mlir.dialects.{dialect}")
    found = (getattr(module, name) for name in dir(module))
    return {
        one.OPERATION_NAME.partition(".")[2]: one
        for one in found
        if isinstance(one, type) and getattr(one, "OPERATION_NAME", "").startswith(f"{dialect}.")
    }


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> str:
    """An operation without a price, which no version of jaxlib has."""
    reasons = collectives._UNPRICED  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(reasons, "collective_fold", "a fold over each group has no price")
    return "collective_fold"


def test_what_gets_a_row_is_not_called_unpriced_any_more(
    unpriced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unpriced(unpriced) and why_unpriced("collective-fold-start")
    monkeypatch.setitem(STABLEHLO, unpriced, kind_named("all-reduce"))
    assert not why_unpriced(unpriced)


def test_no_reason_is_left_of_what_has_a_row() -> None:
    # `send` to a host has none, whatever is priced of the sends that compilers make of permutes.
    assert not collectives._UNPRICED.keys() & STABLEHLO.keys()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("dialect", ["stablehlo", "sdy"])
def test_attributes_that_rows_name_are_those_of_the_dialect(dialect: str) -> None:
    """A name that an operation has not would leave a collective without its axes."""
    known = operations_of(dialect)
    for kind in KINDS:
        named = kind.shardy_axes if dialect == "sdy" else kind.resized_along
        if named:
            assert named in vars(known[kind.stablehlo]), kind.name


@pytest.mark.parametrize("dialect", ["stablehlo", "sdy"])
def test_every_collective_of_the_dialect_has_a_price_or_a_reason(dialect: str) -> None:
    between = {
        name for name, one in operations_of(dialect).items() if _TELLS & set(vars(one).keys())
    }
    assert len(between) >= 5
    unknown = between - STABLEHLO.keys() - _MOVES_NOTHING
    assert [name for name in sorted(unknown) if not why_unpriced(name)] == []


def test_every_collective_of_hlo_has_a_price_or_a_reason() -> None:
    libraries = [path for path in Path(jaxlib.__file__).parent.glob("**/*.so") if path.is_file()]
    names: set[str] = set()
    for library in libraries:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            names |= {one[1].decode() for one in _OPCODE.finditer(text)}
    assert {"all-gather", "reduce-scatter", "collective-permute"} <= names
    unknown = [name for name in sorted(names) if not (is_kind(name) or why_unpriced(name))]
    assert unknown == []


def test_kinds_are_consistent() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert set(STABLEHLO) == COLLECTIVES
    assert tuple(kind.name for kind in KINDS if not kind.priced_as) == MEASURED
    for kind in KINDS:
        assert is_kind(kind.name) and kind_named(kind.name) is kind
        assert (kind.priced_as or kind.name) in MEASURED
    with pytest.raises(KeyError):
        kind_named("all-scatter")


def test_a_broadcast_between_devices_is_priced() -> None:
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def step(x: jax.Array) -> jax.Array:
        def first(part: jax.Array) -> jax.Array:
            return jax.lax.pbroadcast(part, ("dp",), 0)

        each = jax.shard_map(first, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
        return each(x) * 2

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    lowered = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",))
    graph = read_graph(partitioned(lowered.compiler_ir("stablehlo"), sizes=None))
    terms = collect(graph, active=("dp", "tp"), platform="gpu")
    (term,) = terms.collectives
    assert (term.kind, term.axes) == ("collective-broadcast", ("dp",))
    assert value_of(term.payload_bytes, {"dp": 2, "tp": 4}) == 32 * 32 * 4
    assert terms.uncounted == ()


def test_what_has_no_price_is_named_in_a_step_and_in_a_compiled_module(unpriced: str) -> None:
    step = Operation(name=unpriced, operands=[], results=[], source="train.py:7")
    (found,) = uncounted_in(step)
    assert (found.what, found.source) == (unpriced, "train.py:7")
    assert "over each group" in found.why
    array = Shape(element_type="f32", dims=(8,), element_bits=32)
    compiled = Instruction(id=1, name="f.1", opcode="collective-fold", shape=array)
    computation = Computation(
        id=1, name="main", instructions={1: compiled}, root=1, is_fusion=False, is_scheduled=True
    )
    work = compute_of(computation, compiled, Touched())
    assert work is not None
    assert work.uncounted.startswith("`collective-fold`: a fold over each group")
