"""Finds how a lowered program depends on its mesh, by lowering it at other sizes (jax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.sharding.laws import (
    Law,
    changed_axes,
    largest_in_reach,
    most_axes_first,
    steps_to_learn_from,
)
from automesh.sharding.lowerings import Lowering, Lowerings
from automesh.sharding.passes import PreparedModule
from automesh.sharding.size_dependence import Fit, Sample, note_fit

Sizes = tuple[tuple[str, int], ...]
# Most fits of one kind of program that a worker makes, each from another lowering.
_MOST_LAWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """The program at some sizes, ready for partitioning.

    Attributes:
      module: as `plain` returns it, or as `Prepared` if several sizes share it.
      sizes: of all axes, to partition it at.
      derived: True if it was derived from another lowering.
      fixed: active axes for which its numbers are valid at these sizes only.
      limits: active axes for which its numbers are valid up to a size only, with that size.
      others: the same program at those probes that were compared and do not differ.
      failed: probes at which the program differs, or cannot be lowered.
    """

    module: Any | PreparedModule
    sizes: Mapping[str, int]
    derived: bool = False
    fixed: frozenset[str] = frozenset()
    limits: tuple[tuple[str, int], ...] = ()
    others: tuple[SizedProgram, ...] = ()
    failed: tuple[Sizes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Laws:
    """The laws of all kinds of programs that one step has in a worker.

    Attributes:
      doubled: kinds for which a lowering contradicts a law that was learnt from the largest sizes.
    """

    doubled: set[str] = field(default_factory=set[str])
    _found: dict[str, list[Law]] = field(default_factory=dict[str, "list[Law]"])

    def of(self, kind: str) -> list[Law]:
        """Returns the list of laws of one kind of program, by its signature; it may be extended."""
        return self._found.setdefault(kind, [])

    def compared(self, kind: str, lowerings: Lowerings) -> int:
        """Counts the lowerings with two or more changed axes that a fit explains."""
        return sum(
            any(len(law.changed(one)) > 1 and law.explains(one) for law in self.of(kind))
            for one in lowerings.of(kind)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Finds the law of one lowering, and the sizes for which it holds.

    Attributes:
      lowering: of the step at some sizes.
      active: its axes larger than 1.
      largest: size of each axis up to which the program is wanted; for other axes the number of
        devices.
      axis_names: all axes, in order.
      lowerings: all lowerings, of this and of other workers.
      laws: laws that were found before; new ones are added.
      attempt: lowers the step at sizes of all axes; None if the user's code refuses them.
    """

    lowering: Lowering
    active: tuple[str, ...]
    largest: Mapping[str, int]
    axis_names: tuple[str, ...]
    lowerings: Lowerings
    laws: Laws
    attempt: Callable[[Mapping[str, int]], Lowering | None]

    def located(self, others: Mapping[Sizes, Lowering | None]) -> SizedProgram:
        """Returns the program, annotated with how its numbers depend on the axes.

        Args:
          others: the lowerings at the probes; None for those that are refused.
        """
        lowering, active = self.lowering, self.active
        kind = lowering.signature
        alike = [one for one in others.values() if one is not None and one.signature == kind]
        law = self._law(alike)
        if not law.explains(lowering):
            law = Law(fit=Fit(base=lowering.sample))
        fixed = {axis for axis in active if not law.fit.knows(axis)}
        agreeing: list[SizedProgram] = []
        failed: list[Sizes] = []
        for probe, other in others.items():
            if other is None or other.signature != kind or not law.explains(other):
                failed.append(probe)
                if other is not None:
                    fixed.update(axis for axis, size in probe if size != lowering.sizes[axis])
                continue
            if other.module is not None:
                note_fit(other.module, law.fit, fixed.add)
                agreeing.append(SizedProgram(module=other.module, sizes=other.sizes))
        varied = [axis for axis in active if axis not in fixed]
        limits = self._limits(law, varied)
        fixed.update(self._contradicted(law, varied, dict(limits)))
        note_fit(lowering.module, law.fit, fixed.add)
        return SizedProgram(
            module=lowering.module,
            sizes=lowering.sizes,
            fixed=frozenset(fixed & set(active)),
            limits=tuple((axis, most) for axis, most in limits if axis not in fixed),
            others=tuple(agreeing) if not fixed else (),
            failed=tuple(failed),
        )

    def _contradicted(self, law: Law, varied: Sequence[str], limits: Mapping[str, int]) -> set[str]:
        """Returns the axes along which some lowering contradicts the law.

        Only wanted sizes count: not below the law's own, and within its limits.
        """
        lowering, found = self.lowering, set[str]()
        for one in self.lowerings.of(lowering.signature):
            changed = changed_axes(lowering.sizes, one.sizes)
            is_wanted = all(
                axis in varied
                and lowering.sizes[axis] < one.sizes[axis]
                and one.sizes[axis] <= limits.get(axis, one.sizes[axis])
                and one.sizes[axis] <= self.largest.get(axis, one.sizes[axis])
                for axis in changed
            )
            if is_wanted and law.knows(one) and not law.explains(one):
                found.update(changed)
        return found

    def _law(self, probes: Sequence[Lowering]) -> Law:
        """Returns a law of this kind of program that explains a lowering; any, if none does.

        The first law starts from a base that all workers share; if it does not hold, another one
        starts from the lowering itself.

        Args:
          probes: lowerings of this kind that the law must explain.
        """
        lowering, kind = self.lowering, self.lowering.signature
        laws, doubled = self.laws.of(kind), self.laws.doubled
        while True:
            for law in laws:
                self._learn(law)
                tested = (*law.leaned_on, *(probes if law.explains(lowering) else ()))
                if kind not in doubled and not all(map(law.explains, tested)):
                    doubled.add(kind)
                    laws.clear()
                    break
                if law.explains(lowering):
                    return law
            else:
                if len(laws) == _MOST_LAWS:
                    return laws[0]
                base = lowering.sample if laws else self._base()
                laws.append(Law(fit=Fit(base=base)))

    def _base(self) -> Sample:
        """Returns the lowering from which the law of a kind of program starts.

        It is the smallest of those with most axes that any worker was asked for.
        """
        alike = self.lowerings.of(self.lowering.signature)
        asked = [one.sample for one in alike if one.is_asked]
        return min(asked, key=most_axes_first, default=self.lowering.sample)

    def _learn(self, law: Law) -> None:
        """Learns the effect of axes that are active, or have other sizes in the lowering.

        The effect of an axis is learnt from two sizes, and checked at a third one. If a lowering in
        between can be the third, the axis is learnt from its largest size, which need not be tried
        then. Otherwise, or if that size is refused, it is learnt from the double size, and
        `_limits` tries the largest.
        """
        kind, base = self.lowering.signature, law.fit.base.sizes
        concerned = {*self.active, *law.changed(self.lowering)}
        waiting = [
            axis
            for axis in self.axis_names
            if axis in concerned and not law.fit.knows(axis) and axis not in law.rigid
        ]
        learnable = {axis for axis in self.axis_names if law.fit.knows(axis) or axis in waiting}
        while waiting:
            alike = [
                one for one in self.lowerings.of(kind) if learnable.issuperset(law.changed(one))
            ]
            steps = {
                axis: steps_to_learn_from(law, axis, alike, self.active, self.largest)
                if kind not in self.laws.doubled
                else (2 * base[axis],)
                for axis in waiting
            }
            free = (
                axis
                for axis in waiting
                if not any(self.lowerings.is_claimed({**base, axis: size}) for size in steps[axis])
            )
            axis = next(free, waiting[0])  # Another worker is lowering the others.
            waiting.remove(axis)
            is_rigid = True
            for size in steps[axis]:
                sample = self.attempt({**base, axis: size})
                if sample is None:
                    # An error that may not occur again says nothing about the axis.
                    is_rigid &= self.lowerings.is_refused({**base, axis: size})
                elif sample.signature == kind:
                    law.fit.learn(axis, sample.sample)
                    law.held[axis] = size
                    if size > 2 * base[axis]:
                        law.leaned_on += [
                            one for one in alike if base[axis] < one.sizes[axis] < size
                        ]
                    break
            else:
                if is_rigid:
                    law.rigid.add(axis)

    def _limits(self, law: Law, varied: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Tries each axis at the largest size that is wanted and that the devices allow.

        A program may use the minimum of an axis size and a constant, which shows only at large
        sizes.
        """
        lowering, kind = self.lowering, self.lowering.signature
        explained = [one for one in self.lowerings.of(kind) if law.explains(one)]
        for axis in varied:
            shown = max((one.sizes[axis] for one in explained), default=0)
            known = max(law.held.get(axis, 0), 2 * law.fit.base.sizes[axis], shown)
            size = largest_in_reach(lowering.sizes, axis, self.largest)
            while size > known and axis not in law.limited:
                if size < law.refused.get(axis, size + 1):
                    other = self.attempt({**lowering.sizes, axis: size})
                    if other is None:
                        if self.lowerings.is_refused({**lowering.sizes, axis: size}):
                            law.refused[axis] = size
                    elif other.signature == kind and law.explains(other):
                        known = size
                    else:
                        law.limited[axis] = self._last_held(law, axis, size)
                size //= 2
            law.held[axis] = known
        return tuple((axis, law.limited[axis]) for axis in varied if axis in law.limited)

    def _last_held(self, law: Law, axis: str, size: int) -> int:
        """Finds the largest size of an axis below `size` at which the law holds, by halving."""
        lowering = self.lowering
        size //= 2
        while size > lowering.sizes[axis]:
            other = self.attempt({**lowering.sizes, axis: size})
            same = other is not None and other.signature == lowering.signature
            if other is not None and same and law.explains(other):
                break
            size //= 2
        return size
