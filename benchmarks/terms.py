"""Estimates made without compiling, held against what the CPU compiler makes of the same step.

    python -m benchmarks.terms [--example dense_lm gnn ...] [--devices 8 16] [--jobs 1]

For every factorization of 8 and of 16 devices over three axes of each language model, and of 8 over
three axes of each step of `benchmarks/support/scripts/steps`: FLOPs of matrix
multiplications against the finished module; bytes that one device sends over each mesh axis (of all
collectives that run over it, by the ring algorithm) against the module as the partitioner leaves
it, before anything that is specific to a backend; the peak of memory against what the compiler
states. The terms are those of one propagation per set of active axes at sizes 2; only where they
say that they do not hold, the mesh is propagated on its own, as a search does.

Where Shardy's explicit collectives and XLA's partitioner differ systematically, and what follows
XLA:

* Elementwise operations: Shardy computes them with the sharding that moves least, XLA with that of
  the result. A weight that is converted and then constrained is gathered in f32, not in bf16:
  twice the bytes (`sharding.reshard`).
* Reductions over axes that split several dimensions: one all-reduce for Shardy, one per dimension
  for XLA, each of the whole array (`reduce_by_dimension`).
* All-reduce and slice over the same axes: a reduce-scatter for Shardy. XLA's partitioner never
  makes one; the GPU and TPU compilers do so later (`separate_reductions_from_slices`).
* CHLO: Shardy has no rules for it and takes its results for whole; XLA rewrites it first, and so
  do we.
* Collectives of constants: Shardy states them, XLA makes each part in its place.
* Functions: Shardy settles one sharding for each argument of a function that is called, and may
  gather a whole stack in front of the call; XLA inlines all calls first, and so do we
  (`sharding.passes`).
* The order of operations: of two shardings that could be propagated to a value the first one wins.
  XLA propagates in the order of a walk from the results; jax traced in another (`hlo_form`).
* Products, convolutions, gathers and scatters: Shardy brings their operands together with whatever
  moves least, XLA's partitioner forms groups of devices along the dimensions that two arrays share
  (`sharding.partitioner`).
* Halos of convolutions along a dimension that is split: Shardy takes them for nothing
  (`exchange_halos`).
* Gradients of weights that are split over a part of what is reduced: XLA reduces over that part
  first, slices, and then reduces over the rest (`reduce_first_what_is_sliced`).

What stays different: a loop of one trip is unrolled by the CPU compiler, and what it shares with
the code around is then done once (`long_context` at its size `tiny` without `sp`: 4 % fewer FLOPs);
reshards that XLA's partitioner can only do in full ("involuntary full rematerialization") are not
foreseen; where an array moves to devices that are free, which of several it moves to is a guess
(`gnn`, `unet`, `diffusion_transformer`: up to 47 % of the bytes over one axis of some meshes); the
CPU compiler multiplies grouped convolutions as dense ones (`state_space`: 43 %
more FLOPs than the step states).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from scipy import stats

from automesh.collectives import kind_named
from automesh.cost.terms import Terms, flops, value_of
from automesh.outcomes import Counts
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from benchmarks.truth.command import AXES, CHOSEN, Case, Truth, cases, truths

# Sizes of the active axes that are propagated, and at which that is checked.
_SAMPLED, _PROBED = 2, 4
# Differences of collectives below this are rounding.
_SHOWN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors on one mesh, as (estimate - truth) / truth.

    Attributes:
      bytes: per mesh axis larger than 1.
      peaks: estimated and compiled peak of memory, bytes.
    """

    case: Case
    flops: float
    bytes: tuple[tuple[str, float], ...]
    peaks: tuple[float, float]

    @property
    def memory(self) -> float:
        return self.peaks[0] / self.peaks[1] - 1.0


class Estimates:
    """Terms of one example for one platform: one propagation per set of active axes."""

    def __init__(self, example: str, platform: str, size: str) -> None:
        case = Case(example=example, sizes=(), size=size)
        build = load_entry(case.entry)
        self._programs = Programs(
            build=lambda axes: build_on(build, axes, knobs=case.arguments),
            axis_names=AXES,
            platform=platform,
        )
        self._known: dict[tuple[str, ...], Terms] = {}
        self.own = 0

    def of(self, case: Case) -> Terms:
        """The terms that hold on the mesh of a case."""
        sizes = {axis: size for axis, size in case.sizes if size > 1}
        active = tuple(sizes)
        if active not in self._known:
            self._known[active] = self._propagated(
                dict.fromkeys(active, _SAMPLED), dict.fromkeys(active, _PROBED)
            )
        terms = self._known[active]
        if _hold(terms, sizes):
            return terms
        self.own += 1
        return self._propagated(sizes)

    def _propagated(self, *sizes: dict[str, int]) -> Terms:
        first, *probes = (tuple(one.items()) for one in sizes)
        found = propagate(self._programs, sizes=first, probes=probes, enter=lambda _: None)
        return found.terms


def _hold(terms: Terms, sizes: dict[str, int]) -> bool:
    divides = all(
        guard.size % math.prod(sizes.get(axis, 1) for axis in guard.axes) == 0
        for guard in terms.guards
    )
    sampled = dict(terms.sampled)
    return divides and all(sizes[axis] == sampled[axis] for axis in terms.fixed)


def flops_of(terms: Terms, sizes: dict[str, int]) -> float:
    """Of all matrix multiplications of a step on one device."""
    return sum(value_of(one.count, sizes) * flops(one.matmuls, sizes) for one in terms.kernels)


def sent_bytes(terms: Terms, sizes: dict[str, int]) -> dict[str, float]:
    """What one device sends in a step over each axis larger than 1."""
    sent = {axis: 0.0 for axis, size in sizes.items() if size > 1}
    for one in terms.collectives:
        group = math.prod(sizes.get(axis, 1) for axis in one.axes)
        each = kind_named(one.kind).wire_bytes(round(value_of(one.payload_bytes, sizes)), group)
        for axis in set(one.axes) & set(sent):
            sent[axis] += value_of(one.count, sizes) * each
    return sent


def truly_sent(counts: Counts, sizes: dict[str, int]) -> dict[str, float]:
    """The same of a compiled module."""
    sent = {axis: 0.0 for axis, size in sizes.items() if size > 1}
    for one in counts.collectives:
        for axis in set(one.axes) & set(sent):
            sent[axis] += one.wire_bytes
    return sent


def peak_bytes(terms: Terms, sizes: dict[str, int]) -> float:
    """Arguments, outputs that take no argument's place, and the most temporaries."""
    lasting = value_of(terms.argument_bytes, sizes) + value_of(terms.output_bytes, sizes)
    points = [value_of(point.bytes, sizes) for point in terms.points]
    return lasting - value_of(terms.alias_bytes, sizes) + max(points, default=0.0)


def by_kind(terms: Terms, sizes: dict[str, int]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Payload of a step by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one in terms.collectives:
        each = value_of(one.payload_bytes, sizes)
        found[one.kind, one.axes] += value_of(one.count, sizes) * each
    return found


def compare(truth: Truth, partitioned: Terms, compiled: Terms) -> Row:
    """One mesh.

    Args:
      partitioned: terms for platform `none`.
      compiled: terms for platform `cpu`.
    """
    sizes = dict(truth.case.sizes)
    ours, theirs = sent_bytes(partitioned, sizes), truly_sent(truth.partitioned, sizes)
    return Row(
        case=truth.case,
        flops=_error(flops_of(partitioned, sizes), float(truth.flops)),
        bytes=tuple((axis, _error(ours[axis], theirs[axis])) for axis in ours),
        peaks=(peak_bytes(compiled, sizes), float(truth.memory.peak_bytes)),
    )


def _error(estimate: float, truth: float) -> float:
    if truth:
        return estimate / truth - 1.0
    return 0.0 if not estimate else math.inf


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of the last line; the Spearman correlation is that of the worst example."""
    of_bytes = [abs(error) for row in rows for _, error in row.bytes]
    of_memory = [abs(row.memory) for row in rows]
    by_example = itertools.groupby(
        sorted(rows, key=lambda row: row.case.example), key=lambda row: row.case.example
    )
    return {
        "meshes": len(rows),
        "flops_max_error": max(abs(row.flops) for row in rows),
        "bytes_median_error": statistics.median(of_bytes),
        "bytes_max_error": max(of_bytes),
        "memory_median_error": statistics.median(of_memory),
        "memory_max_error": max(of_memory),
        "memory_spearman": min(_spearman(list(group)) for _, group in by_example),
    }


def _in_words(example: str, figures: dict[str, float]) -> str:
    """One line of the second table: errors in the median and at worst."""
    pairs = "".join(
        f"{figures[f'{what}_median_error']:8.1%}{figures[f'{what}_max_error']:8.1%}"
        for what in ("bytes", "memory")
    )
    return (
        f"{example:22}{figures['flops_max_error']:8.1%}{pairs}   {figures['memory_spearman']:.2f}"
    )


def _spearman(rows: Sequence[Row]) -> float:
    ours, theirs = zip(*(row.peaks for row in rows), strict=True)
    found: Any = stats.spearmanr(ours, theirs)
    return float(found.statistic)


def differences(truth: Truth, terms: Terms) -> list[str]:
    """Collectives whose bytes are not the compiler's, by kind and axes, in words."""
    sizes = dict(truth.case.sizes)
    ours = by_kind(terms, sizes)
    theirs: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one in truth.partitioned.collectives:
        theirs[one.kind, one.axes] += one.payload_bytes
    return [
        f"  {kind} over {'+'.join(axes)}: {ours[kind, axes] / 1e6:.2f} MB, "
        f"compiled {theirs[kind, axes] / 1e6:.2f} MB"
        for kind, axes in sorted({*ours, *theirs})
        if abs(_error(ours[kind, axes], theirs[kind, axes])) > _SHOWN
    ]


def _rows(example: str, known: Iterable[Truth]) -> list[Row]:
    found: list[Row] = []
    known = list(known)
    size = known[0].case.size
    partitioned, compiled = (Estimates(example, platform, size) for platform in ("none", "cpu"))
    for truth in known:
        terms = partitioned.of(truth.case)
        row = compare(truth, terms, compiled.of(truth.case))
        found.append(row)
        sent = "  ".join(f"{axis} {error:+7.2%}" for axis, error in row.bytes)
        print(
            f"{example:22}{truth.case.mesh:22}{row.flops:+8.3%}  {row.memory:+7.1%}   {sent}",
            flush=True,
        )
        for line in differences(truth, terms):
            print(line)
    if partitioned.own:
        print(f"{example}: {partitioned.own} meshes were propagated on their own")
    return found


def main() -> int:
    """Prints the table; 1 if some mesh could not be compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--example", nargs="+", choices=tuple(CHOSEN), default=tuple(CHOSEN))
    parser.add_argument("--devices", nargs="+", type=int, default=())
    parser.add_argument("--jobs", type=int, default=1, help="compilations side by side")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # The largest mesh that is lowered here: all probed sizes together.
    jax.config.update("jax_num_cpu_devices", max(_PROBED**3, *options.devices, 16))
    answers = truths(cases(options.example, options.devices), jobs=options.jobs)
    failed = {case: answer for case, answer in answers.items() if isinstance(answer, str)}
    for case, reason in failed.items():
        print(f"{case.example} {case.mesh}: {reason}", file=sys.stderr)
    print(f"{'example':22}{'mesh':22}{'flops':>8}  {'memory':>7}   bytes sent by axis")
    rows: list[Row] = []
    for example in options.example:
        known = [one for case, one in answers.items() if case.example == example]
        rows += _rows(example, (one for one in known if isinstance(one, Truth)))
    print()
    print(f"{'example':22}{'flops':>8}{'bytes':>16}{'memory':>16}   Spearman of memory")
    by_example: dict[str, dict[str, float]] = {}
    for example in options.example:
        own = [row for row in rows if row.case.example == example]
        if own:
            by_example[example] = figures = summary(own)
            print(_in_words(example, figures))
    print(json.dumps({**summary(rows), "by_example": by_example}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
