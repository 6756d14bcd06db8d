"""Does `automesh lint` name what is broken, at its line, and nothing else?

    python -m benchmarks.lint [--step NAME ...] [--target cpu:8 ...] [--no-examples] [--no-compile]

Each step of `benchmarks/lint/steps` is broken in the way that its first lines say, as people have
broken theirs (the issue is named there), and has a mended twin. For each target both are propagated
as a search does it, and what is found is filtered as `automesh lint` does, by memory alone. Counted
are: broken steps with the right rule at the right line; findings on mended ones; findings on the
three examples of the README, on each of their axes and pairs of them.

A cure that is tried says what it saves of a device's memory. On eight virtual CPU devices the
broken step is compiled as it is and with that cure: the difference of what XLA says that they need
is what the cure saves in truth. The ratio of both is shown for every step with a cure, and its
median. The mended twin is compiled, too: it is mended by hand, and need not do what the cure does.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TARGETS = {"cpu:8": ("cpu", 8), "tpu-v5p-16": ("tpu", 8), "gpu-h100-16": ("gpu", 16)}
_DEVICES = 16
_SHARE = 0.01  # As `automesh.tuner.lint.script`.
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", nargs="*", default=[], help="only these steps")
    parser.add_argument("--target", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--no-examples", action="store_true", help="without those of the README")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES}"
    found = measure(
        options.step,
        options.target,
        with_examples=not options.no_examples,
        compiles=not options.no_compile,
    )
    print(json.dumps(found))


def measure(
    steps: Sequence[str], targets: Sequence[str], *, with_examples: bool, compiles: bool
) -> dict[str, Any]:
    """Runs the benchmark and says how it went."""
    from benchmarks.lint.samples import samples

    chosen = samples(steps)
    result: dict[str, Any] = {"steps": len(chosen), "targets": {}}
    for target in targets:
        platform, devices = TARGETS[target]
        named = wrong = asked = 0
        missed: list[str] = []
        false: list[str] = []
        for sample in chosen:
            sizes = sample.sizes(devices)
            names = [axis for axis, _ in sizes]
            broken, mended = (
                _shown(_programs(sample.build(is_mended=is_mended), names, platform), sizes)
                for is_mended in (False, True)
            )
            is_asked = not sample.only or platform in sample.only
            asked += is_asked
            is_named = (sample.finding, sample.source) in broken
            named += is_named and is_asked
            if is_asked and not is_named:
                missed.append(f"{sample.name}: {sorted(broken)}")
            others = {one for one in broken if one[0] != sample.finding}
            wrong += bool(mended)
            false += [f"{sample.name}: {rule} at {place}" for rule, place in sorted(mended)]
            _say(target, sample.name, "named" if is_named else "MISSED", mended, others)
        result["targets"][target] = {
            "broken": asked,
            "named": named,
            "missed": missed,
            "mended": len(chosen),
            "mended_with_findings": wrong,
            "false": false,
        }
    if with_examples:
        result["examples"] = _examples(targets)
    if compiles:
        result["cures"] = _cures(chosen)
    return result


def _say(target: str, name: str, how: str, mended: set[Any], others: set[Any]) -> None:
    also = f"  also {sorted(others)}" if others else ""
    false = f"  FALSE {sorted(mended)}" if mended else ""
    print(f"{target:12} {name:32} {how}{false}{also}", file=sys.stderr, flush=True)


_Sizes = Sequence[tuple[str, int]]


def _programs(build: Callable[[Any], Any], names: Sequence[str], platform: str) -> Any:
    """The lowered programs of a step, which are shared between its meshes."""
    from automesh.program.script.build import build_on
    from automesh.sharding.programs import Programs

    return Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=tuple(names), platform=platform
    )


def _terms(programs: Any, sizes: _Sizes, cure: Any = None) -> Any:
    from automesh.sharding.propagate import propagate

    return propagate(programs, sizes=tuple(sizes), probes=(), enter=lambda _: None, cure=cure).terms


def _memory(terms: Any, sizes: _Sizes) -> float:
    """Of a device, in the larger of the first and the settled step."""
    from automesh.cost.breakdown import peak_of
    from automesh.cost.terms import Footprint

    settled = Footprint(
        points=terms.points,
        argument_bytes=terms.argument_bytes,
        output_bytes=terms.output_bytes,
        alias_bytes=terms.alias_bytes,
        on_chip_bytes=terms.on_chip_bytes,
        reread_bytes=terms.reread_bytes,
    )
    return max(peak_of(one, dict(sizes)) for one in (settled, terms.first) if one is not None)


def _shown(programs: Any, sizes: _Sizes) -> set[tuple[str, str]]:
    """Rules and lines of what is worth a word."""
    from automesh.cost.terms import value_of
    from automesh.tuner.lint.script import ALWAYS

    terms = _terms(programs, sizes)
    memory = _memory(terms, sizes)
    return {
        (one.rule, one.source)
        for one in terms.findings
        if one.rule in ALWAYS or value_of(one.bytes, dict(sizes)) >= _SHARE * memory
    }


AXES = ("dp", "fsdp", "ep", "tp", "sp")
EXAMPLES = {
    "dense_lm": ("dp", "fsdp", "tp", "sp"),
    "moe_lm": ("dp", "fsdp", "ep", "tp"),
    "long_context": ("dp", "fsdp", "sp"),
}


def _examples(targets: Sequence[str]) -> dict[str, Any]:
    """Findings on the examples of the README: each axis alone at 2, and pairs of them."""
    from benchmarks.support.paths import EXAMPLES as FOLDER

    sys.path.insert(0, str(FOLDER))
    meshes = 0
    found: list[str] = []
    for name, build in _example_steps():
        for target in targets:
            programs = _programs(build, AXES, TARGETS[target][0])
            for sizes in _meshes(EXAMPLES[name]):
                meshes += 1
                for rule, place in sorted(_shown(programs, sizes)):
                    found.append(f"{name} {dict(sizes)} {target}: {rule} at {place}")
    print(f"examples: {len(found)} findings on {meshes} meshes", file=sys.stderr)
    return {"meshes": meshes, "findings": found}


def _example_steps() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    import importlib

    for name in EXAMPLES:
        sys.argv = [name]
        yield name, importlib.import_module(name).build


def _meshes(axes: Sequence[str]) -> Iterator[_Sizes]:
    """Each axis alone, then the first one with each of the others."""
    for axis in axes:
        yield ((axis, 2),)
    for axis in axes[1:]:
        yield ((axes[0], 2), (axis, 2))


def _cures(chosen: Sequence[Any]) -> dict[str, Any]:
    """What cures save by the estimate, and what the mended twin saves when it is compiled."""
    devices = 8
    rows: list[dict[str, Any]] = []
    for sample in chosen:
        sizes = sample.sizes(devices)
        build, mended = sample.build(is_mended=False), sample.build(is_mended=True)
        programs = _programs(build, [axis for axis, _ in sizes], "cpu")
        before = _terms(programs, sizes)
        cures = [
            one.cure
            for one in before.findings
            if (one.rule, one.source) == (sample.finding, sample.source) and one.cure is not None
        ]
        best = _best(programs, sizes, before, cures)
        if best is None:
            continue
        saved, cure = best
        broken = _compiled(build, sizes)
        truth, twin = broken - _compiled(build, sizes, cure), broken - _compiled(mended, sizes)
        row = {
            "step": sample.name,
            "tried_bytes": saved,
            "compiled_bytes": truth,
            "twin_bytes": twin,
        }
        if truth:
            row["ratio"] = saved / truth
        rows.append(row)
        print(
            f"{sample.name:32} {cure.kind:18} saves {saved / MIB:8.2f} MiB, compiled "
            f"{truth / MIB:8.2f} MiB, the twin {twin / MIB:8.2f} MiB",
            file=sys.stderr,
            flush=True,
        )
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    near = [ratio for ratio in ratios if abs(ratio - 1) <= 0.2]
    return {
        "rows": rows,
        "tried": len(rows),
        "within_20_percent": len(near),
        "median_error": statistics.median(abs(one - 1) for one in ratios) if ratios else None,
    }


def _best(
    programs: Any, sizes: _Sizes, before: Any, cures: Sequence[Any]
) -> tuple[float, Any] | None:
    """The bytes that the best cure saves by the estimate, and this cure."""
    from automesh.ir.findings.variants import variants
    from automesh.program.refused import StepRefused

    best: tuple[float, Any] | None = None
    for cure in cures:
        for one in variants(cure):
            try:
                after = _terms(programs, sizes, one)
            except StepRefused:
                continue
            gain = _memory(before, sizes) - _memory(after, sizes)
            if best is None or gain > best[0]:
                best = gain, one
    return best


def _compiled(build: Callable[[Any], Any], sizes: _Sizes, cure: Any = None) -> float:
    """What XLA says that a device needs for the step on virtual CPU devices: the larger of the
    first call and of the second, whose state is split as the first one gave it back. A step with
    a cure gives its state back as it was given."""
    import jax
    import numpy as np

    from automesh.program.lower.carry_state import default_carry

    count = math.prod(size for _, size in sizes)
    devices = np.array(jax.devices()[:count]).reshape([size for _, size in sizes])
    step, args = build(jax.sharding.Mesh(devices, tuple(axis for axis, _ in sizes)))
    worst = 0.0
    for _ in range(2):
        lowered = step.lower(*args)
        if cure is not None:
            _apply(lowered, cure)
        compiled = lowered.compile()
        stats = compiled.memory_analysis()
        worst = max(
            worst,
            float(
                stats.argument_size_in_bytes
                + stats.output_size_in_bytes
                - stats.alias_size_in_bytes
                + stats.temp_size_in_bytes
            ),
        )
        if cure is not None:
            break
        traced = step.trace(*args)
        donated = [bool(info.donated) for info in jax.tree.leaves(traced.args_info)]
        following = default_carry(args, traced.out_info, donated).shardings_after(args, compiled)
        if following is None:
            break
        args = following
    return worst


def _apply(lowered: Any, cure: Any) -> None:
    """Applies a cure to a lowered step in place; its shardings are then those of the program."""
    from jax._src.sharding_impls import UNSPECIFIED
    from jaxlib.mlir import ir

    from automesh.sharding.cures import apply_cure
    from automesh.sharding.passes import plain

    program = lowered.compiler_ir("stablehlo")
    copy = plain(program)
    with program.context, ir.Location.unknown():
        apply_cure(copy, cure)
        lowered._lowering._hlo = ir.Module.parse(copy.get_asm(enable_debug_info=True))
    given = lowered._lowering.compile_args
    for name in ("in_shardings", "out_shardings"):
        given[name] = (UNSPECIFIED,) * len(given[name])
