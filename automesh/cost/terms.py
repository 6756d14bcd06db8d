"""What a step does on one device, as formulas in the sizes of the mesh axes (no jax).

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
        """The value on one mesh; axes that `sizes` leaves out have size 1."""
        value = self.coefficient
        for axis, power in self.powers:
            value *= float(sizes.get(axis, 1)) ** power
        return value


# A sum; the empty one is 0.
Sum = tuple[Monomial, ...]


def value_of(total: Sum, sizes: Mapping[str, int]) -> float:
    """The sum on one mesh."""
    return sum(one.at(sizes) for one in total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """One matrix multiplication as one device does it: `2 * batch * m * n * k` FLOPs.

    Attributes:
      dtype: the coarser of the operands' number types: bf16, f32, f8E4M3FN ...
      is_least: False if the same can be had with fewer FLOPs, as a convolution by Winograd's
        algorithm or by a Fourier transform, or if a custom call only says that it needs so many.
    """

    batch: Monomial
    m: Monomial
    n: Monomial
    k: Monomial
    dtype: str
    is_least: bool = True


def flops(matmuls: Iterable[Matmul], sizes: Mapping[str, int]) -> float:
    """Floating-point operations of one execution, two per multiply-add."""
    return sum(
        2.0 * math.prod(side.at(sizes) for side in (matmul.batch, matmul.m, matmul.n, matmul.k))
        for matmul in matmuls
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Traffic of one buffer, which stays on the chip where the buffer is small enough for that.

    Attributes:
      buffer_bytes: of the whole buffer.
      bytes: read from it and written to it; a part of those of its kernel.
    """

    buffer_bytes: Monomial
    bytes: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """A matrix multiplication that the compiler may cut into a ring of steps (windowed einsum).

    Attributes:
      axes: mesh axes of the ring.
      bytes: what every step but one reads or writes again.
      whole_bytes: of the operand that would be gathered instead, or of the result that would be
        scattered: what the compiler's threshold is compared with.
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
      near: what may stay on the chip instead, by buffer.
      epilogue: of a product, the part of `bytes` that it writes, or reads beside its operands.
      matmuls: what it multiplies; more than one only if nothing lies between them.
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
      axes: that it talks over, in the order of the mesh.
      payload_bytes: of one execution: the full (gathered or unreduced) array of one group; for
        collective-permute what one device sends.
      hides: True if the compiler can run it beside compute of its region (see `Terms.platform`).
      windowed: True if it becomes the ring of a windowed multiplication, where the compiler does
        that.
      whole_bytes, intensity: of the ring's `Windowed`.
      ring_region: index into `Terms.regions`: where the ring's multiplication stands; None: in
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
        """Index of the region whose windowed multiplications a ring runs beside."""
        return self.region if self.ring_region is None else self.ring_region


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """A copy between the memory of a device and that of its host.

    Attributes:
      regions: indices into `Terms.regions`: what it can run beside.
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
    """A loop body or the top of the program, or a slot of one, which is what a collective that the
    compiler starts early runs beside: compute hides communication inside one region only.

    Attributes:
      name: `step`, or where the loop stands: `loop at file.py:12`.
      trips: how often it runs per step.
    """

    name: str
    trips: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The terms hold only where the product of `axes` divides `size`, a dimension of some array."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Bytes of all temporaries that live at one point of the program; `source` says where."""

    bytes: Sum
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted:
    """Something in the program that has no price: it is named, never taken as free.

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
      arguments: positions of the arguments that it is about.
      results: for each of them the position of the result that replaces it; -1: none does.
      shape: of the array that it is about, where that is no argument.
      splits: per array, the mesh axes of each dimension: those that are wanted, or before and
        after.
      source: line of the operation that it is about: `file.py:12`, or empty.
    """

    kind: str
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    splits: tuple[tuple[tuple[str, ...], ...], ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about the propagated program that costs memory or time and that nobody asked for.

    Attributes:
      rule: what it is, a name that does not change: a key of `report.findings.RULES`.
      array: `f32[64,256,512]`, or the name of an argument.
      bytes: on one device: of what is gathered, or of what is kept twice.
      axes: mesh axes that it happens over, in the order of the mesh.
      count: how often in a step.
      source: `file.py:12`, or empty.
      detail: what else the words of the rule name, such as another array.
      cure: what can be tried in a lowered copy; None: there is only advice.
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
        """Whether it is the case on a mesh of these axes: bytes may be what is too much, and more
        than none on some of the meshes alone."""
        return not self.bytes or value_of(self.bytes, sizes) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a program keeps in the memory of one device; the attributes are those of `Terms`."""

    points: tuple[MemoryPoint, ...]
    argument_bytes: Sum
    output_bytes: Sum
    alias_bytes: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The step with one set of active axes; all other axes have size 1.

    Attributes:
      active: axes larger than 1, in the order of the mesh.
      sampled: the axis sizes that it was propagated with.
      platform: whose compiler's rewrites are applied: cpu, gpu, tpu; `none` for the module as
        partitioned.
      points: candidates for the peak: the largest one counts.
      argument_bytes, output_bytes, alias_bytes: on one device; `alias` is what outputs take over.
      host_transfers: copies to and from the memory of the host.
      first: what the first step keeps, where it is another program: its state comes back split
        otherwise than it went in, and all that is said here is of the second step. None: the same.
      findings: what costs memory or time and was not asked for.
      memory_spread: what the compiler needs at least and at most, as parts of the estimate, see
        `automesh.ir.memory.spread`; a most of 0: nobody knows.
      guards: where the terms hold; elsewhere the mesh needs a propagation of its own.
      fixed: axes for which the terms hold at the sampled size only (sizes baked into shapes).
      limits: axes for which the terms hold up to some size only, and that size.
      window_threshold_bytes: multiplications around anything smaller are not windowed; see
        `automesh.cost.windowed`.
      window_flops_per_byte: see `Speeds`; not known before the step is priced.
    """

    active: tuple[str, ...]
    sampled: tuple[tuple[str, int], ...]
    platform: str
    regions: tuple[Region, ...]
    kernels: tuple[Kernel, ...]
    collectives: tuple[CollectiveTerm, ...]
    points: tuple[MemoryPoint, ...]
    argument_bytes: Sum
    output_bytes: Sum
    alias_bytes: Sum
    host_transfers: tuple[HostTransfer, ...] = ()
    first: Footprint | None = None
    findings: tuple[Finding, ...] = ()
    memory_spread: tuple[float, float] = (1 / 1.5, 1.5)
    guards: tuple[Guard, ...] = ()
    uncounted: tuple[Uncounted, ...] = ()
    fixed: tuple[str, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    window_threshold_bytes: float = 0.0
    window_flops_per_byte: float = 0.0
