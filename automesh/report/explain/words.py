"""An explanation in sentences: pure functions from the nouns of `cost.comparison` to words."""

from __future__ import annotations

from collections.abc import Sequence

from automesh.cost.breakdown import CollectiveCost, KernelSum
from automesh.cost.comparison import Reason, Share, WhyFaster, judge, shares_of
from automesh.cost.windowed import THRESHOLDS
from automesh.mesh.axes import PIPELINE
from automesh.outcomes import Measured
from automesh.report.explain.nouns import Explained, Explanation
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import (
    format_bytes,
    format_count,
    format_factor,
    format_percent,
    format_seconds,
)

# MiB: no operand is as large.
_NO_WINDOWS_MIB = 100_000
_TIE = 0.005  # replays have no noise: only what would not be seen on a clock is a tie
# What seconds are spent on, for reasons that have no axes.
_SUBJECTS: dict[Reason, str] = {
    "compute": "compute",
    "small": "multiplications that are too small to run at full speed",
    "memory": "device memory traffic",
    "latency": "latency",
    "host": "waiting for copies between the device and its host",
    "bubble": "the pipeline's bubble, in which ranks wait for each other",
    "other": "other work",
}
_OPERATIONS = {"dot_general": "multiplication", "fusion": "elementwise work"}


def why_sentence(one: Explained) -> str:
    """Says where most of the step goes: the cause, its axes and its source line."""
    shares = shares_of(one.cost, one.estimated)
    if not shares or one.estimated.step_s <= 0:
        return "nothing in this step has a price"
    first = shares[0]
    part = format_percent(first.seconds / one.estimated.step_s)
    return f"{part} of the step is {_reason(first, one)}"


def verdict_sentence(explanation: Explanation) -> str:
    """Says which of two meshes is faster by the best evidence for both, and why."""
    one, against = explanation.one, explanation.against
    if against is None:
        return ""
    sides = (one, against)
    measured = _measured_pair(one, against)
    winner = _faster(sides)
    verdict = judge((one.cost, against.cost), (one.estimated, against.estimated), winner=winner)
    said = _measured_sentence(sides, measured) if measured else _replayed_sentence(sides)
    return " ".join(part for part in (said, _because(sides, verdict, bool(said))) if part)


def window_sentence(explanation: Explanation) -> str:
    """Says which products are cut into rings on which mesh; empty if none is and no option is set
    for it."""
    sides = [one for one in (explanation.one, explanation.against) if one is not None]
    if not any(map(_rings, sides)):
        return "no product is windowed" if any(map(_window_option, sides)) else ""
    if len(sides) == 1:
        return f"{_windowed(sides[0])}."
    names = _names(sides)
    said = [f"{name}: {_windowed(side)}" for name, side in zip(names, sides, strict=True)]
    return "; ".join(said) + "."


def _windowed(one: Explained) -> str:
    """Says what the rings of a mesh cost, and which option decides."""
    option = _window_option(one)
    under = f" under {option}" if option else ""
    rings = _rings(one)
    if not rings:
        return f"no windowed einsum{under}, its products wait for whole operands and results"
    axes = " and ".join(dict.fromkeys("+".join(ring.axes) for ring in rings))
    replaced = count(round(sum(ring.count for ring in rings)), "collective")
    return (
        f"windowed einsums{under}: {replaced} over {axes} become rings of permutes around their "
        f"products, which hide them but read or write an activation again in every step of a ring "
        f"({format_seconds(one.cost.ring_s)} of device memory traffic){_way_out(one)}"
    )


def _way_out(one: Explained) -> str:
    """Names the option that turns rings into whole collectives, unless the plan sets it already."""
    option = next((own for name, own in THRESHOLDS.items() if name == one.cost.platform), "")
    if not option or _window_option(one):
        return ""
    return f"; `--xla {option}=default,{_NO_WINDOWS_MIB}` also tries whole collectives instead"


def _rings(one: Explained) -> list[CollectiveCost]:
    return [each for each in one.cost.collectives if each.is_ring]


def _window_option(one: Explained) -> str:
    options = dict(one.plan.compiler_options)
    return next(
        (f"`{name}={options[name]}`" for name in THRESHOLDS.values() if name in options), ""
    )


def _faster(sides: Sequence[Explained]) -> int:
    return 0 if sides[0].estimated.step_s <= sides[1].estimated.step_s else 1


def _measured_pair(one: Explained, other: Explained) -> tuple[Measured, Measured] | None:
    if one.measured is None or other.measured is None:
        return None
    return one.measured, other.measured


def _measured_sentence(sides: Sequence[Explained], measured: tuple[Measured, Measured]) -> str:
    """Says how the meshes compare as measured, with a warning if the estimate contradicts it."""
    order = 0 if measured[0].step_s <= measured[1].step_s else 1
    fast, slow = measured[order], measured[1 - order]
    if fast.interval_s[1] >= slow.interval_s[0]:
        return "Measured, they are not told apart: the intervals of their times overlap."
    factor = format_factor(slow.step_s / fast.step_s)
    text = f"Measured, {_names(sides)[order]} is {factor} faster"
    if order != _faster(sides):
        return f"{text}: the estimate has it the other way round and does not explain it."
    return f"{text}."


def _replayed_sentence(sides: Sequence[Explained]) -> str:
    """Says what the replays of both compiled programs differ in."""
    replays = [side.replay for side in sides]
    first, second = replays
    if first is None or second is None:
        return ""
    order = 0 if first.step_s <= second.step_s else 1
    fast, slow = (first, second) if order == 0 else (second, first)
    winner, loser = _names(sides)[order], _names(sides)[1 - order]
    if slow.step_s - fast.step_s < _TIE * fast.step_s:
        return "Replayed, they take the same time."
    known = dict(fast.causes)
    cause, slow_s = max(slow.causes, key=lambda one: one[1] - known.get(one[0], 0.0))
    text = (
        f"Replayed, {winner} is {format_factor(slow.step_s / fast.step_s)} faster: {loser} spends "
        f"most of the difference on {_cause(cause)} ({format_seconds(slow_s)} against "
        f"{format_seconds(known.get(cause, 0.0))})"
    )
    estimates = [side.estimated.step_s for side in sides]
    if estimates[1 - order] < estimates[order]:
        return f"{text}; the estimate has it the other way round and does not explain it."
    return f"{text}."


def _cause(cause: str) -> str:
    """Describes a cause of `Replayed.causes` in a sentence."""
    kind, _, axes = cause.partition(" ")
    match kind:
        case "ici":
            return f"waiting for collectives over {axes} inside a granule"
        case "dcn":
            return f"waiting for collectives over {axes} between granules"
        case "host":
            return "waiting for the host's memory"
        case "memory":
            return "device memory traffic"
        case _:
            return clean(cause)


def _because(sides: Sequence[Explained], verdict: WhyFaster, has_better: bool) -> str:
    """Says what the estimates show; `has_better` if stronger evidence was named before."""
    names = _names(sides)
    winner, loser = names[verdict.winner], names[1 - verdict.winner]
    if verdict.main_s <= 0:
        return "By the estimate, both take the same time for the same reasons."
    start = "By the estimate" if has_better else "Estimated"
    factor = format_factor(verdict.speedup)
    more = format_seconds(verdict.main_s)
    text = (
        f"{start}, {winner} is {factor} faster: {loser} spends {more} more on "
        f"{_subject(verdict.main)}"
    )
    piece = _piece(verdict.main, sides[1 - verdict.winner])
    if piece:
        text += f", above all in {piece}"
        if verdict.main.collective is not None and not verdict.winner_has_it:
            text += f", which {winner} does not have"
    if verdict.against is not None and verdict.against_s > 0.05 * verdict.main_s:
        less = format_seconds(verdict.against_s)
        text += f"; it saves {less} on {_subject(verdict.against)} in return"
    return f"{text}."


def _names(sides: Sequence[Explained]) -> tuple[str, str]:
    """Returns names of two plans: their meshes, with the settings in which these differ."""
    plans = [side.plan for side in sides]
    if plans[0].mesh == plans[1].mesh:
        return clean(str(plans[0])), clean(str(plans[1]))
    if plans[0].settings == plans[1].settings:
        return clean(plans[0].mesh), clean(plans[1].mesh)
    return clean(str(plans[0])), clean(str(plans[1]))


def _reason(share: Share, one: Explained) -> str:
    piece = _piece(share, one)
    match share.reason:
        case "compute":
            return f"compute, {_part(share)} in {piece}" if piece else "compute"
        case "repeated":
            along = "+".join(share.axes)
            return (
                f"compute that all {_repeats(share)} devices along {along} repeat, {_part(share)} "
                f"in {piece}: nothing that it reads is sharded over {along} "
                "(is a sharding constraint on the activations missing?)"
            )
        case "small":
            return f"lost because the shards are too small, {_part(share)} in {piece}"
        case "memory":
            return f"device memory traffic, {_part(share)} in {piece}" if piece else "device memory"
        case "latency":
            return (
                f"latency of many small pieces, {_part(share)} in {piece}" if piece else "latency"
            )
        case "ici" | "dcn" | "host":
            return f"{_subject(share)}, {_part(share)} in {piece}" if piece else _subject(share)
        case "bubble":
            return _subject(share)
        case "other":
            return "work of a kind that has no name here"


def _part(share: Share) -> str:
    """Returns `most of it`, or per cent: the share of the piece that is named next."""
    if 2 * share.piece_s >= share.seconds:
        return "most of it"
    return f"{format_percent(share.piece_s / share.seconds)} of that"


def _subject(share: Share) -> str:
    """Returns a noun for what the seconds are spent on."""
    axes = "+".join(share.axes)
    if axes == PIPELINE:
        wires = "ICI" if share.reason == "ici" else "DCN"
        return f"transfers between the stages of the pipeline ({wires})"
    match share.reason:
        case "repeated":
            return f"compute that all {_repeats(share)} devices along {axes} repeat"
        case "ici":
            return f"collectives over {axes} inside a granule (ICI)"
        case "dcn":
            return f"collectives over {axes} that cross the network between granules (DCN)"
        case reason:
            return _SUBJECTS[reason]


def _repeats(share: Share) -> int:
    return share.kernel.repeats if share.kernel else 1


def _piece(share: Share, one: Explained) -> str:
    if share.collective is not None:
        return _collective(share.collective)
    if share.copy is not None:
        return _copy(share)
    if share.kernel is None:
        return ""
    match share.reason:
        case "small":
            return _small(share.kernel)
        case "memory":
            moved = format_bytes(share.piece_bytes)
            total = format_bytes(one.cost.memory_traffic_bytes)
            if 2 * share.kernel.window_s > share.kernel.seconds:
                return (
                    f"{_at(share.kernel)}, a windowed einsum that reads or writes it piece by piece"
                )
            return f"{_at(share.kernel)} ({moved} of {total} read and written)"
        case "latency":
            return _overheads(share.kernel)
        case _:
            return _at(share.kernel)


def _collective(one: CollectiveCost) -> str:
    """Describes a collective: `the all-gather over fsdp at train.py:31 (64 runs of 128 MiB in the
    loop at train.py:28)`."""
    runs = f"{_runs(one.count)} of {format_bytes(one.device_bytes)}"
    inside = f" in the {clean(one.region)}" if one.in_loop else ""
    source = f" at {clean(one.source)}" if one.source else ""
    ring = "ring of permutes in place of the " if one.is_ring else ""
    return f"the {ring}{one.kind} over {'+'.join(one.axes)}{source} ({runs}{inside})"


def _copy(share: Share) -> str:
    """Describes a copy: `the copy to the host at train.py:31 (32 runs, 2.00 GiB)`."""
    copy = share.copy
    assert copy is not None
    way = "to" if copy.is_to_host else "from"
    source = f" at {clean(copy.source)}" if copy.source else ""
    runs = f"{_runs(copy.count)}, {format_bytes(share.piece_bytes)}"
    return f"the copy {way} the host{source} ({runs})"


def _small(kernel: KernelSum) -> str:
    batch, m, n, k = kernel.matmul
    times = f"{batch} times " if batch > 1 else ""
    speed = format_percent(kernel.ideal_s / kernel.matmul_s)
    cut = f", cut so small by {'+'.join(kernel.cut_axes)}" if kernel.cut_axes else ""
    sizes = f"{times}{m} x {k} by {k} x {n} on one device{cut}"
    return f"{_at(kernel)} ({sizes}), which runs at {speed} of full speed"


def _overheads(kernel: KernelSum) -> str:
    return f"starting {_at(kernel)} ({_runs(kernel.count)})"


def _at(kernel: KernelSum) -> str:
    name = clean(kernel.operation) or "work"
    what = "the " + _OPERATIONS.get(name, name)
    source = f" at {clean(kernel.source)}" if kernel.source else ""
    inside = f" in the {clean(kernel.region)}" if kernel.in_loop else ""
    return f"{what}{source}{inside}"


def _runs(number: float) -> str:
    whole = round(number)
    return count(whole, "run") if whole < 10_000 else f"{format_count(whole)} runs"
