"""Estimates made without compiling, held against what compilers make of the same step.

    python -m benchmarks.terms [--example dense_lm gnn ...] [--platform cpu tpu] [--jobs 1]
    python -m benchmarks.terms --devices 8 16

The first command compares a few meshes of 8 devices of forty steps of different kinds
(`benchmarks/support/scripts/steps` and `kinds`): four of each on virtual CPU devices, two compiled
for the slice `v5e:2x4` without a TPU. The second one compares every factorization on CPUs, of
language models, too. Compared are: FLOPs of matrix multiplications with the finished module; bytes
that one device sends over each mesh axis (of all collectives that run over it, by the ring
algorithm) with the module as the partitioner leaves it, before anything that is specific to a
backend, for a TPU with the finished module; the peak of memory with what the compiler states, and
whether the interval of the estimate contains it. `corrected` is the error of memory after the
figure of a step's first mesh corrects the estimates of its others, as in a search. An axis counts
if at least 64 KiB are sent over it. What was compiled is kept: an interrupted run goes on.

For a TPU the peak contains buffers in the memory on the chip, as the compiler states it. The terms
are those of one propagation per set of active axes at sizes 2; only where they say that they do not
hold, the mesh is propagated on its own, as a search does.

Where Shardy's explicit collectives and XLA's partitioner differ systematically, and what follows
XLA:

* Elementwise operations: Shardy computes them with the sharding that moves least, XLA with that of
  the result. A weight that is converted and then constrained is gathered in f32, not in bf16:
  twice the bytes (`sharding.reshard`).
* Reductions over axes that split several dimensions: one all-reduce for Shardy, one per dimension
  for XLA, each of the whole array (`reduce_by_dimension`). So are gathers for CPUs
  (`gather_by_dimension`); libtpu makes one of them again.
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
* TPUs: libtpu shares equal operations and folds transposes into products before it propagates
  (`hlo_form`).
* TPUs: gradients of rows that are looked up are reduced apart from other gradients of the table,
  and in every turn of a loop that adds them up; sums of integers are not scattered (`passes.run`).
* TPUs: labels are compared and selected where a cross entropy scatters into its logits, and tables
  narrower than a tile are copied, padded, to look rows up or to add to them (`passes.chosen`,
  `memory.tpu`).
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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from scipy import stats

from automesh.collectives import kind_named
from automesh.cost.breakdown import peak_of
from automesh.cost.terms import Footprint, Terms, flops, value_of
from automesh.outcomes import Counts
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from benchmarks.truth.command import (
    AXES,
    CHOSEN,
    KINDS,
    OTHER_STEPS,
    Case,
    Truth,
    cached,
    cases,
    few_cases,
    truths,
)

# Sizes of the active axes that are propagated, and at which that is checked.
_SAMPLED, _PROBED = 2, 4
# Differences of collectives below this are rounding.
_SHOWN = 0.01
# Less than this over an axis is a matter of scalars.
_LEAST_SENT = 65536.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors on one mesh, as (estimate - truth) / truth.

    Attributes:
      bytes: per mesh axis larger than 1 over which enough is sent.
      peaks: estimated and compiled peak of memory, bytes.
      interval: bytes between which the estimate expects the peak; a high end of 0: unknown.
    """

    case: Case
    flops: float
    bytes: tuple[tuple[str, float], ...]
    peaks: tuple[float, float]
    interval: tuple[float, float] = (0.0, 0.0)

    @property
    def memory(self) -> float:
        return self.peaks[0] / self.peaks[1] - 1.0

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the compiler's figure."""
        least, most = self.interval
        return least <= self.peaks[1] and (not most or self.peaks[1] <= most)


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
    footprint = Footprint(
        points=terms.points,
        argument_bytes=terms.argument_bytes,
        output_bytes=terms.output_bytes,
        alias_bytes=terms.alias_bytes,
        on_chip_bytes=terms.on_chip_bytes,
        reread_bytes=terms.reread_bytes,
    )
    return peak_of(footprint, sizes)


def lasting_bytes(terms: Terms, sizes: dict[str, int]) -> float:
    """Arguments, and outputs that take no argument's place."""
    both = value_of(terms.argument_bytes, sizes) + value_of(terms.output_bytes, sizes)
    return both - value_of(terms.alias_bytes, sizes)


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
      partitioned: terms for platform `none`, for a TPU the same as `compiled`.
      compiled: terms for the platform.
    """
    sizes = dict(truth.case.sizes)
    ours, theirs = sent_bytes(partitioned, sizes), truly_sent(truth.partitioned, sizes)
    peak, (least, most) = peak_bytes(compiled, sizes), compiled.memory_spread
    return Row(
        case=truth.case,
        flops=_error(flops_of(partitioned, sizes), float(truth.flops)),
        bytes=tuple(
            (axis, _error(ours[axis], theirs[axis]))
            for axis in ours
            if max(ours[axis], theirs[axis]) >= _LEAST_SENT
        ),
        peaks=(peak, float(truth.memory.peak_bytes)),
        interval=(max(least * peak, lasting_bytes(compiled, sizes)), most * peak),
    )


def _error(estimate: float, truth: float) -> float:
    if truth:
        return estimate / truth - 1.0
    return 0.0 if not estimate else math.inf


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of the last line; the Spearman correlation is that of the worst example."""
    of_bytes = [abs(error) for row in rows for _, error in row.bytes] or [0.0]
    of_memory = [abs(row.memory) for row in rows]
    groups = _by_example(rows)
    later = [error for group in groups for error in corrected(group)] or [0.0]
    return {
        "meshes": len(rows),
        "steps": len(groups),
        "flops_max_error": max(abs(row.flops) for row in rows),
        "bytes_median_error": statistics.median(of_bytes),
        "bytes_max_error": max(of_bytes),
        "memory_median_error": statistics.median(of_memory),
        "memory_max_error": max(of_memory),
        "memory_inside": sum(row.is_inside for row in rows) / len(rows),
        "corrected_median_error": statistics.median(later),
        "corrected_max_error": max(later),
        "memory_spearman": min(_spearman(group) for group in groups),
    }


def _by_example(rows: Sequence[Row]) -> list[list[Row]]:
    def name(row: Row) -> str:
        return row.case.example

    return [list(group) for _, group in itertools.groupby(sorted(rows, key=name), key=name)]


def corrected(rows: Sequence[Row]) -> list[float]:
    """Errors of memory on all meshes of a step but the first, whose figure corrects them."""
    first, *others = rows
    ratio = first.peaks[1] / first.peaks[0]
    return [abs(ratio * row.peaks[0] / row.peaks[1] - 1.0) for row in others]


def _in_words(example: str, figures: dict[str, float]) -> str:
    """One line of the second table: errors in the median and at worst."""
    pairs = "".join(
        f"{figures[f'{what}_median_error']:8.1%}{figures[f'{what}_max_error']:8.1%}"
        for what in ("bytes", "memory")
    )
    return (
        f"{example:22}{figures['flops_max_error']:8.1%}{pairs}"
        f"{figures['memory_inside']:9.0%}   {figures['memory_spearman']:.2f}"
    )


def _spearman(rows: Sequence[Row]) -> float:
    ours, theirs = zip(*(row.peaks for row in rows), strict=True)
    if len({*ours}) == 1 or len({*theirs}) == 1:  # All alike: no order.
        return 1.0
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


def _rows(example: str, platform: str, known: Sequence[Truth]) -> list[Row]:
    found: list[Row] = []
    size = known[0].case.size
    compiled = Estimates(example, platform, size)
    partitioned = compiled if platform == "tpu" else Estimates(example, "none", size)
    for truth in known:
        terms = partitioned.of(truth.case)
        row = compare(truth, terms, compiled.of(truth.case))
        found.append(row)
        sent = "  ".join(f"{axis} {error:+7.2%}" for axis, error in row.bytes)
        mark = " " if row.is_inside else "!"
        print(
            f"{example:20}{platform:4}{truth.case.mesh:20}{row.flops:+8.3%}  "
            f"{row.memory:+7.1%}{mark}   {sent}",
            flush=True,
        )
        for line in differences(truth, terms):
            print(line)
    if partitioned.own:
        print(f"{example}: {partitioned.own} meshes were propagated on their own")
    return found


def _wanted(options: argparse.Namespace) -> tuple[Case, ...]:
    if options.devices:
        return cases(options.example, options.devices)
    return few_cases(options.example, options.platform)


def main() -> int:
    """Prints the table; 1 if some mesh could not be compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--example", nargs="+", choices=tuple(CHOSEN), default=())
    parser.add_argument("--platform", nargs="+", choices=("cpu", "tpu"), default=("cpu",))
    parser.add_argument("--devices", nargs="+", type=int, default=(), help="all meshes, of CPUs")
    parser.add_argument("--jobs", type=int, default=1, help="compilations side by side")
    parser.add_argument("--cached", action="store_true", help="compile nothing more")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    options = parser.parse_args()
    options.example = options.example or tuple(CHOSEN if options.devices else OTHER_STEPS | KINDS)
    jax.config.update("jax_platforms", "cpu")
    # The largest mesh that is lowered here: all probed sizes together.
    jax.config.update("jax_num_cpu_devices", max(_PROBED**3, *options.devices, 16))
    wanted = _wanted(options)
    if options.cached:
        wanted = tuple(case for case in wanted if cached(case) is not None)
    answers = truths(wanted, jobs=options.jobs)
    failed = {case: answer for case, answer in answers.items() if isinstance(answer, str)}
    for case, reason in failed.items():
        print(f"{case.example} {case.mesh} {case.platform}: {reason}", file=sys.stderr)
    known = [answer for answer in answers.values() if isinstance(answer, Truth)]
    print(f"{'step':24}{'mesh':20}{'flops':>8}  {'memory':>7}    bytes sent by axis")
    figures = {
        platform: _compared(platform, [one for one in known if one.case.platform == platform])
        for platform in dict.fromkeys(one.case.platform for one in known)
    }
    if options.out:
        options.out.write_text(json.dumps(_record(figures), indent=1) + "\n")
    print(json.dumps(figures))
    return 1 if failed else 0


def _compared(platform: str, known: Sequence[Truth]) -> dict[str, Any]:
    """Compares all meshes of one platform, and prints two tables."""
    rows: list[Row] = []
    for example in dict.fromkeys(one.case.example for one in known):
        rows += _rows(example, platform, [one for one in known if one.case.example == example])
    print()
    print(f"{platform:22}{'flops':>8}{'bytes':>16}{'memory':>16}{'inside':>9}   Spearman of memory")
    by_example = {group[0].case.example: summary(group) for group in _by_example(rows)}
    for example, figures in by_example.items():
        print(_in_words(example, figures))
    total = summary(rows)
    print(_in_words("all", total))
    print(flush=True)
    return {**total, "by_example": by_example}


def _record(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    versions = {
        name: metadata.version(name)
        for name in ("jax", "jaxlib", "libtpu")
        if name != "libtpu" or "tpu" in figures
    }
    return {"command": "python -m benchmarks.terms " + " ".join(sys.argv[1:]), **versions} | figures


if __name__ == "__main__":
    sys.exit(main())
