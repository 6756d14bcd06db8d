"""An explanation in sentences: pure functions from the nouns of `cost.comparison` to words."""

from __future__ import annotations

from collections.abc import Sequence

from automesh.cost.breakdown import CollectiveCost, KernelCost
from automesh.cost.comparison import Share, Verdict, judge, shares_of
from automesh.outcomes import Measured
from automesh.results.explanation import Explained, Explanation
from automesh.results.words import clean, count
from automesh.units import (
    format_bytes,
    format_count,
    format_factor,
    format_percent,
    format_seconds,
)

_OPERATIONS = {"dot_general": "multiplication", "fusion": "elementwise work"}


def why_sentence(one: Explained) -> str:
    """Where most of the step goes: the cause, its axes and its source line."""
    shares = shares_of(one.cost, one.estimated)
    if not shares or one.estimated.step_s <= 0:
        return "nothing in this step has a price"
    first = shares[0]
    part = format_percent(first.seconds / one.estimated.step_s)
    return f"{part} of the step is {_reason(first, one)}"


def verdict_sentence(explanation: Explanation) -> str:
    """Which of two meshes is faster by the best evidence for both, and what makes it so."""
    one, against = explanation.one, explanation.against
    if against is None:
        return ""
    sides = (one, against)
    measured = _measured_pair(one, against)
    winner = _faster(sides)
    verdict = judge((one.cost, against.cost), (one.estimated, against.estimated), winner=winner)
    said = _measured_sentence(sides, measured) if measured else ""
    return " ".join(part for part in (said, _because(sides, verdict, bool(measured))) if part)


def _faster(sides: Sequence[Explained]) -> int:
    return 0 if sides[0].estimated.step_s <= sides[1].estimated.step_s else 1


def _measured_pair(one: Explained, other: Explained) -> tuple[Measured, Measured] | None:
    if one.measured is None or other.measured is None:
        return None
    return one.measured, other.measured


def _measured_sentence(sides: Sequence[Explained], measured: tuple[Measured, Measured]) -> str:
    """What the clock says; and, where the estimate says otherwise, that it does not explain it."""
    order = 0 if measured[0].step_s <= measured[1].step_s else 1
    fast, slow = measured[order], measured[1 - order]
    if fast.interval_s[1] >= slow.interval_s[0]:
        return "Measured, they are a tie."
    factor = format_factor(slow.step_s / fast.step_s)
    text = f"Measured, {_names(sides)[order]} is {factor} faster"
    if order != _faster(sides):
        return f"{text}: the estimate has it the other way round and does not explain it."
    return f"{text}."


def _because(sides: Sequence[Explained], verdict: Verdict, has_measured: bool) -> str:
    names = _names(sides)
    winner, loser = names[verdict.winner], names[1 - verdict.winner]
    if verdict.main_s <= 0:
        return "By the estimate, both take the same time for the same reasons."
    start = "By the estimate" if has_measured else "Estimated"
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
    """What to call two plans: their meshes, with the settings where these differ."""
    plans = [side.plan for side in sides]
    if plans[0].mesh == plans[1].mesh:
        return clean(str(plans[0])), clean(str(plans[1]))
    settings = [(plan.knobs, plan.compiler_options) for plan in plans]
    if settings[0] == settings[1]:
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
        case "ici" | "dcn":
            return f"{_subject(share)}, {_part(share)} in {piece}" if piece else _subject(share)
        case "other":
            return "work of a kind that has no name here"


def _part(share: Share) -> str:
    """How much of it the piece is that is named next."""
    if 2 * share.piece_s >= share.seconds:
        return "most of it"
    return f"{format_percent(share.piece_s / share.seconds)} of that"


def _subject(share: Share) -> str:
    """What seconds are spent on, as a noun."""
    axes = "+".join(share.axes)
    match share.reason:
        case "compute":
            return "compute"
        case "repeated":
            return f"compute that all {_repeats(share)} devices along {axes} repeat"
        case "small":
            return "multiplications that are too small to run at full speed"
        case "memory":
            return "device memory traffic"
        case "latency":
            return "latency"
        case "ici":
            return f"collectives over {axes} inside a granule (ICI)"
        case "dcn":
            return f"collectives over {axes} that cross the network between granules (DCN)"
        case "other":
            return "other work"


def _repeats(share: Share) -> int:
    return share.kernel.repeats if share.kernel else 1


def _piece(share: Share, one: Explained) -> str:
    if share.collective is not None:
        return _collective(share.collective)
    if share.kernel is None:
        return ""
    match share.reason:
        case "small":
            return _small(share.kernel)
        case "memory":
            moved = format_bytes(share.piece_bytes)
            total = format_bytes(one.cost.memory_traffic_bytes)
            return f"{_at(share.kernel)} ({moved} of {total} read and written)"
        case "latency":
            return _overheads(share.kernel)
        case _:
            return _at(share.kernel)


def _collective(one: CollectiveCost) -> str:
    """`the all-gather over fsdp at train.py:31 (64 runs of 128 MiB in the loop at train.py:28)`."""
    runs = f"{_runs(one.count)} of {format_bytes(one.payload_bytes)}"
    inside = f" in the {clean(one.region)}" if one.in_loop else ""
    source = f" at {clean(one.source)}" if one.source else ""
    return f"the {one.kind} over {'+'.join(one.axes)}{source} ({runs}{inside})"


def _small(kernel: KernelCost) -> str:
    batch, m, n, k = kernel.matmul
    times = f"{batch} times " if batch > 1 else ""
    speed = format_percent(kernel.ideal_s / kernel.matmul_s)
    cut = f", cut so small by {'+'.join(kernel.cut_axes)}" if kernel.cut_axes else ""
    sizes = f"{times}{m} x {k} by {k} x {n} on one device{cut}"
    return f"{_at(kernel)} ({sizes}), which runs at {speed} of full speed"


def _overheads(kernel: KernelCost) -> str:
    return f"starting {_at(kernel)} ({_runs(kernel.count)})"


def _at(kernel: KernelCost) -> str:
    name = clean(kernel.operation) or "work"
    what = "the " + _OPERATIONS.get(name, name)
    source = f" at {clean(kernel.source)}" if kernel.source else ""
    inside = f" in the {clean(kernel.region)}" if kernel.in_loop else ""
    return f"{what}{source}{inside}"


def _runs(number: float) -> str:
    whole = round(number)
    return count(whole, "run") if whole < 10_000 else f"{format_count(whole)} runs"
