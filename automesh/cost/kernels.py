"""Prices everything but collectives, for many sizes of one set of active axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.formulas import Formulas, Indices, Sums, added
from automesh.cost.terms import Kernel, Matmul, Monomial, Near, Sum, Terms
from automesh.cost.windowed import repeats, windows
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats
from automesh.mesh.plan_arrays import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeconds:
    """Seconds of a step on one device without its collectives; every field but one is [sizes].

    Attributes:
      regions_s: [2 * regions, sizes]; `compute_s + memory_s + overhead_s + host_s` by region, then
        the part of windowed multiplications in it.
      compute_s: of kernels that are bound by multiplications.
      memory_s: of kernels that are bound by device memory, and the accumulator traffic of windowed
        multiplications.
      overhead_s: of starting kernels.
      host_s: of waiting for copies to and from the host.
      least_s: if no multiplication is windowed.
      serial_s: if no kernel computes while it reads or writes.
      bytes: read and written in device memory, without what windowed multiplications repeat.
      peak_s: of the multiplications at the bound of the device's speed; number types without a
        known bound take no time, and neither do products that an algorithm with fewer FLOPs can
        compute (`Matmul.is_least`).
    """

    regions_s: Floats
    compute_s: Floats
    memory_s: Floats
    overhead_s: Floats
    host_s: Floats
    least_s: Floats
    serial_s: Floats
    bytes: Floats
    peak_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPieces:
    """Seconds and bytes of one execution of each kernel; every field is [kernels, sizes].

    Attributes:
      counts: executions per step.
      bytes: read and written, including data that stays on the chip.
      far_bytes: read and written in device memory.
      multiplying_s: of the multiplications, at the speed that their sizes allow.
      bound_s: of the multiplications, see `KernelSeconds.peak_s`.
      streaming_s: of reading and writing device memory once.
      added_again_s, read_again_s: extra traffic of a windowed multiplication: its accumulator,
        after each product, and operands that it reads again during the product.
      is_ring: True where it is windowed.
    """

    counts: Floats
    bytes: Floats
    far_bytes: Floats
    multiplying_s: Floats
    bound_s: Floats
    streaming_s: Floats
    added_again_s: Floats
    read_again_s: Floats
    is_ring: NDArray[np.bool_]


class DistinctKernels:
    """The kernels of one step; equal ones are merged.

    Attributes:
      works: the distinct ones, as `unnamed` has them.
    """

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        merged: dict[Kernel, list[Sum]] = {}
        for kernel in terms.kernels:
            merged.setdefault(unnamed(kernel), []).append(kernel.count)
        self.works = works = tuple(merged)
        self._terms = terms
        self._axes = formulas.axes
        self._regions = [
            np.flatnonzero([work.region == region for work in works])
            for region in range(len(terms.regions))
        ]
        self._counts = Sums(formulas, [added(*counts) for counts in merged.values()])
        self._bytes = Sums(formulas, [work.bytes for work in works])
        self._matmuls = _Matmuls([work.matmuls for work in works], formulas)
        self._windowed = [(place, one) for place, work in enumerate(works) for one in work.windowed]
        self._repeated = Sums(formulas, [one.bytes for _, one in self._windowed])
        self._whole = Sums(formulas, [one.whole_bytes for _, one in self._windowed])
        self._intensities = Sums(formulas, [one.intensity for _, one in self._windowed])
        self._buffers = Sums(formulas, [one.buffer_bytes for _, one in self._windowed])
        self._near = _NearTraffic([work.near for work in works], formulas)
        self._epilogues = Sums(formulas, [work.epilogue for work in works])
        self._host_link = HostLink(terms, formulas)

    def seconds(self, values: Floats, sizes: Sizes, speeds: Speeds) -> KernelSeconds:
        """Prices the kernels.

        Args:
          values: from `Formulas.values`, of the same sizes.
          sizes: [sizes, axes]; at least two rows, see `total`.
        """
        each = self.pieces(values, sizes, speeds)
        counts, multiplying = each.counts, each.multiplying_s
        least = total(np.maximum(multiplying, each.streaming_s) * counts)
        streaming = each.streaming_s + each.read_again_s
        bound_by_compute = multiplying >= streaming
        compute = np.where(bound_by_compute, multiplying, 0.0) * counts
        memory = np.where(bound_by_compute, 0.0, streaming) * counts
        overhead = counts * speeds.kernel_overhead_s
        rings = each.added_again_s * counts
        memory += rings
        per_kernel = compute + memory + overhead
        through = streaming + (each.bytes - each.far_bytes) / speeds.memory_bytes_per_s
        serial = (multiplying + through) * counts + overhead + rings
        of_rings = np.where(each.is_ring, per_kernel, 0.0)
        regions = np.stack(
            [total(rows[region]) for rows in (per_kernel, of_rings) for region in self._regions]
        )
        least, in_turn = least + total(overhead), total(serial)
        waiting = np.zeros(values.shape[1])
        if self._host_link:
            of_regions = regions[: len(self._regions)]
            host = self._host_link.seconds(values, speeds, of_regions)
            of_regions += host.exposed_s
            waiting = np.add.reduce(host.exposed_s, axis=0)
            least, in_turn = np.maximum(least, host.total_s), in_turn + host.total_s
        return KernelSeconds(
            regions_s=regions,
            compute_s=total(compute),
            memory_s=total(memory),
            overhead_s=total(overhead),
            host_s=waiting,
            least_s=least,
            serial_s=in_turn,
            bytes=total(each.bytes * counts),
            peak_s=total(each.bound_s * counts),
        )

    def least_s(self, values: Floats, speeds: Speeds, *, devices: int, streamed: float) -> float:
        """Returns the least seconds of a step whose kernels are split over all devices.

        Args:
          values: from `Formulas.values`, where no axis is larger than 1; one column.
          streamed: part of the memory traffic that is counted.
        """
        multiplying, _ = self._matmuls.seconds(values, speeds)
        far = self._bytes.at(values) - self._near.at(values, speeds, parts=devices)
        each = np.maximum(multiplying, streamed * far / speeds.memory_bytes_per_s)
        counts = self._counts.at(values)
        return float((each * counts).sum()) / devices

    def pieces(self, values: Floats, sizes: Sizes, speeds: Speeds) -> KernelPieces:
        """Computes the pieces of each of `works`.

        Args:
          values, sizes: as in `seconds`; one row is enough.
        """
        multiplying, at_bound = self._matmuls.seconds(values, speeds)
        if speeds.epilogue_bytes_per_s > 0.0:
            epilogues = self._epilogues.at(values) / speeds.epilogue_bytes_per_s
            multiplying = np.maximum(multiplying, epilogues)
        once = self._bytes.at(values)
        far = once - self._near.at(values, speeds)
        repeated, whole = self._repeated.at(values), self._whole.at(values)
        buffers = self._buffers.at(values)
        repeated = np.where(stays(buffers, speeds) & (buffers > 0.0), 0.0, repeated)
        rings = np.zeros((2, len(self.works), values.shape[1]))
        windowed = np.zeros(rings.shape[1:], np.bool_)
        intensities = self._intensities.at(values)
        for (kernel, one), each, bytes_of, intensity in zip(
            self._windowed, repeated, whole, intensities, strict=True
        ):
            ring = product_of(one.axes, self._axes, sizes)
            is_ring = windows(self._terms, ring, bytes_of, intensity)
            windowed[kernel] |= is_ring
            rings[0 if one.adds else 1, kernel] += np.where(is_ring, repeats(ring) * each, 0.0)
        return KernelPieces(
            counts=self._counts.at(values),
            bytes=once,
            far_bytes=far,
            multiplying_s=multiplying,
            bound_s=at_bound,
            streaming_s=far / speeds.memory_bytes_per_s,
            added_again_s=rings[0] / speeds.memory_bytes_per_s,
            read_again_s=rings[1] / speeds.memory_bytes_per_s,
            is_ring=windowed,
        )


def unnamed(kernel: Kernel) -> Kernel:
    """Returns a copy without count and names, which do not change the time of one execution."""
    # Not `replace`, which would take as long as everything else here.
    return Kernel(
        region=kernel.region,
        count=(),
        bytes=kernel.bytes,
        matmuls=kernel.matmuls,
        windowed=kernel.windowed,
        near=kernel.near,
        epilogue=kernel.epilogue,
    )


class _NearTraffic:
    """Traffic of buffers that may stay on the chip."""

    def __init__(self, kernels: Sequence[tuple[Near, ...]], formulas: Formulas) -> None:
        self._kernels = len(kernels)
        flat = [(place, one) for place, near in enumerate(kernels) for one in near]
        self._kernel = np.array([place for place, _ in flat], np.intp)
        distinct = list(dict.fromkeys(one.buffer_bytes for _, one in flat))
        place_of = {size: place for place, size in enumerate(distinct)}
        self._buffer = np.array([place_of[one.buffer_bytes] for _, one in flat], np.intp)
        self._buffers = Sums(formulas, [(size,) for size in distinct])
        self._bytes = Sums(formulas, [one.bytes for _, one in flat])

    def at(self, values: Floats, speeds: Speeds, *, parts: int = 1) -> Floats:
        """Returns the bytes per execution that stay on the chip, [kernels, sizes].

        Args:
          parts: number of devices over which each buffer is split in addition.
        """
        found = np.zeros((self._kernels, values.shape[1]))
        if speeds.near_bytes > 0.0 and len(self._kernel):
            kept = stays(self._buffers.at(values) / parts, speeds)[self._buffer]
            np.add.at(found, self._kernel, np.where(kept, self._bytes.at(values), 0.0))
        return found


class _Matmuls:
    """All multiplications of all kernels: one call per number type prices the distinct ones."""

    def __init__(self, kernels: Sequence[tuple[Matmul, ...]], formulas: Formulas) -> None:
        self._kernels = len(kernels)
        distinct = list(dict.fromkeys(matmul for matmuls in kernels for matmul in matmuls))
        place = {one: number for number, one in enumerate(distinct)}
        self._uses = [
            (kernel, place[matmul]) for kernel, matmuls in enumerate(kernels) for matmul in matmuls
        ]
        self._dtypes = {
            dtype: np.flatnonzero([one.dtype == dtype for one in distinct])
            for dtype in dict.fromkeys(one.dtype for one in distinct)
        }
        self._is_least = np.array([one.is_least for one in distinct], np.bool_)
        self._batch = _Factors([one.batch for one in distinct], formulas)
        self._m = _Factors([one.m for one in distinct], formulas)
        self._n = _Factors([one.n for one in distinct], formulas)
        self._k = _Factors([one.k for one in distinct], formulas)

    def seconds(self, values: Floats, speeds: Speeds) -> tuple[Floats, Floats]:
        """Returns the seconds per execution of each kernel, [kernels, sizes]: achieved, and at the
        bound."""
        shape = (len(self._m), values.shape[1])
        achieved, at_bound = np.zeros(shape), np.zeros(shape)
        for dtype, rows in self._dtypes.items():
            sides = [side.at(values, rows) for side in (self._batch, self._m, self._n, self._k)]
            flat = [side.reshape(-1) for side in sides]
            achieved[rows] = speeds.matmul_s(dtype, *flat).reshape(sides[0].shape)
            bound = speeds.bound_flops_per_s(dtype)
            if bound > 0.0:
                stated_s = 2.0 * sides[0] * sides[1] * sides[2] * sides[3] / bound
                at_bound[rows] = np.where(self._is_least[rows, None], stated_s, 0.0)
        of_kernels = np.zeros((2, self._kernels, values.shape[1]))
        for kernel, matmul in self._uses:
            of_kernels[0, kernel] += achieved[matmul]
            of_kernels[1, kernel] += at_bound[matmul]
        return of_kernels[0], of_kernels[1]


class _Factors:
    """Single monomials, to be evaluated together."""

    def __init__(self, monomials: Sequence[Monomial], formulas: Formulas) -> None:
        self._powers: Indices = np.array(
            [formulas.number(monomial.powers) for monomial in monomials], np.intp
        )
        self._coefficients = np.array([monomial.coefficient for monomial in monomials], float)

    def __len__(self) -> int:
        return len(self._powers)

    def at(self, values: Floats, rows: Indices) -> Floats:
        return self._coefficients[rows, None] * values[self._powers[rows]]


def stays(buffer_bytes: Floats, speeds: Speeds) -> NDArray[np.bool_]:
    """Whether buffers of these sizes stay on the chip between the kernels that use them."""
    return buffer_bytes <= speeds.near_bytes


def product_of(axes: Sequence[str], names: Sequence[str], sizes: Sizes) -> Sizes:
    """Counts the devices in a group over `axes`: [meshes]; axes that are not in `names` have size
    1."""
    columns = [place for place, name in enumerate(names) if name in axes]
    return np.prod(sizes[:, columns], axis=1, dtype=np.int64)


def total(rows: Floats) -> Floats:
    """Adds up rows, [rows, sizes], in their order.

    NumPy adds row after row if there are at least two columns; a single column it would add in
    pairs, and a mesh priced alone would differ from the same mesh among others in the last digit.
    """
    if rows.shape[1] == 1:
        raise ValueError("at least two columns, so that the order of the sum is certain")
    return np.add.reduce(rows, axis=0)


# Copies between a device and its host. One link carries both directions, and copy engines drive it:
# a copy overlaps with all kernels of its block, as it does between `copy-start` and `copy-done` of
# compiled programs.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeconds:
    """Time that a step waits for copies to and from the host.

    Attributes:
      exposed_s: [regions, sizes]: the part that the kernels of its regions do not hide; of several
        regions, the last one has it.
      total_s: [sizes]: of all copies, one after the other.
    """

    exposed_s: Floats
    total_s: Floats


class HostLink:
    """The copies of one step."""

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        copies = terms.host_transfers
        self.copies = copies
        self._counts = Sums(formulas, [one.count for one in copies])
        self._bytes = Sums(formulas, [one.bytes for one in copies])
        self._beside: dict[tuple[int, ...], list[int]] = {}
        for number, one in enumerate(copies):
            self._beside.setdefault(one.regions, []).append(number)

    def __bool__(self) -> bool:
        return bool(self.copies)

    def each_s(self, values: Floats, speeds: Speeds) -> Floats:
        """Returns the seconds of all executions of each copy in a step: [copies, sizes].

        Args:
          values: from `Formulas.values`.
        """
        return self._counts.at(values) * self._bytes.at(values) / speeds.host_bytes_per_s

    def seconds(self, values: Floats, speeds: Speeds, kernels_s: Floats) -> HostSeconds:
        """Prices the copies.

        Args:
          values: from `Formulas.values`.
          kernels_s: [regions, sizes]: kernels that may hide copies.
        """
        each = self.each_s(values, speeds)
        exposed = np.zeros_like(kernels_s)
        for regions, copies in self._beside.items():
            hidden = np.add.reduce(kernels_s[list(regions)], axis=0)
            exposed[regions[-1]] += np.maximum(np.add.reduce(each[copies], axis=0) - hidden, 0.0)
        return HostSeconds(exposed_s=exposed, total_s=np.add.reduce(each, axis=0))
