"""Explains the time of a mesh, and why one mesh is faster than another (no jax).

The seconds of a step are first split by reason: causes as pricing knows them (compute, memory,
latency, ICI and DCN by axes), compute is further split into work that several devices repeat
(`repeated`), time that small shards lose (`small`), and the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automesh.cost.breakdown import CollectiveCost, HostCost, KernelSum, MeshCost
from automesh.outcomes import Estimated

Reason = Literal[
    "compute", "repeated", "small", "memory", "latency", "ici", "dcn", "host", "bubble", "other"
]
Change = Literal["appears", "vanishes", "grows", "shrinks", "same"]

# A collective whose seconds change by less than this part of the larger value is unchanged.
_SAME = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a step's time that has one reason.

    Attributes:
      axes: mesh axes of the collectives, or along which multiplications are repeated.
      seconds: of the estimated step, without time that other work hides.
      collective, kernel, copy: the most expensive piece of the source line that costs most for this
        reason.
      piece_s: seconds of all such pieces of that line.
      piece_bytes: bytes that they read and write in device memory, or that collectives or copies
        move.
    """

    reason: Reason
    axes: tuple[str, ...]
    seconds: float
    collective: CollectiveCost | None = None
    kernel: KernelSum | None = None
    copy: HostCost | None = None
    piece_s: float = 0.0
    piece_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """One cause of `Estimated.causes` on two meshes, in seconds."""

    cause: str
    first_s: float
    second_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """Collectives of one kind, axes, source line and place in the program on two meshes.

    Attributes:
      first, second: the most expensive one on each mesh; None if a mesh has none.
      first_s, second_s: seconds of all of them, as if nothing else ran.
    """

    change: Change
    first: CollectiveCost | None
    second: CollectiveCost | None
    first_s: float
    second_s: float

    @property
    def shown(self) -> CollectiveCost:
        """Returns the collective on the mesh where it costs more."""
        one = self.first if self.first_s >= self.second_s else self.second
        if one is None:
            raise ValueError("a change of a collective that neither mesh has")
        return one


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyFaster:
    """The reason why one of two meshes is estimated to be faster.

    Attributes:
      winner: 0 or 1; the faster one by the estimate.
      speedup: the loser's step time divided by the winner's.
      main: the reason with the largest extra cost for the loser, with the loser's pieces.
      main_s: that extra cost in seconds.
      winner_has_it: False if the piece that `main` shows does not exist on the winner.
      against_s, against: the largest saving that the loser has in return; 0 and None without one.
    """

    winner: int
    speedup: float
    main: Share
    main_s: float
    winner_has_it: bool
    against_s: float
    against: Share | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Seconds of one piece for one reason, as if nothing else ran.

    `exposed` is the part of them that no other work can hide.
    """

    cause: str
    reason: Reason
    axes: tuple[str, ...]
    seconds: float
    exposed: float = 1.0
    collective: CollectiveCost | None = None
    kernel: KernelSum | None = None
    copy: HostCost | None = None


def shares_of(cost: MeshCost, estimated: Estimated) -> tuple[Share, ...]:
    """Splits the estimated step by reason, the largest first; the seconds sum to the step's.

    The overlapped time is subtracted from the pieces that can hide, from all in proportion.
    """
    groups = _by_key(_exposed(cost, estimated)).values()
    shares = [_share(group, _most_grown(group, ())) for group in groups]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def _share(group: Sequence[_Piece], shown: _Piece) -> Share:
    alike = [part for part in group if _identity(part) == _identity(shown)]
    return Share(
        reason=shown.reason,
        axes=shown.axes,
        seconds=_total_s(group),
        collective=shown.collective,
        kernel=shown.kernel,
        copy=shown.copy,
        piece_s=_total_s(alike),
        piece_bytes=sum(map(_bytes, alike)),
    )


def _exposed(cost: MeshCost, estimated: Estimated) -> list[_Piece]:
    """Lists the pieces of a step, their seconds reduced to the estimate of their cause."""
    parts = [part for part in _parts(cost) if part.seconds > 0]
    exposed: list[_Piece] = []
    for cause, seconds in estimated.causes:
        mine = [part for part in parts if part.cause == cause]
        if not mine:
            reason, axes = _reason_of(cause), _axes_of(cause)
            exposed.append(_Piece(cause=cause, reason=reason, axes=axes, seconds=seconds))
            continue
        exposed += _cut_down(mine, seconds)
    return exposed


def _cut_down(parts: Sequence[_Piece], seconds: float) -> list[_Piece]:
    """Reduces pieces to a sum of `seconds`: first those that can hide, then the others."""
    firm = [part.exposed * part.seconds for part in parts]
    soft = [part.seconds - one for part, one in zip(parts, firm, strict=True)]
    firm_s, soft_s = sum(firm), sum(soft)
    if soft_s > 0 and seconds > firm_s:
        left, rest = 1.0, (seconds - firm_s) / soft_s
    else:
        left, rest = seconds / firm_s if firm_s > 0 else 0.0, 0.0
    return [
        replace(part, seconds=left * one + rest * other)
        for part, one, other in zip(parts, firm, soft, strict=True)
    ]


_PartKey = tuple[Reason, tuple[str, ...]]


def _by_key(parts: Iterable[_Piece]) -> dict[_PartKey, list[_Piece]]:
    groups: dict[_PartKey, list[_Piece]] = {}
    for part in parts:
        groups.setdefault((part.reason, part.axes), []).append(part)
    return groups


def _part_s(part: _Piece) -> float:
    return part.seconds


def _parts(cost: MeshCost) -> Iterable[_Piece]:
    for one in cost.collectives:
        axes = "+".join(one.axes)
        split: tuple[tuple[str, Reason, tuple[str, ...], float], ...] = (
            ("latency", "latency", (), one.latency_s),
            (f"ici {axes}", "ici", one.axes, one.ici_s),
            (f"dcn {axes}", "dcn", one.axes, one.dcn_s),
        )
        for cause, reason, over, seconds in split:
            yield _Piece(
                cause=cause,
                reason=reason,
                axes=over,
                seconds=seconds,
                exposed=one.exposed,
                collective=one,
            )
    for copy in cost.host:
        yield _Piece(
            cause="host", reason="host", axes=(), seconds=copy.seconds, exposed=0.0, copy=copy
        )
    for one in cost.kernels:
        yield _Piece(cause="latency", reason="latency", axes=(), seconds=one.overhead_s, kernel=one)
        traffic_s = one.ring_s + (one.memory_s if one.is_memory_bound else 0.0)
        yield _Piece(cause="memory", reason="memory", axes=(), seconds=traffic_s, kernel=one)
        if not one.is_memory_bound:
            yield from _compute_parts(one)


def _compute_parts(one: KernelSum) -> Iterable[_Piece]:
    """Splits compute into repeated work, time that small shards lose, and the rest."""
    repeated_s = one.matmul_s * (1 - 1 / one.repeats)
    own_s = one.matmul_s - repeated_s
    small_s = max(own_s - one.ideal_s / one.repeats, 0.0)
    split: tuple[tuple[Reason, tuple[str, ...], float], ...] = (
        ("repeated", one.repeated_axes, repeated_s),
        ("small", (), small_s),
        ("compute", (), own_s - small_s),
    )
    for reason, axes, seconds in split:
        yield _Piece(cause="compute", reason=reason, axes=axes, seconds=seconds, kernel=one)


def _reason_of(cause: str) -> Reason:
    match cause.split()[0]:
        case "compute" | "memory" | "latency" | "ici" | "dcn" | "host" | "bubble" as reason:
            return reason
        case _:
            return "other"


def _axes_of(cause: str) -> tuple[str, ...]:
    kind, _, axes = cause.partition(" ")
    return tuple(axes.split("+")) if kind in ("ici", "dcn") and axes else ()


def compare_causes(first: Estimated, second: Estimated) -> tuple[CauseChange, ...]:
    """Returns the causes of two meshes side by side, the largest difference first."""
    before, after = dict(first.causes), dict(second.causes)
    changes = [
        CauseChange(cause=cause, first_s=before.get(cause, 0.0), second_s=after.get(cause, 0.0))
        for cause in dict.fromkeys([*before, *after])
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.second_s - change.first_s)))


def compare_collectives(first: MeshCost, second: MeshCost) -> tuple[CollectiveChange, ...]:
    """Returns the collectives of two meshes matched by kind, axes, source line and place in the
    program."""
    groups = [_grouped(cost.collectives) for cost in (first, second)]
    changes = [
        _collective_change(groups[0].get(key, ()), groups[1].get(key, ()))
        for key in dict.fromkeys([*groups[0], *groups[1]])
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.second_s - change.first_s)))


_Key = tuple[str, tuple[str, ...], str, str]


def _grouped(costs: Iterable[CollectiveCost]) -> dict[_Key, tuple[CollectiveCost, ...]]:
    groups: dict[_Key, tuple[CollectiveCost, ...]] = {}
    for cost in costs:
        key = (cost.kind, cost.axes, cost.source, cost.region)
        groups[key] = (*groups.get(key, ()), cost)
    return groups


def _collective_change(
    first: Sequence[CollectiveCost], second: Sequence[CollectiveCost]
) -> CollectiveChange:
    def cost(one: CollectiveCost) -> float:
        return one.seconds

    first_s, second_s = sum(map(cost, first)), sum(map(cost, second))
    return CollectiveChange(
        change=_change(first_s, second_s, first=bool(first), second=bool(second)),
        first=max(first, key=cost, default=None),
        second=max(second, key=cost, default=None),
        first_s=first_s,
        second_s=second_s,
    )


def _change(first_s: float, second_s: float, *, first: bool, second: bool) -> Change:
    if not first:
        return "appears"
    if not second:
        return "vanishes"
    if abs(second_s - first_s) <= _SAME * max(first_s, second_s):
        return "same"
    return "grows" if second_s > first_s else "shrinks"


def judge(
    costs: tuple[MeshCost, MeshCost], estimates: tuple[Estimated, Estimated], *, winner: int
) -> WhyFaster:
    """Finds what makes one mesh faster than the other.

    Args:
      winner: 0 or 1: whose win is to be explained; normally the one with the smaller estimate.
    """
    loser = 1 - winner
    groups = [
        _by_key(_exposed(cost, estimate)) for cost, estimate in zip(costs, estimates, strict=True)
    ]
    differences = {
        key: _total_s(groups[loser].get(key, [])) - _total_s(groups[winner].get(key, []))
        for key in dict.fromkeys([*groups[loser], *groups[winner]])
    }
    key = max(groups[loser], key=lambda one: differences[one])
    back = min(groups[winner], key=lambda one: differences[one])
    mine, others = groups[loser][key], groups[winner].get(key, [])
    shown = _most_grown(mine, others)
    return WhyFaster(
        winner=winner,
        speedup=estimates[loser].step_s / estimates[winner].step_s,
        main=_share(mine, shown),
        main_s=differences[key],
        winner_has_it=_identity(shown) in {_identity(part) for part in others},
        against_s=max(-differences[back], 0.0),
        against=_share(groups[winner][back], _most_grown(groups[winner][back], ()))
        if differences[back] < 0
        else None,
    )


def _total_s(parts: Iterable[_Piece]) -> float:
    return sum(part.seconds for part in parts)


def _most_grown(parts: Sequence[_Piece], others: Iterable[_Piece]) -> _Piece:
    """Returns the most expensive piece of the source line that grows most against `others`."""
    grown: dict[object, float] = {}
    for part in parts:
        grown[_identity(part)] = grown.get(_identity(part), 0.0) + part.seconds
    for part in others:
        if _identity(part) in grown:
            grown[_identity(part)] -= part.seconds
    worst = max(grown, key=lambda identity: grown[identity])
    return max((part for part in parts if _identity(part) == worst), key=_part_s)


def _bytes(part: _Piece) -> float:
    if part.collective is not None:
        return part.collective.count * part.collective.device_bytes
    if part.copy is not None:
        return part.copy.count * part.copy.bytes
    return part.kernel.count * part.kernel.moved_bytes if part.kernel is not None else 0.0


def _identity(part: _Piece) -> object:
    one, kernel = part.collective, part.kernel
    if one is not None:
        return one.kind, one.axes, one.source, one.region
    if part.copy is not None:
        return part.copy.is_to_host, part.copy.source
    return (kernel.operation, kernel.source, kernel.region) if kernel else part.cause
