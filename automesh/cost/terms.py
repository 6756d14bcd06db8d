"""The work of a step on one device, as formulas in the sizes of the mesh axes (no jax).

One propagation of shardings per set of active axes gives one `Terms`; pricing evaluates it for
every mesh with that set. A size is a coefficient times powers of axis sizes: `4096 * fsdp**-1`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from automesh.collectives import CollectiveName


@dataclass(frozen=True, slots=True, kw_only=True)
class Monomial:
    """`coefficient` times every named axis' size to its power; powers sorted by name, none 0."""

    coefficient: float
    powers: tuple[tuple[str, int], ...] = ()

    def at(self, sizes: Mapping[str, int]) -> float:
        """Returns the value on one mesh; axes that are not in `sizes` have size 1."""
        value = self.coefficient
        for axis, power in self.powers:
            value *= float(sizes.get(axis, 1)) ** power
        return value


# A sum of monomials; the empty one is 0.
Sum = tuple[Monomial, ...]


def value_of(total: Sum, sizes: Mapping[str, int]) -> float:
    """Returns the sum on one mesh."""
    return sum(one.at(sizes) for one in total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """One matrix multiplication as one device does it: `2 * batch * m * n * k` FLOPs.

    Attributes:
      dtype: the coarser of the operands' number types: bf16, f32, f8E4M3FN ...
      is_least: False if the same result is possible with fewer FLOPs, as for a convolution by
        Winograd's algorithm or by a Fourier transform, or if the FLOPs are only a statement of a
        custom call.
    """

    batch: Monomial
    m: Monomial
    n: Monomial
    k: Monomial
    dtype: str
    is_least: bool = True


def flops(matmuls: Iterable[Matmul], sizes: Mapping[str, int]) -> float:
    """Counts the floating-point operations of one execution, two per multiply-add."""
    return sum(
        2.0 * math.prod(side.at(sizes) for side in (matmul.batch, matmul.m, matmul.n, matmul.k))
        for matmul in matmuls
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Traffic of one buffer, which stays on the chip if the buffer is small enough.

    Attributes:
      buffer_bytes: of the whole buffer.
      bytes: read from it and written to it; a part of the bytes of its kernel.
    """

    buffer_bytes: Monomial
    bytes: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """A matrix multiplication that the compiler may cut into a ring of steps (windowed einsum).

    Attributes:
      axes: mesh axes of the ring.
      bytes: read or written again in every step but one.
      whole_bytes: of the operand that would be gathered instead, or of the result that would be
        scattered; the compiler compares them with its threshold.
      intensity: FLOPs of the multiplication on one device, for each of `whole_bytes`.
      adds: True if every step adds to the whole result; False if it reads the other operand again,
        which it does while it multiplies.
      buffer_bytes: of the array behind `bytes`, as in `Near`; empty: always in device memory.
    """

    axes: tuple[str, ...]
    bytes: Sum
    whole_bytes: Sum = ()
    intensity: Sum = ()
    adds: bool = True
    buffer_bytes: Sum = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Work that the compiler is expected to fuse into one kernel.

    Attributes:
      region: index into `Terms.regions`.
      count: executions per step, loops multiplied in.
      bytes: read and written per execution, in device memory unless `near` says more.
      near: traffic that may stay on the chip instead, by buffer.
      epilogue: for a product, the part of `bytes` that it writes, or reads in addition to its
        operands.
      matmuls: what it multiplies; more than one only if no operation is between them.
      operation: what it is, in words of StableHLO: dot_general, reduce, fusion, custom_call NAME.
      source: `file.py:12`, or empty.
    """

    region: int
    count: Sum
    bytes: Sum
    matmuls: tuple[Matmul, ...] = ()
    windowed: tuple[Windowed, ...] = ()
    near: tuple[Near, ...] = ()
    epilogue: Sum = ()
    operation: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTerm:
    """One collective.

    Attributes:
      region: index into `Terms.regions`: where it may hide.
      count: executions per step, loops multiplied in.
      axes: mesh axes that it runs over, in the order of the mesh.
      payload_bytes: of one execution: the full (gathered or unreduced) array of one group; for
        collective-permute what one device sends.
      hides: True if the compiler can overlap it with compute of its region (see `Terms.platform`).
      windowed: True if it becomes the ring of a windowed multiplication under the compiler's
        conditions.
      whole_bytes, intensity: of the ring's `Windowed`.
      ring_region: index into `Terms.regions`: where the ring's multiplication is; None: in
        `region`.
      source: `file.py:12`, or empty.
      operand: what is moved, in words: `f32[4096,1024]`.
    """

    region: int
    count: Sum
    kind: CollectiveName
    axes: tuple[str, ...]
    payload_bytes: Sum
    hides: bool
    windowed: bool = False
    whole_bytes: Sum = ()
    intensity: Sum = ()
    ring_region: int | None = None
    source: str = ""
    operand: str = ""

    @property
    def behind(self) -> int:
        """Index of the region whose windowed multiplications overlap with a ring."""
        return self.region if self.ring_region is None else self.ring_region


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """A copy between the memory of a device and that of its host.

    Attributes:
      regions: indices into `Terms.regions`: what it can overlap with.
      count: executions per step, loops multiplied in.
      bytes: of one execution.
      is_to_host: True towards the host.
      source: `file.py:12`, or empty.
    """

    regions: tuple[int, ...]
    count: Sum
    bytes: Sum
    is_to_host: bool
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of the program inside which compute can hide communication.

    It is a loop body, the top of the program, or a slot of one: the part between the early start of
    a collective and its end.

    Attributes:
      name: `step`, or the place of the loop: `loop at file.py:12`.
      trips: how often it runs per step.
    """

    name: str
    trips: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisibilityGuard:
    """The terms hold only where the product of `axes` divides `size`, a dimension of some array."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessPoint:
    """Bytes of all temporaries that live at one point of the program; `source` says where."""

    bytes: Sum
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted:
    """Something in the program without a price, which is reported instead of counted as free.

    Attributes:
      what: `custom call NAME`, `loop of unknown length` ...
      why: what is missing, in words.
    """

    what: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change of the lowered step that `automesh lint` can try.

    Attributes:
      kind: what is changed, a key of `sharding.cures.CURES`.
      arguments: positions of the affected arguments.
      results: for each of them the position of the result that replaces it; -1 for none.
      shape: of the affected array, if that is no argument.
      splits: per array, the mesh axes of each dimension: the wanted ones, or before and after.
      source: line of the affected operation: `file.py:12`, or empty.
      also: cures of other arrays at the same line, which are applied with it.
    """

    kind: str
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    splits: tuple[tuple[tuple[str, ...], ...], ...] = ()
    source: str = ""
    also: tuple[Cure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An unexpected fact about the propagated program that costs memory or time.

    Attributes:
      rule: a stable name: a key of `report.findings.RULES`.
      array: `f32[64,256,512]`, or the name of an argument.
      bytes: on one device: gathered, or kept twice.
      axes: mesh axes that it concerns, in the order of the mesh.
      count: how often in a step.
      source: `file.py:12`, or empty.
      detail: further text for the rule's message, such as another array.
      cure: a change that can be tried in a lowered copy; None: there is only advice.
    """

    rule: str
    array: str
    bytes: Sum
    axes: tuple[str, ...] = ()
    count: Sum = (Monomial(coefficient=1.0),)
    source: str = ""
    detail: str = ""
    cure: Cure | None = None

    def is_on(self, sizes: Mapping[str, int]) -> bool:
        """Whether the finding applies to a mesh with these axes.

        Its bytes may be an excess that is above 0 on some meshes only.
        """
        return not self.bytes or value_of(self.bytes, sizes) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of a program on one device; the attributes are those of `Terms`."""

    points: tuple[LivenessPoint, ...]
    argument_bytes: Sum
    output_bytes: Sum
    alias_bytes: Sum
    on_chip_bytes: float = 0.0
    reread_bytes: Sum = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The step with one set of active axes; all other axes have size 1.

    Attributes:
      active: axes larger than 1, in the order of the mesh.
      sampled: axis sizes of the propagation.
      platform: whose compiler's rewrites are applied: cpu, gpu, tpu; `none` for the module as
        partitioned.
      points: candidates for the peak: the largest one counts.
      argument_bytes, output_bytes, alias_bytes: on one device; `alias` is the part of the arguments
        whose memory outputs reuse.
      host_transfers: copies to and from the memory of the host.
      first: memory of the first step, if it is another program because the state comes back with
        other shardings; everything else here describes the second step. None: the same program.
      findings: unexpected costs of memory or time.
      memory_spread: the least and the most that the compiler may need, as factors of the estimate,
        see `automesh.ir.memory.spread`; a most of 0: unknown.
      guards: conditions under which the terms hold; any other mesh needs its own propagation.
      fixed: axes for which the terms hold at the sampled size only (sizes baked into shapes).
      batch_axes: axes that split the rows of arguments that are no state.
      limits: axes for which the terms hold up to some size only, and that size.
      window_threshold_bytes: multiplications around anything smaller are not windowed; see
        `automesh.cost.windowed`.
      window_flops_per_byte: see `Speeds`; not known before the step is priced.
      on_chip_bytes: memory on the chip where the compiler also keeps copies of arguments that are
        read more than once, as far as temporaries leave room; see
        `automesh.cost.formulas.with_copies`. 0: there is none.
      reread_bytes: of the arguments on one device, those that are read more than once.
    """

    active: tuple[str, ...]
    sampled: tuple[tuple[str, int], ...]
    platform: str
    regions: tuple[Region, ...]
    kernels: tuple[Kernel, ...]
    collectives: tuple[CollectiveTerm, ...]
    points: tuple[LivenessPoint, ...]
    argument_bytes: Sum
    output_bytes: Sum
    alias_bytes: Sum
    host_transfers: tuple[HostTransfer, ...] = ()
    first: Footprint | None = None
    findings: tuple[Finding, ...] = ()
    memory_spread: tuple[float, float] = (1 / 1.5, 1.5)
    guards: tuple[DivisibilityGuard, ...] = ()
    uncounted: tuple[Uncounted, ...] = ()
    fixed: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    window_threshold_bytes: float = 0.0
    window_flops_per_byte: float = 0.0
    on_chip_bytes: float = 0.0
    reread_bytes: Sum = ()
