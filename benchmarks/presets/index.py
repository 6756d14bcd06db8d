"""The index page of the presets: what there is, and how it compares with published meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from automesh.mesh.rules.shipped import Preset, PresetOrigin, Side
from automesh.units import format_bytes, format_seconds
from benchmarks.experts.study import Side as Compared
from benchmarks.experts.study import difference
from benchmarks.presets.models import MODELS, TARGETS, Model

_HEAD = """\
# Presets

Rules for public models, found by `automesh search maxtext` for devices that were not there. This
page and the files beside it are made by `python -m benchmarks.presets`;
[docs/presets.md](../../docs/presets.md) says how they are read and made again. Nothing here was
measured: `compiled` is replayed from the schedule that the target's own compiler made, `estimated`
was never compiled. `Made in` is the time of the runs that came to their end, on a machine that had
other work as well.

```python
config = automesh.load("preset:maxtext/qwen3-1.7b").select("tpu-v5p-64")
```
"""
_COMPARED = """\
## Beside the meshes that MaxText and AXLearn publish

Both sides have the batch and the length of the preset, MaxText's step, and the remat policy of the
preset's space that suits them best. `time` is that of the published mesh over that of the rule:
below 1 the published mesh is faster; it is given only where both rest on the same evidence. Neither
side has the compiler options that published recipes set, such as that for windowed einsums
([docs/targets.md](../../docs/targets.md)), which decides much where fsdp is large.
"""


def page(presets: Sequence[Preset]) -> str:
    """The text of the page.

    Args:
      presets: those that are kept, sorted by name.
    """
    by_name = {preset.name: preset for preset in presets}
    known = [(model, by_name[model.preset]) for model in MODELS if model.preset in by_name]
    lines = [
        _HEAD,
        "## Rules",
        "",
        *_states(known),
        "",
        "| Model | Target | Arguments | Rule | Step | Memory | Evidence | Made in |",
        "|---|---|---|---|---:|---:|---|---:|",
        *(row for model, preset in known for row in _rule_rows(model, preset)),
        "",
        *_gaps(by_name),
        _COMPARED,
    ]
    for model, preset in known:
        lines += [f"### {model.name}", "", *_comparison(preset), ""]
    return "\n".join([*lines, "## Versions", "", *_versions(presets)]) + "\n"


def _states(known: Sequence[tuple[Model, Preset]]) -> Iterator[str]:
    """How far the presets are, in numbers."""
    made = [preset.records.get(target) for _, preset in known for target in TARGETS]
    kinds = [one.ours.kind if one is not None and one.ours is not None else "" for one in made]
    total = len(MODELS) * len(TARGETS)
    without = sum(one is not None and one.ours is None for one in made)
    yield (
        f"Of {total} pairs of a model and a target {kinds.count('compiled')} are compiled, "
        f"{kinds.count('estimated')} estimated only, {without} have no rule for the reason that "
        f"stands there, and {total - sum(one is not None for one in made)} were not made yet."
    )


def _gaps(by_name: Mapping[str, Preset]) -> Iterator[str]:
    """The pairs that were not made yet."""
    left = {
        model.name: [
            target
            for target in TARGETS
            if model.preset not in by_name or target not in by_name[model.preset].records
        ]
        for model in MODELS
    }
    if any(left.values()):
        yield from ("Not made yet:", "")
        yield from (f"* {name}: {', '.join(targets)}" for name, targets in left.items() if targets)
        yield ""


def _rule_rows(model: Model, preset: Preset) -> Iterator[str]:
    for target in TARGETS:
        made = preset.records.get(target)
        name = f"{model.name} ({model.kind})"
        if made is None:
            continue
        arguments = " ".join(made.arguments.split()[1:])
        took = format_seconds(made.seconds)
        if made.ours is None:
            yield f"| {name} | {target} | {arguments} | none: {made.reason} | | | | {took} |"
            continue
        side = made.ours
        evidence = _evidence(made)
        yield (
            f"| {name} | {target} | {arguments} | `{side.plan}` | {format_seconds(side.step_s)} "
            f"| {format_bytes(side.memory_bytes)} | {evidence} | {took} |"
        )


def _evidence(made: PresetOrigin) -> str:
    assert made.ours is not None
    if made.ours.kind == "compiled":
        return f"compiled, best of {made.compiled} (of {made.legal} legal)"
    why = f": {made.reason}" if made.reason else ""
    return f"estimated, of {made.legal} legal{why}"


def _comparison(preset: Preset) -> Iterator[str]:
    yield "| Target | Published mesh | By whom | Evidence | Step | Memory | time | What differs |"
    yield "|---|---|---|---|---:|---:|---:|---|"
    for target in TARGETS:
        made = preset.records.get(target)
        for side in () if made is None else made.published:
            ours = made.ours if made is not None else None
            yield (
                f"| {target} | `{side.plan}` | {side.source} | {side.kind} | "
                f"{format_seconds(side.step_s) if side.step_s else ''} | "
                f"{format_bytes(side.memory_bytes) if side.memory_bytes else ''} | "
                f"{_ratio(side, ours)} | {_why(side, ours)} |"
            )


def _ratio(side: Side, ours: Side | None) -> str:
    if ours is None or ours.kind != side.kind or not (ours.step_s and side.step_s):
        return ""
    return f"{side.step_s / ours.step_s:.3f}"


def _why(side: Side, ours: Side | None) -> str:
    """What makes one of the two slower, and what the published one was published with."""
    said: list[str] = []
    if ours is not None and side.plan == ours.plan:
        said.append("the same plan")
    elif ours is not None and _ratio(side, ours):
        said.append(
            difference(_compared(side), _compared(ours)).replace("the expert's", "the published")
            or "a tie"
        )
    return "; ".join([*filter(None, said), *filter(None, [side.remark])])


def _compared(side: Side) -> Compared:
    return Compared(plan=side.plan, step_s=side.step_s, causes=side.causes)


def _versions(presets: Sequence[Preset]) -> Iterator[str]:
    """Which versions made how many pairs."""
    made = [
        ", ".join(f"{name} {version}" for name, version in one.versions.items())
        for preset in presets
        for one in preset.records.values()
    ]
    for words in dict.fromkeys(made):
        yield f"* {words}: {made.count(words)} pairs"
