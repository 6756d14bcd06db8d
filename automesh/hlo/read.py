"""Reads a serialized HloModuleProto into a `Module`."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError

from automesh import limits
from automesh.errors import AutomeshError
from automesh.hlo import hlo_pb2
from automesh.hlo.nouns import (
    Computation,
    ConvolutionDimensions,
    DotDimensions,
    Groups,
    Instruction,
    Module,
    Scalar,
    Shape,
    WindowDimension,
)
from automesh.skipped import reason_of

# Device groups of a collective, decoded from the encodings that XLA writes.
#
# Source: xla/hlo/ir/collective_device_list.h, mesh_and_axis.h, replica_group.h and the messages in
# xla_data.proto.

AxisPart = tuple[int, int, int]


def iota_groups(
    groups: int, size: int, reshape: Sequence[int] = (), permutation: Sequence[int] = ()
) -> Groups:
    """Decodes `[groups,size]<=[reshape]T(permutation)`.

    >>> iota_groups(2, 4, (4, 2), (1, 0))
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    return _as_groups(_iota(groups * size, reshape, permutation).reshape(groups, size))


def mesh_groups(
    sizes: Sequence[int], parts: Sequence[AxisPart], device_ids: Sequence[int] | None = None
) -> Groups:
    """Decodes groups given as axes, or parts of axes, of a mesh.

    Args:
      sizes: of the mesh's axes, major to minor.
      parts: what one group spans, major to minor: (axis, product of the axis's factors before the
        part, size of the part); a whole axis is (axis, 1, its size).
      device_ids: of the mesh, row by row; None means 0, 1, 2 ...

    >>> mesh_groups((2, 4), [(1, 1, 4)])
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> mesh_groups((2, 4), [(1, 2, 2), (0, 1, 2)])
    ((0, 4, 1, 5), (2, 6, 3, 7))
    """
    count = math.prod(sizes)
    _check_count(count)
    devices = np.arange(count) if device_ids is None else np.asarray(device_ids)
    shape: list[int] = []
    where: dict[tuple[int, int], int] = {}
    for axis, size in enumerate(sizes):
        bounds = {1, size}
        for part_axis, before, part in parts:
            if part_axis == axis:
                bounds |= {before, before * part}
        cuts = sorted(bounds)
        for low, high in itertools.pairwise(cuts):
            where[axis, low] = len(shape)
            shape.append(high // low)
    inside = [
        where[axis, low]
        for axis, before, part in parts
        for low in sorted(low for a, low in where if a == axis and before <= low < before * part)
    ]
    outside = [position for position in range(len(shape)) if position not in inside]
    size = math.prod(shape[position] for position in inside)
    return _as_groups(devices.reshape(shape).transpose(outside + inside).reshape(-1, size))


@lru_cache(maxsize=4096)
def decode_iota(serialized: bytes) -> Groups:
    """Decodes a serialized `IotaReplicaGroupList`."""
    message = hlo_pb2.IotaReplicaGroupList.FromString(serialized)
    return iota_groups(
        message.num_replica_groups,
        message.num_devices_per_group,
        tuple(message.iota_reshape_dims),
        tuple(message.iota_transpose_perm),
    )


@lru_cache(maxsize=4096)
def decode_mesh(serialized: bytes) -> Groups:
    """Decodes a serialized `MeshAxesReplicaGroupList`."""
    message = hlo_pb2.MeshAxesReplicaGroupList.FromString(serialized)
    sizes = [axis.size for axis in message.mesh.axes]
    parts: list[AxisPart] = []
    for axis in message.axes:
        if axis.HasField("sub_axis_info"):
            parts.append(
                (axis.mesh_axis_index, axis.sub_axis_info.pre_size, axis.sub_axis_info.size)
            )
        else:
            parts.append((axis.mesh_axis_index, 1, sizes[axis.mesh_axis_index]))
    ids: Sequence[int] | None = list(message.mesh.device_ids) or None
    if message.mesh.HasField("iota_transform"):
        transform = message.mesh.iota_transform
        ids = (
            _iota(math.prod(sizes), transform.reshape_dims, transform.transpose_perm)
            .reshape(-1)
            .tolist()
        )
    return mesh_groups(sizes, parts, ids)


def _iota(count: int, reshape: Sequence[int], permutation: Sequence[int]) -> np.ndarray:
    _check_count(count)
    devices = np.arange(count).reshape(tuple(reshape) or (count,))
    return devices.transpose(tuple(permutation)) if permutation else devices


def _check_count(count: int) -> None:
    if not 0 <= count <= limits.GROUP_DEVICES:
        raise AutomeshError(f"a collective with {count} devices in its groups")


def _as_groups(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


# Number, name and bits in memory of xla.PrimitiveType. Types below 8 bits take a byte each unless
# the layout says that they are packed (ShapeUtil::ByteSizeOfElements).
_ELEMENT_TYPES: Mapping[int, tuple[str, int]] = {
    1: ("pred", 8), 30: ("s1", 8), 26: ("s2", 8), 21: ("s4", 8), 2: ("s8", 8), 3: ("s16", 16),
    4: ("s32", 32), 5: ("s64", 64), 31: ("u1", 8), 27: ("u2", 8), 22: ("u4", 8), 6: ("u8", 8),
    7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16), 11: ("f32", 32),
    12: ("f64", 64), 13: ("tuple", 0), 14: ("opaque", 0), 15: ("c64", 64), 16: ("bf16", 16),
    17: ("token", 0), 18: ("c128", 128), 19: ("f8e5m2", 8), 20: ("f8e4m3fn", 8),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8),
    32: ("f4e2m1fn", 8), 33: ("f8e8m0fnu", 8), 34: ("buffer", 0), 35: ("f6e3m2fn", 8),
    36: ("f6e2m3fn", 8),
}  # fmt: skip
# Calls of cuDNN that convolve; the others have no window.
_CONVOLVES = (
    *("__cudnn$convForward", "__cudnn$convBackwardInput", "__cudnn$convBackwardFilter"),
    "__cudnn$convBiasActivationForward",
)
_WIDE_LITERALS = ("preds", "s32s", "s64s", "u32s", "u64s", "f32s", "f64s")
_NARROW_LITERALS = {"u8s": "<B", "s8s": "<b", "u16s": "<H", "s16s": "<h", "f16s": "<e"}


def read_module(serialized: bytes) -> Module:
    """Reads a serialized HloModuleProto, of any backend.

    Raises:
      AutomeshError: the bytes are not a module, or use an element type that is not known here.
    """
    try:
        return _module(hlo_pb2.Module.FromString(serialized))
    except (
        DecodeError,
        ArithmeticError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        # Decoded bytes can still refer to missing ids.
        raise AutomeshError(f"not a serialized XLA module: {reason_of(error)}") from None


def _module(message: hlo_pb2.Module) -> Module:
    reader = _ModuleReader(message)
    computations = {c.id: reader.computation(c) for c in message.computations}
    if message.entry_computation_id not in computations:
        raise AutomeshError("not a serialized XLA module: it has no entry computation")
    return Module(
        name=message.name,
        computations=computations,
        entry=message.entry_computation_id,
        aliases=message.input_output_alias,
        device_ids=tuple(
            partition.replica_device_ids[0]
            for partition in message.device_assignment.computation_devices
        ),
    )


class _ModuleReader:
    """The state of reading one module: payloads, source locations, shapes seen before."""

    def __init__(self, module: hlo_pb2.Module) -> None:
        self._payloads = module.payloads
        self._sequences = module.schedule.sequences
        self._shapes: dict[bytes, Shape] = {}
        index = module.stack_frame_index
        places = [(index.file_names[p.file_name_id - 1], p.line) for p in index.file_locations]
        self._frames = [places[frame.file_location_id - 1] for frame in index.stack_frames]

    def computation(self, message: hlo_pb2.Computation) -> Computation:
        instructions = {i.id: i for i in map(self._instruction, message.instructions)}
        # `in` before the lookup: a protobuf map grows when a missing key is read.
        scheduled = message.id in self._sequences
        if scheduled:
            order = self._sequences[message.id].instruction_ids
            instructions = {number: instructions[number] for number in order}
        return Computation(
            id=message.id,
            name=message.name,
            instructions=instructions,
            root=message.root_id,
            is_fusion=message.is_fusion_computation,
            is_scheduled=scheduled,
            thread=message.execution_thread,
        )

    def _instruction(self, message: hlo_pb2.Instruction) -> Instruction:
        opcode = message.opcode
        device_groups, encoding = _groups(message)
        op_name, source_file, source_line = self._metadata(message)
        pairs = message.source_target_pairs
        return Instruction(
            id=message.id,
            name=message.name,
            opcode=opcode,
            shape=self._shape(message.shape),
            operands=tuple(message.operand_ids),
            called=tuple(message.called_computation_ids),
            predecessors=tuple(message.control_predecessor_ids),
            parameter=message.parameter_number,
            tuple_index=message.tuple_index,
            dimensions=tuple(message.dimensions),
            direction=message.comparison_direction,
            literal=_scalar(message.literal) if opcode == "constant" else None,
            target=message.custom_call_target,
            fusion_kind=message.fusion_kind,
            dot=_dot(message) if opcode in ("dot", "ragged-dot") else None,
            convolution=_convolution(message) if _is_convolution(message) else None,
            groups=device_groups,
            groups_encoding=encoding,
            global_ids=message.use_global_device_ids,
            pairs=tuple((pair.source, pair.target) for pair in pairs) if pairs else (),
            channel=message.channel_id,
            backend_config=message.backend_config or self._payload(message.backend_config_payload),
            op_name=op_name,
            source_file=source_file,
            source_line=source_line,
            frontend=_frontend(message),
            thread=message.async_execution_thread,
            wire=message.SerializeToString(),
        )

    def _payload(self, payload: hlo_pb2.Payload) -> bytes:
        return self._payloads[payload.id] if payload.HasField("id") else payload.value

    def _metadata(self, message: hlo_pb2.Instruction) -> tuple[str, str, int]:
        if not message.HasField("metadata"):
            return "", "", 0
        metadata = message.metadata
        if metadata.source_file or not metadata.stack_frame_id:
            return metadata.op_name, metadata.source_file, metadata.source_line
        return metadata.op_name, *self._frames[metadata.stack_frame_id - 1]

    def _shape(self, message: hlo_pb2.Shape) -> Shape:
        key = message.SerializeToString()
        known = self._shapes.get(key)
        if known is not None:
            return known
        try:
            name, bits = _ELEMENT_TYPES[message.element_type]
        except KeyError:
            raise AutomeshError(
                f"the compiled module uses the unknown element type {message.element_type}",
                hint="update automesh, or install the jaxlib that it was released with",
            ) from None
        layout = message.layout
        shape = Shape(
            element_type=name,
            dims=tuple(message.dimensions),
            elements=tuple(map(self._shape, message.tuple_shapes)),
            element_bits=layout.element_size_in_bits or bits,
            memory_space=layout.memory_space,
            layout=tuple(layout.minor_to_major),
        )
        self._shapes[key] = shape
        return shape


def _groups(message: hlo_pb2.Instruction) -> tuple[Groups | None, str]:
    if message.HasField("iota_collective_device_list"):
        return decode_iota(message.iota_collective_device_list.SerializeToString()), "iota"
    if message.HasField("mesh_axes_replica_group_list"):
        return decode_mesh(message.mesh_axes_replica_group_list.SerializeToString()), "mesh"
    if message.HasField("collective_device_list"):
        return _rows(message.collective_device_list.replica_groups), "list"
    if message.replica_groups:
        return _rows(message.replica_groups), "legacy"
    return None, ""


def _rows(rows: Iterable[hlo_pb2.ReplicaGroup]) -> Groups:
    return tuple(tuple(row.replica_ids) for row in rows)


def _dot(message: hlo_pb2.Instruction) -> DotDimensions:
    ragged = message.ragged_dot_dimension_numbers
    is_ragged = message.opcode == "ragged-dot"
    dot = ragged.dot_dimension_numbers if is_ragged else message.dot_dimension_numbers
    return DotDimensions(
        lhs_contracting=tuple(dot.lhs_contracting_dimensions),
        rhs_contracting=tuple(dot.rhs_contracting_dimensions),
        lhs_batch=tuple(dot.lhs_batch_dimensions),
        rhs_batch=tuple(dot.rhs_batch_dimensions),
        group=tuple(ragged.rhs_group_dimensions),
    )


def _is_convolution(message: hlo_pb2.Instruction) -> bool:
    return message.opcode == "convolution" or message.custom_call_target.startswith(_CONVOLVES)


def _convolution(message: hlo_pb2.Instruction) -> ConvolutionDimensions:
    numbers = message.convolution_dimension_numbers
    return ConvolutionDimensions(
        input_batch=numbers.input_batch_dimension,
        input_feature=numbers.input_feature_dimension,
        input_spatial=tuple(numbers.input_spatial_dimensions),
        kernel_input_feature=numbers.kernel_input_feature_dimension,
        kernel_output_feature=numbers.kernel_output_feature_dimension,
        kernel_spatial=tuple(numbers.kernel_spatial_dimensions),
        output_batch=numbers.output_batch_dimension,
        output_feature=numbers.output_feature_dimension,
        output_spatial=tuple(numbers.output_spatial_dimensions),
        feature_groups=max(message.feature_group_count, 1),
        batch_groups=max(message.batch_group_count, 1),
        window=tuple(
            WindowDimension(
                size=window.size,
                stride=window.stride,
                padding_low=window.padding_low,
                padding_high=window.padding_high,
                window_dilation=window.window_dilation,
                base_dilation=window.base_dilation,
            )
            for window in message.window.dimensions
        ),
    )


def _scalar(literal: hlo_pb2.Literal) -> Scalar | None:
    if literal.shape.dimensions:
        return None
    for name in _WIDE_LITERALS:
        if values := getattr(literal, name):
            return values[0]
    for name, layout in _NARROW_LITERALS.items():
        if data := getattr(literal, name):
            return struct.unpack(layout, data)[0]
    if literal.bf16s:  # The upper half of a float32.
        return struct.unpack("<f", b"\0\0" + literal.bf16s)[0]
    return None


def _frontend(message: hlo_pb2.Instruction) -> tuple[tuple[str, str], ...]:
    entries = message.frontend_attributes.map
    return tuple(sorted(entries.items())) if entries else ()
