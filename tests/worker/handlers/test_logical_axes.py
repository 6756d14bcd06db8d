"""What a worker learns of logical axes from real steps, and what `build` gets as its mapping."""

from __future__ import annotations

import textwrap

import pytest

from automesh.errors import UsageError
from automesh.jsonio import from_json, to_json
from automesh.mesh.axes import MAPPING, Plan, parse_mesh
from automesh.program.nouns import Inspection, Propagation, StepRef
from automesh.program.script.signature import read_signature
from automesh.space.legal import REPEATED, find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.worker.handlers import jobs
from automesh.worker.messages import CompileJob, InspectJob, PropagateJob
from tests.e2e.test_readme import block
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]

NAMES = ("dp", "fsdp", "tp")
HEAD = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
"""
PLAIN = """
def build(mesh, mapping={"embed": "fsdp", "mlp": "tp"}):
    def spec(*names):
        return NamedSharding(mesh, P(*(mapping.get(name, name) for name in names)))

    def step(w, x):
        hidden = jax.lax.with_sharding_constraint(x @ w, spec("dp", "mlp"))
        return jnp.tanh(hidden).sum()

    w = jax.ShapeDtypeStruct((64, 36), jnp.float32, sharding=spec("embed", "mlp"))
    return jax.jit(step), (w, jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=spec("dp")))
"""
ROUNDED = """
def build(mesh, mapping={"vocab": "tp"}):
    parts = mesh.shape[mapping["vocab"]] if mapping["vocab"] else 1
    rows = -(-257 // parts) * parts
    where = NamedSharding(mesh, P(mapping["vocab"], None))
    table = jax.ShapeDtypeStruct((rows, 9), jnp.float32, sharding=where)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    return jax.jit(lambda table, ids: table[ids].sum()), (table, ids)
"""
STRICT = """
def build(mesh, mapping={"embed": "fsdp"}):
    if mesh.axis_names != ("dp", "fsdp", "tp"):
        raise ValueError("only dp, fsdp and tp")
    where = NamedSharding(mesh, P("dp", mapping["embed"]))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where)
    return jax.jit(lambda x: x.sum()), (x,)
"""
MANUAL = """
def build(mesh, mapping={"rows": "dp", "cols": "tp"}):
    spec = P(mapping["rows"], mapping["cols"])

    def step(x):
        return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return jax.jit(step), (jax.ShapeDtypeStruct((8, 12), jnp.float32),)
"""
SPARING = """
def build(mesh, mapping={"embed": "fsdp"}):
    def part(axis):  # Names an axis only where it splits something.
        return axis if axis and mesh.shape[axis] > 1 else None

    where = NamedSharding(mesh, P(part("dp"), part(mapping["embed"])))
    x = jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=where)
    return jax.jit(lambda x: x.sum()), (x,)
"""
EXPLICIT = """
import automesh

def build(mesh, mapping={"embed": "fsdp"}):
    where = NamedSharding(mesh, P("dp", mapping["embed"]))
    x = jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=where)
    return automesh.Workload(jax.jit(lambda x: x * 2), (x,), axis_types="explicit")
"""
NONE = """
def build(mesh):
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return jax.jit(lambda x: x * 2), (x,)
"""


@pytest.fixture
def entry(own_process, tmp_path):
    def write(text):
        path = tmp_path / "mapped.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return script(path)

    return write


def inspect(entry, **mapping) -> Inspection:
    job = InspectJob(
        step=StepRef(entry=entry), axis_names=NAMES, platform="cpu", mapping=tuple(mapping.items())
    )
    seen = jobs.handle(job, lambda event: {"go": True})
    assert isinstance(seen, Inspection)
    assert from_json(to_json(seen, Inspection), Inspection) == seen
    return seen


def parts(seen):
    return {
        tuple((one.size, tuple(n.removeprefix(MAPPING) for n in one.names)) for one in array.split)
        for array in seen.mapping.arrays
    }


def test_arguments_and_constraints_tell_what_logical_axes_split(entry):
    seen = inspect(entry(PLAIN), embed=("fsdp",), mlp=("tp",))
    assert seen.mapping.defaults == (("embed", ("fsdp",)), ("mlp", ("tp",)))
    assert seen.mapping.logical == {"embed", "mlp"}
    assert parts(seen) == {
        ((64, ("embed",)), (36, ("mlp",))),
        ((32, ("dp",)), (36, ("mlp",))),
    }
    names = {one.name for one in seen.mapping.arrays}
    assert "w" in names and any(name.startswith("the array at mapped.py:") for name in names)
    # What is left without a mapping: fsdp and tp are used by way of it alone.
    assert seen.used_axes == ("dp",)


def test_nothing_is_looked_for_where_no_mapping_is_searched(entry):
    seen = inspect(entry(PLAIN))
    assert seen.mapping.defaults == (("embed", ("fsdp",)), ("mlp", ("tp",)))
    assert seen.mapping.arrays == () and not seen.mapping.unseen
    assert seen.used_axes == ("dp", "fsdp", "tp")


def test_a_build_without_the_keyword_says_so(entry):
    assert inspect(entry(NONE)).mapping is None
    assert inspect(entry(NONE), embed=("fsdp",)).mapping is None


def test_sizes_that_a_step_rounds_up_are_not_held_against_it(entry):
    seen = inspect(entry(ROUNDED), vocab=("tp",))
    assert parts(seen) == {((0, ("vocab",)),)}


def test_a_step_that_refuses_further_axes_is_told(entry):
    seen = inspect(entry(STRICT), embed=("fsdp",))
    assert seen.mapping.arrays == ()
    assert seen.mapping.unseen == "ValueError: only dp, fsdp and tp"


def test_manual_regions_tell_by_their_specs(entry):
    seen = inspect(entry(MANUAL), rows=("dp",), cols=("tp",))
    assert parts(seen) == {((8, ("rows",)), (12, ("cols",)))}


def test_a_step_that_leaves_out_axes_of_size_one_is_looked_at_with_larger_ones(entry):
    seen = inspect(entry(SPARING), embed=("fsdp",))
    assert parts(seen) == {((12, ("embed",)),)}
    assert seen.used_axes == ("dp",)


def test_explicit_axes_have_logical_ones_too(entry):
    seen = inspect(entry(EXPLICIT), embed=("fsdp",))
    assert seen.axis_types == ("explicit",) * 3
    assert ((8, ("dp",)), (12, ("embed",))) in parts(seen)


def test_build_gets_the_plans_mapping_when_compiled_and_propagated(entry, tmp_path):
    mine = entry(PLAIN)
    seen = inspect(mine, embed=("fsdp",), mlp=("tp",))
    common = {"step": StepRef(entry=mine, axis_types=seen.axis_types, facts=seen.facts)}

    def fingerprint(mesh, **mapping):
        plan = Plan(axes=parse_mesh(mesh, NAMES), mapping=tuple(mapping.items()))
        events = []

        def emit(event):
            events.append(event)
            return {"go": False}

        jobs.handle(CompileJob(plan=plan, cache_dir=str(tmp_path / "cache"), **common), emit)
        return next(one["fingerprint"] for one in events if one.get("event") == "lowered")

    split = fingerprint("dp:2,tp:4", embed=("fsdp",), mlp=("tp",))
    assert fingerprint("dp:2,tp:4", embed=(), mlp=("tp",)) == split  # fsdp is 1
    assert fingerprint("dp:2,tp:4", embed=("tp",), mlp=()) != split
    assert fingerprint("dp:2,tp:4") == split  # the default of `build`

    def collectives(**mapping):
        job = PropagateJob(
            axis_names=NAMES,
            knobs=(),
            sizes=(("tp", 2),),
            probes=(),
            platform="cpu",
            mapping=tuple(mapping.items()),
            **common,
        )
        found = jobs.handle(job, lambda event: {"go": True})
        assert isinstance(found, Propagation)
        return found.terms

    assert collectives(embed=("tp",), mlp=()) != collectives(embed=(), mlp=("tp",))


def test_a_plan_with_a_mapping_needs_a_build_that_takes_it(entry, tmp_path):
    plan = Plan(axes=parse_mesh("dp:2", NAMES), mapping=(("embed", ()),))
    job = CompileJob(step=StepRef(entry=entry(NONE)), plan=plan, cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match="`build` takes no mapping of logical axes"):
        jobs.handle(job, lambda event: {"go": False})


def test_the_script_and_the_space_of_the_readme(entry, tmp_path):
    (tmp_path / "space.toml").write_text(block("mapping"))
    space = read_space(str(tmp_path / "space.toml"))
    seen = inspect(entry(block("mapped script")), embed=("fsdp",), mlp=("tp",))
    facts = StepFacts(used_axes=seen.used_axes, mapping=seen.mapping)
    found = find_legal(space, facts, num_devices=8, platform="cpu")
    assert "dp:2,tp:4 batch:dp embed:fsdp mlp:tp" in {str(plan) for plan in found.legal}
    assert {one.rule for one in found.rejections} == {
        "fsdp twice on an array",
        "axis fsdp unused by the mapping",
        REPEATED,
    }


def test_defaults_that_are_mappings_and_those_that_are_not():
    def of(default):
        return read_signature(lambda mesh, mapping=default: None).mapping

    assert of({"a": "dp", "b": ["dp", "tp"], "c": None}) == (
        ("a", ("dp",)),
        ("b", ("dp", "tp")),
        ("c", ()),
    )
    assert of(None) == ()
    assert of("megatron") is None
    assert read_signature(lambda mesh: None).mapping is None
    assert read_signature(lambda mesh, **rest: None).mapping == ()
    with pytest.raises(UsageError, match="maps logical axes to something else"):
        of({"a": 3})
