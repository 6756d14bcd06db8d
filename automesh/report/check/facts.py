"""The few figures of a compiled step that a rule keeps, and how two sets of them compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from automesh.mesh.evidence import ProgramFacts
from automesh.outcomes import Compiled
from automesh.units import format_bytes, format_count, format_seconds

Drift = Literal["same", "changed", "regressed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """By how much a figure may be off before it counts, as a fraction.

    The defaults are wider than what a patch version of jax changes, and narrower than what costs a
    training run: a compiler packs temporaries a few per cent better or worse; its matrix products
    and the bytes that it sends are the program's, not its own.
    """

    memory: float = 0.05
    flops: float = 0.01
    collectives: float = 0.02
    time: float = 0.10


BOUNDS = Bounds()
_Form = Callable[[float], str]
# Of the peak memory: a donation that is lost costs memory even where activations take most of it.
_DONATION = 0.01
# Sums of single numbers, such as a loss, come and go with versions of the compiler.
_SMALL_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure, then and now.

    Attributes:
      what: memory, FLOPs, step time, or the kind and axes of a collective.
      then: in words; `-` if it was not there.
      ratio: now over then; 0 if either is not there.
      verdict: `changed` is a difference that is no loss: less memory, a collective that is gone.
    """

    what: str
    then: str
    now: str
    ratio: float
    verdict: Drift


def facts_of(compiled: Compiled) -> ProgramFacts:
    """Collects the figures of a compiled step."""
    sums: dict[str, tuple[int, int]] = {}
    for one in compiled.counts.collectives:
        name = f"{one.kind} {'+'.join(one.axes) or 'other groups'}"
        runs, size = sums.get(name, (0, 0))
        sums[name] = (runs + one.count, size + one.payload_bytes)
    memory = compiled.memory
    return ProgramFacts(
        fingerprint=compiled.fingerprint,
        flops=compiled.counts.flops,
        peak_bytes=memory.peak_bytes,
        # Of a pipeline, the worst device's memory says nothing of any single program.
        undonated_bytes=-1
        if compiled.pipeline is not None
        else max(memory.output_bytes - memory.alias_bytes, 0),
        step_s=compiled.step_s,
        collectives=tuple((name, runs, size) for name, (runs, size) in sorted(sums.items())),
    )


def compare(then: ProgramFacts, now: ProgramFacts, bounds: Bounds = BOUNDS) -> tuple[Change, ...]:
    """Compares every figure before and now; one that has grown beyond its bound is a regression.

    FLOPs count in both directions: a step that does less of them is another step, with another
    batch or another model, for which the rule was not found.
    """
    return (
        _figure("memory", then.peak_bytes, now.peak_bytes, bounds.memory, format_bytes),
        *_donation(then, now),
        _flops(then.flops, now.flops, bounds.flops),
        *_collectives(then, now, bounds.collectives),
        _figure("step time, predicted", then.step_s, now.step_s, bounds.time, format_seconds),
    )


def _figure(what: str, then: float, now: float, bound: float, form: _Form) -> Change:
    ratio = now / then if then and now else 0.0
    if now > then * (1 + bound):
        verdict: Drift = "regressed"
    else:
        verdict = "changed" if now < then * (1 - bound) else "same"
    return Change(what=what, then=form(then), now=form(now), ratio=ratio, verdict=verdict)


def _donation(then: ProgramFacts, now: ProgramFacts) -> Iterator[Change]:
    """Compares the bytes of outputs that reuse no donated argument; nothing if they are unknown for
    one of the steps."""
    old, new = then.undonated_bytes, now.undonated_bytes
    if min(old, new) < 0:
        return
    bound = max(_DONATION * then.peak_bytes, _SMALL_BYTES)
    verdict: Drift = "same" if abs(new - old) <= bound else "changed"
    yield Change(
        what="outputs beside donated memory",
        then=format_bytes(old),
        now=format_bytes(new),
        ratio=new / old if old and new else 0.0,
        verdict="regressed" if new - old > bound else verdict,
    )


def _flops(then: int, now: int, bound: float) -> Change:
    is_same = abs(now - then) <= bound * then
    return Change(
        what="FLOPs",
        then=format_count(then),
        now=format_count(now),
        ratio=now / then if then and now else 0.0,
        verdict="same" if is_same else "regressed",
    )


def _collectives(then: ProgramFacts, now: ProgramFacts, bound: float) -> Iterator[Change]:
    before = {name: (runs, size) for name, runs, size in then.collectives}
    after = {name: (runs, size) for name, runs, size in now.collectives}
    for name in dict.fromkeys([*before, *after]):
        was, (runs, size) = before.get(name), after.get(name, (0, 0))
        old = was[1] if was else 0
        if size > old * (1 + bound) and size - old >= _SMALL_BYTES:
            verdict: Drift = "regressed"
        elif size < old * (1 - bound) and old - size >= _SMALL_BYTES:
            verdict = "changed"
        else:
            verdict = "same"
        yield Change(
            what=name,
            then=_amount(*was) if was else "-",
            now=_amount(runs, size) if name in after else "-",
            ratio=size / old if old and size else 0.0,
            verdict=verdict,
        )


def _amount(runs: int, size: int) -> str:
    return f"{runs} x, {format_bytes(size)}"
