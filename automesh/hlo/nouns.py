"""A compiled XLA program as plain values: `Module`, `Computation`, `Instruction`, `Shape`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Groups = tuple[tuple[int, ...], ...]
Scalar = bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Type of a value: an array, or a tuple of shapes.

    Attributes:
      element_type: `f32`, `bf16`, `s32`, `pred` ...; `tuple`, `token` and `opaque` have no elements
        of their own.
      dims: lengths of the dimensions.
      elements: members of a tuple.
      element_bits: bits that one element occupies in memory.
      memory_space: 0 is the default memory (HBM), others are named by the backend.
      layout: dimensions from minor to major.
    """

    element_type: str
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    element_bits: int = 0
    memory_space: int = 0
    layout: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Elements of an array; 1 for a scalar."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; for a tuple those of its members."""
        if self.elements:
            return sum(element.bytes for element in self.elements)
        return (self.size * self.element_bits + 7) // 8

    def __str__(self) -> str:
        if self.element_type == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.element_type}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DotDimensions:
    """The dimensions that a `dot` contracts and batches over.

    Attributes:
      group: dimension of the right side that numbers the groups of a `ragged-dot`, empty otherwise.
    """

    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDimension:
    """One spatial dimension of a convolution's window, in elements."""

    size: int
    stride: int
    padding_low: int
    padding_high: int
    window_dilation: int
    base_dilation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionDimensions:
    """The meaning of each dimension of a forward convolution's operands and result."""

    input_batch: int
    input_feature: int
    input_spatial: tuple[int, ...]
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_feature: int
    output_spatial: tuple[int, ...]
    feature_groups: int
    batch_groups: int
    window: tuple[WindowDimension, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; attributes that its opcode does not have are empty.

    Attributes:
      id: unique in the module.
      operands: ids of instructions of the same computation.
      called: ids of computations, in XLA's order (a while has body, condition; a conditional its
        branches).
      predecessors: ids of instructions that must run before, beyond the operands.
      parameter: number of a `parameter`.
      tuple_index: of a `get-tuple-element`.
      dimensions: of `all-gather`, `broadcast`, `transpose`, `reduce` and the like.
      direction: of a `compare`: EQ, NE, LT, LE, GT or GE.
      literal: value of a scalar `constant`; None for arrays.
      target: of a `custom-call`.
      fusion_kind: kLoop, kInput, kOutput or kCustom.
      groups: device groups of a collective, whatever their encoding. Without groups it is None;
        empty means one group of all devices.
      groups_encoding: legacy, list, iota or mesh.
      global_ids: True if `groups` count devices over replicas and partitions together.
      pairs: (source, target) of a `collective-permute`.
      channel: 0 if none.
      backend_config: as the backend wrote it, usually JSON; see `config`.
      op_name: of the metadata: what the user's program called it.
      source_file: of the metadata, with `source_line`; empty and 0 if unknown.
      frontend: frontend attributes.
      thread: execution thread of an async instruction, empty for the main one.
      wire: the serialized message, with all attributes, also those that are not listed here.
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    predecessors: tuple[int, ...] = ()
    parameter: int = 0
    tuple_index: int = 0
    dimensions: tuple[int, ...] = ()
    direction: str = ""
    literal: Scalar | None = None
    target: str = ""
    fusion_kind: str = ""
    dot: DotDimensions | None = None
    convolution: ConvolutionDimensions | None = None
    groups: Groups | None = None
    groups_encoding: str = ""
    global_ids: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    channel: int = 0
    backend_config: bytes = b""
    op_name: str = ""
    source_file: str = ""
    source_line: int = 0
    frontend: tuple[tuple[str, str], ...] = ()
    thread: str = ""
    wire: bytes = field(default=b"", repr=False)

    @property
    def config(self) -> Mapping[str, Any]:
        """The backend config, empty if there is none or it is not a JSON object."""
        if not self.backend_config.startswith(b"{"):
            return {}
        try:
            return json.loads(self.backend_config)
        except (
            ValueError,
            RecursionError,
        ):  # The MLIR attributes of a Triton kernel begin with a brace, too.
            return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A list of instructions.

    Attributes:
      instructions: by id, in schedule order; in the order of the module if there is no schedule for
        it.
      root: id of the instruction whose value is the result.
      is_fusion: True if it is the body of a fusion.
      is_scheduled: True if the order of `instructions` is the order of execution.
    """

    id: int
    name: str
    instructions: Mapping[int, Instruction] = field(hash=False)
    root: int
    is_fusion: bool
    is_scheduled: bool
    thread: str = ""

    @property
    def root_instruction(self) -> Instruction:
        return self.instructions[self.root]

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions that compute the operands of `instruction`."""
        return tuple(self.instructions[operand] for operand in instruction.operands)

    def parameters(self) -> dict[int, Instruction]:
        """Maps the number of each parameter to its instruction."""
        return {i.parameter: i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program, as one device runs it.

    Attributes:
      computations: by id.
      entry: id of the computation that runs first.
      aliases: which results share memory with which parameters, in wire format.
      device_ids: the device that runs each partition; empty if the module does not say. For several
        TPU slices, those of one slice.
    """

    name: str
    computations: Mapping[int, Computation] = field(hash=False)
    entry: int
    aliases: bytes = b""
    device_ids: tuple[int, ...] = ()

    @property
    def entry_computation(self) -> Computation:
        return self.computations[self.entry]

    def called(self, instruction: Instruction) -> tuple[Computation, ...]:
        """Returns the computations that `instruction` calls."""
        return tuple(self.computations[computation] for computation in instruction.called)

    def __len__(self) -> int:
        """Counts the instructions of all computations."""
        return sum(len(computation.instructions) for computation in self.computations.values())
