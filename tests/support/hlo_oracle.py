"""An independent reader of XLA modules: jaxlib's own message descriptors.

jaxlib's shared library carries the serialized FileDescriptorProtos of the messages that it was
built with, as plain bytes. They make classes with every field, in a pool of their own, so that
nothing here depends on the numbers in `automesh/hlo/hlo.proto`.
"""

from __future__ import annotations

import itertools
import math
import mmap
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib
from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from automesh.hlo import Instruction, Shape, read_module

_LIBRARIES = ("libjax_common.so", "libjax_common.dylib", "jax_common.dll")
_WELL_KNOWN = (any_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
# Field numbers of FileDescriptorProto, by wire type.
_LENGTH_DELIMITED = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15}
_VARINT = {10, 11, 14}


def serialized(compiled: Any) -> bytes:
    """The proto of the first module of a `jax.stages.Compiled`."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()


def from_text(text: str) -> bytes:
    """The proto of a module in XLA's text form, through XLA's own parser."""
    try:
        from jaxlib import _hlo as parser
    except ImportError:
        from jaxlib import _jax as parser  # jaxlib 0.10.1

    return parser.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def has_groups_that_jaxlib_does_not_know(data: bytes) -> bool:
    """Whether a recorded module states replica groups in a field newer than the installed jaxlib,
    which then cannot say what they are."""
    module = module_class().FromString(data)
    return any(
        len(UnknownFieldSet(one.mesh_axes_replica_group_list.mesh))
        for computation in module.computations
        for one in computation.instructions
        if one.HasField("mesh_axes_replica_group_list")
    )


@cache
def module_class() -> Any:
    """The class of `xla.HloModuleProto`, as the installed jaxlib knows it."""
    library = next(
        path for name in _LIBRARIES if (path := Path(jaxlib.__file__).parent / name).exists()
    )
    pool = descriptor_pool.DescriptorPool()
    done: set[str] = set()
    for well_known in _WELL_KNOWN:
        pool.AddSerializedFile(well_known.DESCRIPTOR.serialized_pb)
        done.add(well_known.DESCRIPTOR.name)

    def add(name: str, data: mmap.mmap) -> None:
        if name in done:
            return
        file = _find(name, data)
        for dependency in file.dependency:
            add(dependency, data)
        pool.AddSerializedFile(file.SerializeToString())
        done.add(name)

    with (
        library.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        add("xla/service/hlo.proto", data)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xla.HloModuleProto"))


def _find(name: str, data: mmap.mmap) -> descriptor_pb2.FileDescriptorProto:
    key = b"\n" + bytes([len(name)]) + name.encode()
    start = -1
    while (start := data.find(key, start + 1)) >= 0:
        try:
            file = descriptor_pb2.FileDescriptorProto.FromString(data[start : _end(data, start)])
        except DecodeError:
            continue
        if file.message_type or file.enum_type:
            return file
    raise LookupError(f"jaxlib carries no descriptor of {name}")


def _end(data: mmap.mmap, start: int) -> int:
    """Where the message that starts at `start` ends: at the first thing that is no field of it."""
    at, names = start, 0
    while True:
        key, after = _varint(data, at)
        field, wire = key >> 3, key & 7
        names += field == 1
        if wire == 2 and field in _LENGTH_DELIMITED and names == 1:
            length, after = _varint(data, after)
            at = after + length
        elif wire == 0 and field in _VARINT:
            _, at = _varint(data, after)
        else:
            return at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def assert_agrees(data: bytes) -> int:
    """Checks `read_module` against jaxlib's descriptors on every instruction; returns how many.

    Compared: computations (name, root, schedule, fusion or not), and for each instruction its
    name, opcode, shape, operands, called computations, control predecessors, groups, pairs,
    channel, dot and convolution dimensions, scalar literals, metadata, frontend attributes and
    backend config.
    """
    expected = module_class().FromString(data)
    module = read_module(data)
    assert module.name == expected.name
    assert module.entry == expected.entry_computation_id
    assert list(module.computations) == [c.id for c in expected.computations]
    sequences = {item.key: item.value for item in _entries(expected.schedule.sequences)}
    seen = 0
    for theirs in expected.computations:
        ours = module.computations[theirs.id]
        order = [i.id for i in theirs.instructions]
        if theirs.id in sequences:
            order = list(sequences[theirs.id].instruction_ids)
        assert list(ours.instructions) == order
        assert len(order) == len(theirs.instructions)
        assert ours.is_scheduled == (theirs.id in sequences)
        assert (ours.name, ours.root, ours.is_fusion, ours.thread) == (
            theirs.name,
            theirs.root_id,
            theirs.is_fusion_computation,
            theirs.execution_thread,
        )
        for message in theirs.instructions:
            _assert_same(ours.instructions[message.id], message, expected)
            seen += 1
    assert seen == len(module)
    return seen


def _entries(sequences: Any) -> list[Any]:
    """A map field, as the list of entries that it is on the wire."""
    if not hasattr(sequences, "items"):
        return list(sequences)
    entry = type("Entry", (), {})
    found = []
    for key, value in sequences.items():
        item = entry()
        item.key, item.value = key, value
        found.append(item)
    return found


def _assert_same(ours: Instruction, theirs: Any, module: Any) -> None:
    where = theirs.name
    assert (ours.id, ours.name, ours.opcode) == (theirs.id, theirs.name, theirs.opcode)
    _assert_same_shape(ours.shape, theirs.shape)
    assert list(ours.operands) == list(theirs.operand_ids), where
    assert list(ours.called) == list(theirs.called_computation_ids), where
    assert list(ours.predecessors) == list(theirs.control_predecessor_ids), where
    assert ours.groups == _groups(theirs), where
    assert list(ours.pairs) == [(p.source, p.target) for p in theirs.source_target_pairs], where
    assert (ours.channel, ours.global_ids) == (theirs.channel_id, theirs.use_global_device_ids)
    assert (ours.parameter, ours.tuple_index) == (theirs.parameter_number, theirs.tuple_index)
    assert list(ours.dimensions) == list(theirs.dimensions), where
    assert (ours.direction, ours.target, ours.fusion_kind, ours.thread) == (
        theirs.comparison_direction,
        theirs.custom_call_target,
        theirs.fusion_kind,
        theirs.async_execution_thread,
    )
    assert ours.backend_config == theirs.backend_config, where
    assert dict(ours.frontend) == _frontend(theirs.frontend_attributes.map), where
    assert ours.op_name == theirs.metadata.op_name, where
    assert (ours.source_file, ours.source_line) == _source(theirs.metadata, module), where
    _assert_same_dimensions(ours, theirs)
    if theirs.opcode == "constant" and not theirs.shape.dimensions:
        _assert_same_literal(ours, theirs.literal)


def _assert_same_shape(ours: Shape, theirs: Any) -> None:
    number = theirs.element_type
    name = type(theirs).DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number[number]
    assert ours.element_type == name.name.lower().removesuffix("_type")
    assert list(ours.dims) == list(theirs.dimensions)
    assert ours.memory_space == theirs.layout.memory_space
    assert list(ours.layout) == list(theirs.layout.minor_to_major)
    assert len(ours.elements) == len(theirs.tuple_shapes)
    for our_element, their_element in zip(ours.elements, theirs.tuple_shapes):
        _assert_same_shape(our_element, their_element)


def _assert_same_dimensions(ours: Instruction, theirs: Any) -> None:
    if theirs.opcode == "dot":
        numbers = theirs.dot_dimension_numbers
        assert ours.dot is not None
        assert list(ours.dot.lhs_contracting) == list(numbers.lhs_contracting_dimensions)
        assert list(ours.dot.rhs_contracting) == list(numbers.rhs_contracting_dimensions)
        assert list(ours.dot.lhs_batch) == list(numbers.lhs_batch_dimensions)
        assert list(ours.dot.rhs_batch) == list(numbers.rhs_batch_dimensions)
    if theirs.opcode == "convolution":
        numbers = theirs.convolution_dimension_numbers
        assert ours.convolution is not None
        assert ours.convolution.input_batch == numbers.input_batch_dimension
        assert ours.convolution.input_feature == numbers.input_feature_dimension
        assert ours.convolution.output_feature == numbers.output_feature_dimension
        assert ours.convolution.kernel_input_feature == numbers.kernel_input_feature_dimension
        assert list(ours.convolution.input_spatial) == list(numbers.input_spatial_dimensions)
        assert list(ours.convolution.kernel_spatial) == list(numbers.kernel_spatial_dimensions)
        assert list(ours.convolution.output_spatial) == list(numbers.output_spatial_dimensions)
        assert [d.size for d in ours.convolution.window] == [
            d.size for d in theirs.window.dimensions
        ]


def _assert_same_literal(ours: Instruction, theirs: Any) -> None:
    listed = [
        value[0]
        for field, value in theirs.ListFields()
        if field.type != field.TYPE_BYTES and field.name not in ("shape", "tuple_literals")
    ]
    if listed:
        assert ours.literal == listed[0] or (ours.literal != ours.literal != listed[0])


def _frontend(entries: Any) -> dict[str, str]:
    return dict(entries) if hasattr(entries, "items") else {e.key: e.value for e in entries}


def _source(metadata: Any, module: Any) -> tuple[str, int]:
    if metadata.source_file or not metadata.stack_frame_id:
        return metadata.source_file, metadata.source_line
    index = module.stack_frame_index
    place = index.file_locations[
        index.stack_frames[metadata.stack_frame_id - 1].file_location_id - 1
    ]
    return index.file_names[place.file_name_id - 1], place.line


def _groups(theirs: Any) -> tuple[tuple[int, ...], ...] | None:
    """Replica groups, by brute force over coordinates."""
    if theirs.HasField("iota_collective_device_list"):
        iota = theirs.iota_collective_device_list
        count = iota.num_replica_groups * iota.num_devices_per_group
        flat = brute_iota(list(iota.iota_reshape_dims) or [count], list(iota.iota_transpose_perm))
        return brute_rows(flat, iota.num_devices_per_group)
    if theirs.HasField("mesh_axes_replica_group_list"):
        listed = theirs.mesh_axes_replica_group_list
        sizes = [axis.size for axis in listed.mesh.axes]
        ids = list(listed.mesh.device_ids) or list(range(math.prod(sizes)))
        # jaxlib 0.10.1 has no such field.
        known = listed.mesh.DESCRIPTOR.fields_by_name
        if "iota_transform" in known and listed.mesh.HasField("iota_transform"):
            transform = listed.mesh.iota_transform
            ids = brute_iota(list(transform.reshape_dims), list(transform.transpose_perm))
        parts = [
            (
                axis.mesh_axis_index,
                axis.sub_axis_info.pre_size or 1,
                axis.sub_axis_info.size or sizes[axis.mesh_axis_index],
            )
            for axis in listed.axes
        ]
        return brute_mesh(sizes, parts, ids)
    if theirs.HasField("collective_device_list"):
        return tuple(tuple(g.replica_ids) for g in theirs.collective_device_list.replica_groups)
    if theirs.replica_groups:
        return tuple(tuple(g.replica_ids) for g in theirs.replica_groups)
    return None


def brute_iota(dims: list[int], permutation: list[int]) -> list[int]:
    """iota(prod(dims)) reshaped to `dims` and transposed, one element at a time."""
    permutation = permutation or list(range(len(dims)))
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    return [
        sum(index * strides[axis] for index, axis in zip(indices, permutation))
        for indices in itertools.product(*(range(dims[axis]) for axis in permutation))
    ]


def brute_rows(flat: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(flat[at : at + size]) for at in range(0, len(flat), size))


def brute_mesh(
    sizes: list[int], parts: list[tuple[int, int, int]], ids: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that agree in every digit of their coordinates outside `parts`.

    A part (axis, before, size) of an axis of length n is the middle digit of a coordinate written
    with radices (before, size, n / before / size), major to minor.
    """
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for device, coordinates in zip(ids, itertools.product(*map(range, sizes))):
        inside = []
        for axis, before, size in parts:
            inside.append(coordinates[axis] // (sizes[axis] // (before * size)) % size)
        outside = list(coordinates)
        for axis, before, size in parts:  # Erase the digit.
            unit = sizes[axis] // (before * size)
            outside[axis] -= coordinates[axis] // unit % size * unit
        groups.setdefault(tuple(outside), []).append((tuple(inside), device))
    return tuple(tuple(device for _, device in sorted(members)) for members in groups.values())
