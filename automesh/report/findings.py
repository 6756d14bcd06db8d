"""Findings in words: what a compiler does to a step that nobody asked for, why, and the cure.

`RULES` has a row for each rule of `ir.findings`; docs/lint.md has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from automesh.cost.terms import Finding, Terms, value_of
from automesh.mesh.axes import Plan
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes

_MOST = 4
_Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What is said of a rule.

    Attributes:
      title: the rule as a heading of a few words.
      what: what is the case on one mesh, without where.
      why: why the compiler does so, one sentence.
      cure: what to change, an imperative.
    """

    title: str
    what: Callable[[Finding, _Sizes], str]
    why: str
    cure: Callable[[Finding], str]


def sentence(finding: Finding, sizes: _Sizes) -> str:
    """What a finding is on one mesh, and its cure.

    Args:
      sizes: of its axes.
    """
    words = RULES[finding.rule]
    at = f" ({clean(finding.source)})" if finding.source else ""
    return f"{words.title}: {words.what(finding, sizes)}; {words.cure(finding)}{at}"


def _full(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"to split {_array(finding)} otherwise XLA gathers all of it over {_axes(finding)}, "
        f"{_bytes(finding, sizes)} on every device{_times(finding, sizes)}, and cuts it again"
    )


def _stack(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} is split over its layers by {_axes(finding)}, and the loop over them "
        f"gathers all of it, {_bytes(finding, sizes)} on every device{_times(finding, sizes)}"
    )


def _second_compile(finding: Finding, sizes: _Sizes) -> str:
    lost = _bytes(finding, sizes)
    donation = f", and its first call cannot reuse {lost} that are donated" if finding.bytes else ""
    return (
        f"{_array(finding)} comes back split over {_axes(finding)} otherwise than it went in, so "
        f"that the second call compiles another program{donation}"
    )


def _type(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} comes back in another type than it went in: {_bytes(finding, sizes)} "
        "on a device are donated and not reused, and the next call compiles another program or "
        "fails"
    )


def _donation(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} is donated and no output replaces it: {_bytes(finding, sizes)} on a "
        "device are not reused, and it is made anew for every step"
    )


def _undonated(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} is replaced by what the step returns and not donated: old and new, "
        f"{_bytes(finding, sizes)} on a device, are kept at the same time"
    )


def _replicated(finding: Finding, sizes: _Sizes) -> str:
    parts = _parts(finding, sizes)
    whole = value_of(finding.bytes, sizes)
    like = f", as they split {clean(finding.detail)}" if finding.detail else ""
    return (
        f"{_array(finding)} is the same on all devices along {_axes(finding)}: "
        f"{format_bytes(whole)} on each, and {format_bytes(whole / parts)} if these axes split it"
        f"{like}"
    )


def _one_device(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} was made on one device, which holds all {_bytes(finding, sizes)} of it "
        "when the first step starts, though the mesh has several"
    )


def _microbatches(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"the reshape of {_array(finding)} into microbatches lets {_axes(finding)} split the "
        f"microbatches and not the examples, so that the loop over them sends the batch around: "
        f"{_bytes(finding, sizes)} on a device{_times(finding, sizes)}"
    )


def _undivided(finding: Finding, sizes: _Sizes) -> str:
    operation, _, how = finding.detail.partition(", ")
    if how == "moved":
        return (
            f"{clean(operation)} works along a dimension of {_array(finding)} that "
            f"{_axes(finding)} split: {_bytes(finding, sizes)} on a device are sent around for it"
            f"{_times(finding, sizes)}"
        )
    return (
        f"{_axes(finding)} {_divide(finding)} {clean(operation)}: {_array(finding)} is gathered, "
        f"{_bytes(finding, sizes)} on every device{_times(finding, sizes)}, and all devices along "
        "them do the same work"
    )


def _divide(finding: Finding) -> str:
    return "do not divide" if len(finding.axes) > 1 else "does not divide"


def _per_microbatch(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"the gradient {_array(finding)} is reduced over {_axes(finding)} in every microbatch: "
        f"{_bytes(finding, sizes)}{_times(finding, sizes)}, where once would do"
    )


def _gradient(finding: Finding, sizes: _Sizes) -> str:
    whole = value_of(finding.bytes, sizes)
    return (
        f"the gradient {_array(finding)} is kept whole along {_axes(finding)}: "
        f"{format_bytes(whole)} on every device, and "
        f"{format_bytes(whole / _parts(finding, sizes))} if it were split like "
        f"{clean(finding.detail)}"
    )


def _padding(finding: Finding, sizes: _Sizes) -> str:
    size, _, padded = finding.detail.partition(" as ")
    return (
        f"{_axes(finding)} {_divide(finding)} the {size} of {_array(finding)}: the compiler pads "
        f"it to {padded}, {_bytes(finding, sizes)} of padding on a device in this array alone"
    )


def _wide_product(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{clean(finding.detail)} of the step's multiplications are in {_dtype(finding)} at this "
        f"line, as of {_array(finding)}{_times(finding, sizes)}, where the others are narrower: "
        f"{_bytes(finding, sizes)} of operands on a device"
    )


def _wide_reduction(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} is reduced over {_axes(finding)} in {_dtype(finding)}, "
        f"{_bytes(finding, sizes)}{_times(finding, sizes)}, and turned into "
        f"{clean(finding.detail)} right behind it"
    )


def _dtype(finding: Finding) -> str:
    return clean(finding.array.partition("[")[0])


def _constant(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"{_array(finding)} is written into the program as a constant: {_bytes(finding, sizes)} on "
        "every device, which every compile and every cache entry carries along"
    )


def _unrolled(finding: Finding, sizes: _Sizes) -> str:
    times = round(value_of(finding.count, sizes))
    return (
        f"a Python loop has put the product at this line, {_array(finding)}, into the program "
        f"{times} times, and the compiler optimizes each copy by itself"
    )


def _callback(finding: Finding, sizes: _Sizes) -> str:
    gathered = f", gathered over {_axes(finding)} first" if finding.axes else ""
    return (
        f"the step calls Python on the host{_times(finding, sizes)}: {_bytes(finding, sizes)} go "
        f"there and back each time, {_array(finding)} and the like{gathered}, and the devices wait"
    )


def _transfer(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"the loop fetches {_array(finding)} from the memory of the host{_times(finding, sizes)}: "
        f"{_bytes(finding, sizes)} on a device each time"
    )


def _random(finding: Finding, sizes: _Sizes) -> str:
    return (
        f"the random bits {_array(finding)} are made whole on every device along {_axes(finding)}, "
        f"{_bytes(finding, sizes)}{_times(finding, sizes)}, and each keeps its part"
    )


def _uneven(finding: Finding, sizes: _Sizes) -> str:
    over = f" along {_axes(finding)}" if finding.axes else ""
    return (
        f"a branch with products depends on the device's place{over}: some devices do its work for "
        f"{_array(finding)}, and the others wait for them{_times(finding, sizes)}"
    )


def _tiles(finding: Finding, sizes: _Sizes) -> str:
    size, cut = int(finding.detail), "cut" if len(finding.axes) > 1 else "cuts"
    part = -(-size // _parts(finding, sizes))
    return (
        f"{_axes(finding)} {cut} the {size} of {_array(finding)} into parts of {part}, and a TPU "
        f"multiplies 128 at a time: {1 - part / 128:.0%} of its matrix unit has nothing to do in "
        "this product"
    )


def _slices(finding: Finding, sizes: _Sizes) -> str:
    cut = "split" if len(finding.axes) > 1 else "splits"
    return (
        f"{_axes(finding)} {cut} {_array(finding)} over the dimension that this line takes apart: "
        f"each device sends {_bytes(finding, sizes)} of it to others{_times(finding, sizes)}"
    )


def _crossing(finding: Finding, sizes: _Sizes) -> str:
    granules, _, seconds = clean(finding.detail).partition(" ")
    return (
        f"{_axes(finding)} goes over {granules} granules (slices or nodes), and does not split the "
        f"batch: its collectives, {round(value_of(finding.count, sizes))} a step of "
        f"{_bytes(finding, sizes)} on average, take {seconds} on the network between them"
    )


def _says(text: str) -> Callable[[Finding], str]:
    return lambda _: text


def _like(finding: Finding) -> str:
    like = f" like {clean(finding.detail)}" if finding.detail else f" over {_axes(finding)}"
    return (
        f"split it{like}: give its `jax.ShapeDtypeStruct`, its `jax.device_put` or the "
        "`out_shardings` of what makes it that NamedSharding"
    )


RULES: Mapping[str, Words] = {
    "full-rematerialization": Words(
        title="full rematerialization",
        what=_full,
        why="the partitioner knows no direct way between these two splits, so it gathers the whole "
        "array and keeps a part",
        cure=_says("constrain it in two steps that each move one dimension"),
    ),
    "layer-split-stack": Words(
        title="layer-split stack",
        what=_stack,
        why="a loop takes one layer at a time at a place that is known only when it runs, and that "
        "layer lies on some of the devices alone",
        cure=_says("split another dimension of it"),
    ),
    "second-compile": Words(
        title="second compile",
        what=_second_compile,
        why="jax compiles a step once for each way in which its arguments are split, and what a "
        "step returns is split as the compiler likes unless `out_shardings` says it",
        cure=_says("state `out_shardings` for it, or split the argument like the result"),
    ),
    "state-changes-type": Words(
        title="the state changes its type",
        what=_type,
        why="a buffer is reused only by an output of the same shape and type",
        cure=_says("convert it back before the step returns it"),
    ),
    "lost-donation": Words(
        title="lost donation",
        what=_donation,
        why="a donated buffer is reused by an output of the same shape and type, and there is none",
        cure=_says("return what replaces it, or do not donate it"),
    ),
    "undonated-state": Words(
        title="undonated state",
        what=_undonated,
        why="jax may not write over an argument that the caller could still use",
        cure=_says("name its argument in `donate_argnums` of `jax.jit`"),
    ),
    "replicated-state": Words(
        title="replicated state",
        what=_replicated,
        why="an array without a sharding, or with a PartitionSpec that leaves these axes out, is "
        "kept whole on every device along them",
        cure=_like,
    ),
    "state-on-one-device": Words(
        title="state on one device",
        what=_one_device,
        why="an array that is made or loaded without a sharding lies on the first device",
        cure=_says("make it under `jax.jit` with `out_shardings`, or load it with its shardings"),
    ),
    "microbatch-reshape": Words(
        title="microbatch reshape",
        what=_microbatches,
        why="a reshape from (batch, ...) to (microbatches, examples, ...) keeps the devices in "
        "order, so that each of them holds some microbatches and not a part of every one",
        cure=_says(
            "reshape to (examples, microbatches, ...) and swap the first two dimensions: each "
            "device then cuts its own examples (other examples share a microbatch)"
        ),
    ),
    "undivided-operation": Words(
        title="undivided operation",
        what=_undivided,
        why="the operation needs the dimension whole that the axes split, or no axis splits what "
        "else it works on",
        cure=_says(
            "let these axes split another dimension of it, as by `with_sharding_constraint`, or "
            "do it in `jax.shard_map` on each device's part"
        ),
    ),
    "gradient-per-microbatch": Words(
        title="gradient per microbatch",
        what=_per_microbatch,
        why="each microbatch ends with a gradient that is the same on all devices, and the "
        "compiler does not move the reduction behind the loop",
        cure=_says(
            "add up each device's own gradients in `jax.shard_map` and `psum` once behind the "
            "loop, or use fewer microbatches"
        ),
    ),
    "replicated-gradient": Words(
        title="replicated gradient",
        what=_gradient,
        why="what a loop carries keeps the split that it starts with, and what a constraint leaves "
        "whole stays whole: nothing says that the gradient is split like its parameter",
        cure=_says("constrain it like the parameter: `with_sharding_constraint`"),
    ),
    "padding-waste": Words(
        title="padding waste",
        what=_padding,
        why="all devices hold and compute parts of the same size, the last ones filled up",
        cure=_says("choose a size that the axes divide, or let smaller axes split it"),
    ),
    "wide-product": Words(
        title="wide product",
        what=_wide_product,
        why="an operand was converted to the wide type before the product, or the gradient comes "
        "back in it, and matrix units multiply narrow types several times as fast",
        cure=_says(
            "multiply in the narrow type and keep sums wide: `preferred_element_type=jnp.float32` "
            "with narrow operands, and convert what comes behind it, not before"
        ),
    ),
    "wide-reduction": Words(
        title="wide reduction",
        what=_wide_reduction,
        why="devices send what they reduce in the type that it has at that place",
        cure=_says(
            "convert to the narrow type first, if its precision is enough for the sum: the product "
            "in front with a narrow `preferred_element_type`, or `astype` in the loss"
        ),
    ),
    "baked-constant": Words(
        title="baked constant",
        what=_constant,
        why="an array that the step takes from around it, and not from its arguments, is traced as "
        "a constant, which no mesh splits",
        cure=_says("hand it to the step as an argument, with a sharding"),
    ),
    "unrolled-layers": Words(
        title="unrolled layers",
        what=_unrolled,
        why="jax traces a Python loop into as many copies as it has turns, and the time and the "
        "memory of a compile grow with them",
        cure=_says("stack the parameters and loop with `jax.lax.scan`"),
    ),
    "host-callback": Words(
        title="host callback",
        what=_callback,
        why="`jax.pure_callback`, `jax.debug.print` and their like are calls of the program in the "
        "middle of its work",
        cure=_says("do it behind the step, on what the step returns, or not in every step"),
    ),
    "host-transfer": Words(
        title="host transfer in a loop",
        what=_transfer,
        why="the loop carries an array that lies in the memory of the host, so that each iteration "
        "begins with the copy of all of it over the bus between host and device",
        cure=_says("fetch it once in front of the loop, and move the result behind it"),
    ),
    "whole-random-bits": Words(
        title="whole random bits",
        what=_random,
        why="the partitioner does not split XLA's own generator, which keys of `rbg` and "
        "`unsafe_rbg` use",
        cure=_says(
            "use keys of threefry, `jax.random.key(seed, impl='threefry2x32')`, or on TPU "
            "`--xla xla_tpu_spmd_rng_bit_generator_unsafe=true`: bits then differ by mesh"
        ),
    ),
    "uneven-work": Words(
        title="uneven work",
        what=_uneven,
        why="all devices meet at the next collective, so that the busiest one decides how long it "
        "takes: with a causal mask, the one with the last part of the sequence",
        cure=_says(
            "give each device an early and a late part of the sequence (zigzag), or every n-th row "
            "(striped)"
        ),
    ),
    "slice-across-parts": Words(
        title="slice across parts",
        what=_slices,
        why="a slice is split as the array was, so that most of its rows lie on other devices: "
        "queries, keys and values, or gate and up, side by side in one dimension",
        cure=_says(
            "give what is packed a dimension of its own, which no axis splits, in the weight and "
            "in what comes out of it: `reshape(..., 3, heads, size)` and index it, or several "
            "weights"
        ),
    ),
    "axis-over-dcn": Words(
        title="axis over DCN",
        what=_crossing,
        why="an axis that splits weights or a sequence sends activations in every layer, forward "
        "and backward, and the network between granules is many times slower than the links inside",
        cure=_says(
            "let this axis fit inside of a granule, and a data-parallel axis cross: "
            "`dcn.dp:2,tp:8` instead of `tp:16`"
        ),
    ),
    "parts-below-tile": Words(
        title="parts below a tile",
        what=_tiles,
        why="a matrix unit has 128 rows and 128 columns (256 on v6e), and what a device's part "
        "does not fill stays idle",
        cure=_says("let these axes split a larger dimension, or fewer devices this one"),
    ),
}
# As in `f32[8,128]`.
_SHAPE = re.compile(r"[a-z0-9]+\[[\d,]*\]$")
# A plan that has one of these is not the loop that the user means to run: a rule says so.
BROKEN = frozenset(("state-changes-type", "lost-donation"))


def _array(finding: Finding) -> str:
    return clean(finding.array)


def _axes(finding: Finding) -> str:
    return "+".join(finding.axes) or "no axis"


def _parts(finding: Finding, sizes: _Sizes) -> int:
    parts = 1
    for axis in finding.axes:
        parts *= sizes.get(axis, 1)
    return parts


def _bytes(finding: Finding, sizes: _Sizes) -> str:
    return format_bytes(value_of(finding.bytes, sizes))


def _times(finding: Finding, sizes: _Sizes) -> str:
    times = round(value_of(finding.count, sizes))
    return f", {times} times a step" if times > 1 else ""


@dataclass(slots=True)
class _Seen:
    """One finding of some plans: how many, and the fastest of them."""

    plans: int
    step_s: float
    plan: Plan
    finding: Finding


def _named(finding: Finding) -> str:
    """The name of an argument or a result; nothing for an array that has a shape alone: a line
    makes many of these, other ones for each knob."""
    return "" if finding.source and _SHAPE.match(finding.array) else finding.array


def _cost(finding: Finding, plan: Plan) -> float:
    """Bytes of all executions in a step."""
    return value_of(finding.bytes, plan.sizes) * value_of(finding.count, plan.sizes)


@dataclass(slots=True)
class FindingsOfPlans:
    """Findings of all plans of a search, by rule and line.

    >>> FindingsOfPlans().notices(0)
    ()
    """

    _seen: dict[tuple[str, str, str], _Seen] = field(default_factory=dict)

    def add(self, plan: Plan, step_s: float, terms: Terms) -> None:
        """Takes in what was found for a plan; of several arrays at one line the costliest."""
        largest: dict[tuple[str, str, str], Finding] = {}
        for finding in terms.findings:
            if finding.is_on(plan.sizes):
                key = (finding.rule, finding.source, _named(finding))
                known = largest.get(key)
                if known is None or _cost(known, plan) < _cost(finding, plan):
                    largest[key] = finding
        for key, finding in largest.items():
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(1, step_s, plan, finding)
                continue
            seen.plans += 1
            if step_s < seen.step_s:
                seen.step_s, seen.plan, seen.finding = step_s, plan, finding

    def notices(self, plans: int) -> tuple[str, ...]:
        """One sentence each, those of the fastest plans first.

        Args:
          plans: all that have an estimate.
        """
        ranked = sorted(self._seen.values(), key=lambda seen: seen.step_s)
        said = [
            f"{sentence(seen.finding, seen.plan.sizes)} "
            f"[{'all' if seen.plans == plans else seen.plans} of {count(plans, 'plan')}, "
            f"here {clean(str(seen.plan))}]"
            for seen in ranked[:_MOST]
        ]
        if len(ranked) > _MOST:
            said.append(f"{count(len(ranked) - _MOST, 'more finding')} of this kind in other plans")
        return tuple(said)
