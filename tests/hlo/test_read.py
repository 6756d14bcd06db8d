"""The module reader: its schema, its agreement with jaxlib's own, its speed and its errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc_tools
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.errors import AutomeshError
from automesh.hlo import hlo_pb2, module_fingerprint, read_module
from automesh.hlo.read import iota_groups, mesh_groups
from tests.support.hlo_oracle import (
    assert_agrees,
    brute_iota,
    brute_mesh,
    brute_rows,
    from_text,
    module_class,
    serialized,
)
from tests.support.paths import ROOT

# The schema.


def test_generated_code_is_that_of_the_schema(tmp_path: Path) -> None:
    target = tmp_path / "hlo.binpb"
    arguments = ["protoc", f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    assert (
        protoc.main([*arguments, f"--descriptor_set_out={target}", "automesh/hlo/hlo.proto"]) == 0
    )
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    hlo_pb2.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):  # Newer compilers write the default names of JSON fields.
        _clear_json_names(file.message_type)
    assert fresh == committed


def _clear_json_names(messages: Any) -> None:
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _clear_json_names(message.nested_type)


# Our message, its name in xla; where the wire type is ours (bytes for a message that is never
# decoded, int32 for an enum), the field is in _OURS.
_MESSAGES = {
    "Layout": "LayoutProto",
    "Shape": "ShapeProto",
    "Payload": "Payload",
    "OpMetadata": "OpMetadata",
    "Literal": "LiteralProto",
    "WindowDimension": "WindowDimension",
    "Window": "Window",
    "ConvolutionDimensionNumbers": "ConvolutionDimensionNumbers",
    "DotDimensionNumbers": "DotDimensionNumbers",
    "RaggedDotDimensionNumbers": "RaggedDotDimensionNumbers",
    "FrontendAttributes": "FrontendAttributes",
    "ReplicaGroup": "ReplicaGroup",
    "SourceTarget": "SourceTarget",
    "CollectiveDeviceList": "CollectiveDeviceListProto",
    "IotaReplicaGroupList": "IotaReplicaGroupListProto",
    "Mesh": "MeshProto",
    "Mesh.Axis": "MeshProto.MeshAxis",
    "Mesh.IotaTransform": "MeshProto.IotaTransform",
    "AxisRef": "AxisRefProto",
    "AxisRef.SubAxis": "AxisRefProto.SubAxis",
    "MeshAxesReplicaGroupList": "MeshAxesReplicaGroupListProto",
    "Instruction": "HloInstructionProto",
    "Computation": "HloComputationProto",
    "Schedule": "HloScheduleProto",
    "Schedule.InstructionSequence": "HloScheduleProto.InstructionSequence",
    "StackFrameIndex": "StackFrameIndexProto",
    "StackFrameIndex.FileLocation": "StackFrameIndexProto.FileLocation",
    "StackFrameIndex.StackFrame": "StackFrameIndexProto.StackFrame",
    "Module": "HloModuleProto",
}
# (message, field): what the oldest jaxlib, 0.10.1, does not know yet.
_NEWER_THAN_0_10_1 = {
    ("Mesh", "iota_transform"),
    ("Mesh.IotaTransform", "reshape_dims"),
    ("Mesh.IotaTransform", "transpose_perm"),
}
_OURS = {"element_type", "sharding", "original_value", "input_output_alias"}


@pytest.mark.parametrize("ours", _MESSAGES)
def test_schema_is_part_of_jaxlibs(ours: str) -> None:
    is_oldest = jaxlib.__version__ == "0.10.1"
    pool = module_class().DESCRIPTOR.file.pool
    message = hlo_pb2.DESCRIPTOR.pool.FindMessageTypeByName(f"automesh.hlo.{ours}")
    known = [
        field
        for field in message.fields
        if not is_oldest or (ours, field.name) not in _NEWER_THAN_0_10_1
    ]
    if not known:
        pytest.skip(f"jaxlib {jaxlib.__version__} has no {_MESSAGES[ours]}")
    theirs = pool.FindMessageTypeByName(f"xla.{_MESSAGES[ours]}")
    for field in known:
        other = theirs.fields_by_number[field.number]
        assert (field.name, field.is_repeated) == (other.name, other.is_repeated)
        if field.name in _OURS:
            assert other.type in (other.TYPE_MESSAGE, other.TYPE_ENUM)
        else:
            assert field.type == other.type


# Agreement on whole programs.


def train_step(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    """A scanned, rematerialized transformer in bfloat16 with float32 parameters."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: value.astype(jnp.bfloat16) for name, value in w.items()}
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32))
        mixed = jnp.einsum("bhst,bthk->bshk", scores.astype(jnp.bfloat16), v)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"])
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return jax.lax.with_sharding_constraint(x, P(("dp", "fsdp"))), None

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        layers = {name: value for name, value in params.items() if name != "embedding"}
        x = params["embedding"].astype(jnp.bfloat16)[batch]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
        logits = (x @ params["embedding"].astype(jnp.bfloat16).T).astype(jnp.float32)
        return jnp.take_along_axis(-jax.nn.log_softmax(logits), batch[..., None], axis=-1).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value


def compile_step(sizes: tuple[int, int, int], layers: int = 4) -> bytes:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    width, heads, hidden, vocabulary = 64, 8, 128, 128
    shapes = {
        "embedding": ((vocabulary, width), P("tp", "fsdp")),
        "o": ((layers, heads, width // heads, width), P(None, "tp", None, "fsdp")),
        "up": ((layers, width, hidden), P(None, "fsdp", "tp")),
        "down": ((layers, hidden, width), P(None, "tp", "fsdp")),
    }
    for name in ("q", "k", "v"):
        shapes[name] = ((layers, width, heads, width // heads), P(None, "fsdp", "tp"))
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }
    batch = jax.ShapeDtypeStruct(
        (16, 32), jnp.int32, sharding=NamedSharding(mesh, P(("dp", "fsdp")))
    )
    with jax.set_mesh(mesh):
        return serialized(jax.jit(train_step, donate_argnums=0).lower(params, batch).compile())


@pytest.mark.parametrize("sizes", [(1, 4, 2), pytest.param((2, 2, 4), marks=pytest.mark.long)])
def test_reader_agrees_with_jaxlib_on_a_train_step(sizes: tuple[int, int, int]) -> None:
    assert assert_agrees(compile_step(sizes)) > 500


ENCODINGS = """HloModule encodings, is_scheduled=true, num_partitions=8
ENTRY entry {
  p = f32[64]{0} parameter(0)
  a = f32[128]{0} all-gather(p), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, use_global_device_ids=true
  b = f32[128]{0} all-gather(p), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  c = f32[128]{0} all-gather(p), channel_id=3, replica_groups=mesh['x'=4,'y'=2] {'y'}, dimensions={0}, use_global_device_ids=true
  d = f32[128]{0} all-gather(p), channel_id=4, replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}, dimensions={0}, use_global_device_ids=true
  e = f32[128]{0} all-gather(p), channel_id=5, replica_groups=mesh['x'=2,'y'=4], device_ids=([2,4]T(1,0)) {'x'}, dimensions={0}, use_global_device_ids=true
  ROOT t = (f32[128]{0}, f32[128]{0}, f32[128]{0}, f32[128]{0}, f32[128]{0}) tuple(a, b, c, d, e)
}"""  # noqa: E501


def test_reader_decodes_every_encoding_of_groups() -> None:
    data = from_text(ENCODINGS)
    assert assert_agrees(data) == 7
    module = read_module(data)
    gathers = [i for i in module.entry_computation.instructions.values() if i.groups is not None]
    assert [i.groups_encoding for i in gathers] == ["list", "iota", "mesh", "mesh", "mesh"]
    assert {i.groups for i in gathers[:4]} == {((0, 1), (2, 3), (4, 5), (6, 7))}
    # Mesh rows are 0 4 1 5 and 2 6 3 7; a group is a column.
    assert gathers[4].groups == ((0, 2), (4, 6), (1, 3), (5, 7))


def test_reader_decodes_legacy_groups() -> None:
    message = module_class().FromString(from_text(ENCODINGS))
    for instruction in message.computations[0].instructions:
        if instruction.name == "a":
            groups = list(instruction.collective_device_list.replica_groups)
            instruction.ClearField("collective_device_list")
            instruction.replica_groups.extend(groups)
    data = message.SerializeToString()
    assert_agrees(data)
    first = read_module(data).entry_computation.instructions
    legacy = next(i for i in first.values() if i.name == "a")
    assert (legacy.groups_encoding, legacy.groups) == ("legacy", ((0, 1), (2, 3), (4, 5), (6, 7)))


# Groups against brute force.


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """Sizes, parts (a whole axis, or one part of it, of distinct axes in any order), device ids."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4))
    assume(np.prod(sizes) <= 256)
    chosen = draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    parts = []
    for axis in chosen:
        before = draw(
            st.sampled_from([d for d in range(1, sizes[axis] + 1) if not sizes[axis] % d])
        )
        rest = sizes[axis] // before
        part = draw(st.sampled_from([d for d in range(1, rest + 1) if not rest % d]))
        parts.append((axis, before, part))
    return sizes, parts, draw(st.permutations(range(int(np.prod(sizes)))))


@given(meshes())
def test_mesh_groups_match_brute_force(
    case: tuple[list[int], list[tuple[int, int, int]], list[int]],
) -> None:
    sizes, parts, ids = case
    assert mesh_groups(sizes, parts, ids) == brute_mesh(sizes, parts, ids)
    assert mesh_groups(sizes, parts) == brute_mesh(sizes, parts, list(range(len(ids))))


@given(st.data())
def test_iota_groups_match_brute_force(data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    permutation = data.draw(st.permutations(range(len(dims))))
    count = int(np.prod(dims))
    size = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    expected = brute_rows(brute_iota(dims, permutation), size)
    assert iota_groups(count // size, size, dims, permutation) == expected


# Details, speed, errors.


def test_instructions_carry_what_the_user_wrote() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.dot(x, x)

    module = read_module(
        serialized(jax.jit(f).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile())
    )
    (dot,) = (
        i
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode == "dot"
    )
    assert dot.op_name == "jit(f)/dot_general"
    assert Path(dot.source_file) == Path(__file__)
    assert "jnp.dot(x, x)" in Path(__file__).read_text().splitlines()[dot.source_line - 1]
    assert (str(dot.shape), dot.shape.bytes) == ("f32[8,8]", 256)


def test_what_libraries_add_to_an_instruction_is_left_alone() -> None:
    """Libraries of kernels (tokamax) write their own text beside the metadata. It was taken for
    metadata, and no step with such a kernel could be counted."""

    def step(x: jax.Array) -> jax.Array:
        with set_xla_metadata(xla_metadata_payload="library:{'op': 'sine'}"):
            return jnp.sin(x)

    compiled = jax.jit(step).lower(jnp.ones(4)).compile()
    (sine,) = [
        one
        for computation in read_module(serialized(compiled)).computations.values()
        for one in computation.instructions.values()
        if one.opcode == "sine"
    ]
    assert sine.op_name == "jit(step)/sin"


def test_reader_decodes_scalar_constants_of_every_type() -> None:
    constants = {
        "pred[]": ("true", True), "s8[]": ("-3", -3), "u8[]": ("200", 200), "s16[]": ("-300", -300),
        "u16[]": ("60000", 60000), "s32[]": ("-7", -7), "u32[]": ("4000000000", 4000000000),
        "s64[]": ("-9000000000", -9000000000), "u64[]": ("9000000000", 9000000000),
        "f16[]": ("1.5", 1.5), "bf16[]": ("-2.5", -2.5), "f32[]": ("0.25", 0.25),
        "f64[]": ("0.1", 0.1), "s32[2]": ("{1, 2}", None),
    }  # fmt: skip
    lines = [f"  c{k} = {t} constant({text})" for k, (t, (text, _)) in enumerate(constants.items())]
    text = "HloModule m\nENTRY e {\n" + "\n".join(lines) + "\n  ROOT r = f32[] constant(0)\n}"
    module = read_module(from_text(text))
    found = {i.name: i.literal for i in module.entry_computation.instructions.values()}
    for k, (_, value) in enumerate(constants.values()):
        assert found[f"c{k}"] == value
        assert type(found[f"c{k}"]) is type(value)


def test_backend_config_is_json_or_nothing() -> None:
    text = (
        "HloModule m\nENTRY e {{\n  p = f32[4]{{0}} parameter(0)\n"
        "  ROOT n = f32[4]{{0}} negate(p), backend_config={}\n}}"
    )
    for written, expected in {'{"a":{"b":"1"}}': {"a": {"b": "1"}}, '"not json"': {}}.items():
        module = read_module(from_text(text.format(written)))
        assert module.entry_computation.root_instruction.config == expected


def test_thousands_of_instructions_take_tens_of_milliseconds() -> None:
    chain = "\n".join(
        f'  x{k} = f32[64,64]{{1,0}} add(x{k - 1}, x{k - 1}), metadata={{op_name="jit(f)/add"}}'
        for k in range(1, 5001)
    )
    data = from_text(
        f"HloModule m\nENTRY e {{\n  x0 = f32[64,64]{{1,0}} parameter(0)\n{chain}\n"
        "  ROOT r = f32[64,64]{1,0} negate(x5000)\n}"
    )
    read_module(data)

    def measure() -> float:
        start = time.process_time()  # CPU time: the machine may be shared.
        assert len(read_module(data)) == 5002
        return time.process_time() - start

    assert min(measure() for _ in range(5)) < 0.25


@pytest.mark.parametrize("data", [b"not a module at all", b"", b"\x0a\x01m"])
def test_what_is_not_a_module_is_refused(data: bytes) -> None:
    with pytest.raises(AutomeshError, match="not a serialized XLA module"):
        read_module(data)


def test_unknown_element_type_is_refused() -> None:
    message = module_class().FromString(from_text(ENCODINGS))
    message.computations[0].instructions[0].shape.element_type = 99
    with pytest.raises(AutomeshError, match="unknown element type 99"):
        read_module(message.SerializeToString())


# Fingerprints.


def test_fingerprint_ignores_names_ids_channels_and_metadata() -> None:
    data = from_text(ENCODINGS)
    message = module_class().FromString(data)
    message.name = "other"
    shift = 1000
    message.entry_computation_id += shift
    for sequence in list(message.schedule.sequences.values()):
        ids = [number + shift for number in sequence.instruction_ids]
        del sequence.instruction_ids[:]
        sequence.instruction_ids.extend(ids)
    for key in list(message.schedule.sequences):
        message.schedule.sequences[key + shift].CopyFrom(message.schedule.sequences[key])
        del message.schedule.sequences[key]
    for computation in message.computations:
        computation.name += "x"
        computation.id += shift
        computation.root_id += shift
        for instruction in computation.instructions:
            instruction.name += "x"
            instruction.id += shift
            instruction.channel_id += 7 if instruction.channel_id else 0
            instruction.metadata.op_name = "renamed"
            for k, operand in enumerate(instruction.operand_ids):
                instruction.operand_ids[k] = operand + shift
    changed = message.SerializeToString()
    assert changed != data
    assert module_fingerprint(read_module(changed)) == module_fingerprint(read_module(data))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all-gather(p), channel_id=2", "all-gather(a), channel_id=2"),
        ("replica_groups=[4,2]<=[8]", "replica_groups=[4,2]<=[2,4]T(1,0)"),
        ("f32[64]{0} parameter", "f32[64]{0:T(8)} parameter"),
        ("tuple(a, b, c, d, e)", "tuple(b, a, c, d, e)"),
    ],
)
def test_fingerprint_sees_a_different_program(old: str, new: str) -> None:
    text = ENCODINGS.replace(old, new)
    assert text != ENCODINGS
    if "all-gather(a)" in new:
        text = text.replace("b = f32[128]{0} all-gather(a)", "b = f32[256]{0} all-gather(a)")
        text = text.replace("(f32[128]{0}, f32[128]{0},", "(f32[128]{0}, f32[256]{0},")
    fingerprints = {module_fingerprint(read_module(from_text(t))) for t in (text, ENCODINGS)}
    assert len(fingerprints) == 2


def test_fingerprint_is_the_same_for_renamed_axes_and_groups_in_another_encoding() -> None:
    list_form = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    others = ("replica_groups=[4,2]<=[8]", "replica_groups=mesh['x'=4,'y'=2] {'y'}")
    texts = [ENCODINGS.replace(other, list_form) for other in others] + [ENCODINGS]
    assert len(set(texts)) == 3
    assert len({module_fingerprint(read_module(from_text(text))) for text in texts}) == 1


def test_fingerprint_is_the_same_on_meshes_that_differ_in_axis_names() -> None:
    def compiled(names: tuple[str, str], sizes: tuple[int, int]) -> str:
        devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
        mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * 2)
        x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P(names)))
        function = jax.jit(lambda x: x.T @ x, out_shardings=NamedSharding(mesh, P()))
        return module_fingerprint(read_module(serialized(function.lower(x).compile())))

    # The batch is split over both axes: only the number of devices matters.
    first = compiled(("dp", "fsdp"), (8, 1))
    assert compiled(("fsdp", "dp"), (1, 8)) == first
    assert compiled(("a", "b"), (2, 4)) == first
    assert compiled(("dp", "fsdp"), (4, 1)) != first
