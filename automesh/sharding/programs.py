"""The lowered programs of one step at several axis sizes, and what they have in common (jax)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import jax

from automesh.mesh.axes import MeshAxis
from automesh.platforms import platform_named
from automesh.program.kernels.annotate import state_costs
from automesh.program.lower.lowering import lower
from automesh.program.notes import note
from automesh.program.script.build import Built
from automesh.sharding.lowerings import Lowering, Lowerings
from automesh.sharding.passes import Prepared, lowered_text, plain, prepared
from automesh.sharding.size_dependence import Fit, Sample, count_numbers, note_fit

Sizes = tuple[tuple[str, int], ...]
# jax's words for the platforms that programs are lowered for; `none` has no compiler of its own.


def lowered_for(platform: str) -> tuple[str, ...]:
    """`lowering_platforms` of jax; `none` is lowered as for CPUs."""
    return platform_named("cpu" if platform == "none" else platform).lowered_for


# Once so many lowerings differ in the sizes of their meshes alone, the others are derived. With
# other knobs fewer will do, one of them at other sizes of all axes.
ENOUGH = 4
ENOUGH_AGAIN = 2
# How many times the fit of one kind of program is compared with lowerings that it was not made of.
_COMPARED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The program at some sizes, ready to be partitioned.

    Attributes:
      module: as `plain` gives it, or prepared if several sizes share it.
      sizes: of all axes, to partition it at.
      derived: True if it was derived from another lowering.
      fixed: active axes for which its numbers hold at these sizes only.
      limits: active axes for which its numbers hold up to a size only, and that size.
      others: the same program at those of the probes that were looked at and do not differ.
      failed: probes at which the program is another one, or cannot be lowered.
    """

    module: Any | Prepared
    sizes: Mapping[str, int]
    derived: bool = False
    fixed: frozenset[str] = frozenset()
    limits: tuple[tuple[str, int], ...] = ()
    others: tuple[Located, ...] = ()
    failed: tuple[Sizes, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Reach:
    """How far the fit of one kind of program was tried, per axis.

    Attributes:
      held: largest size at which it held.
      limited: where it did not hold at a larger one.
      refused: smallest size that the user's code refuses.
    """

    held: dict[str, int] = field(default_factory=dict[str, int])
    limited: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True, kw_only=True)
class Programs:
    """One step at one choice of knobs; a worker keeps it between jobs.

    Attributes:
      build: the step on a mesh of these axes.
      axis_names: all axes, in order.
      platform: whose programs are wanted: cpu, gpu, tpu, none.
      seen: for how many meshes a program was lowered elsewhere, by `text_of`.
      lowerings: all that were made, here and in other workers.
      lower_s: seconds spent in building and lowering so far.
      lowered: how many programs were lowered here so far.
      verified: how many sets of active axes were partitioned at a second size.
    """

    build: Callable[[Sequence[MeshAxis]], Built]
    axis_names: tuple[str, ...]
    platform: str
    seen: Mapping[str, int] = field(default_factory=dict[str, int])
    lowerings: Lowerings = field(default_factory=Lowerings)
    lower_s: float = 0.0
    lowered: int = 0
    verified: int = 0
    _first: Lowering | None = None
    _ready: Prepared | None = None
    _fits: dict[str, Fit] = field(default_factory=dict[str, Fit])
    _rigid: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    # Kinds of programs whose fit starts from a lowering made here, not from the first of all.
    _rebased: dict[str, Sample] = field(default_factory=dict[str, Sample])
    # Kinds of programs whose largest sizes told something that a probe in between contradicts.
    _doubled: set[str] = field(default_factory=set[str])
    _reaches: dict[str, _Reach] = field(default_factory=dict[str, "_Reach"])

    @property
    def varies(self) -> bool:
        """Whether lowerings differed in more than the sizes of the mesh."""
        return len({one.text for one in self.lowerings}) > 1

    @property
    def witnesses(self) -> int:
        """Meshes for which the first program was lowered, here or elsewhere."""
        elsewhere = self.seen.get(self._first.text, 0) if self._first is not None else 0
        # Of one other mesh it may be the program by chance; of one program among several, too.
        return len(self.lowerings) + (elsewhere if len(self.seen) == 1 else 0)

    @property
    def _is_alike(self) -> bool:
        """Whether the program is the same on all meshes, as far as anybody needs to know."""
        enough = ENOUGH_AGAIN if self.lowerings.is_alike_elsewhere else ENOUGH
        return not self.varies and self.witnesses >= enough

    def at(
        self,
        sizes: Mapping[str, int],
        probes: Sequence[Sizes],
        enter: Callable[[str], None],
        *,
        exact: bool = False,
        largest: Mapping[str, int] | None = None,
    ) -> Located:
        """The program at `sizes`, with notes of how its numbers depend on the axes.

        Args:
          sizes: of the active axes.
          probes: other sizes of the same axes; without any, nothing is claimed about other sizes.
          enter: told what comes next: build, lower.
          exact: lower at `sizes` in any case.
          largest: size of each axis up to which the program is wanted; of others, and without it,
            as many devices as there are.

        Raises:
          Exception: whatever the user's code raises at `sizes`.
        """
        if self._first is None or not self._is_alike:
            self.lowerings.share()
        if self._first is not None and self._is_alike and not exact:
            if self._ready is None:
                self._ready = prepared(self._first.module, is_plain=True)
            return Located(module=self._ready, sizes=self._whole(sizes), derived=True)
        lowering = self._lower(sizes, enter, is_asked=True)
        if not probes:
            unknown = self.varies or len(self.lowerings) == 1
            return Located(
                module=lowering.module,
                sizes=lowering.sizes,
                fixed=frozenset(sizes) if unknown else frozenset(),
            )
        others: dict[Sizes, Lowering | None] = {}
        for probe in probes:
            if self._is_open(lowering):
                others[probe] = self._try(dict(probe), enter)
                if others[probe] is None:
                    text = ",".join(f"{name}:{size}" for name, size in probe)
                    note(f"`{text}` cannot be lowered; meshes like it are propagated on their own")
        if len(self.lowerings) == 1:
            self._double_any(lowering, tuple(sizes), enter)
        if self.varies:
            return self._fitted(lowering, tuple(sizes), others, enter, largest or {})
        # Nothing but this one could be lowered: nothing is known about other sizes.
        alone = frozenset(sizes) if len(self.lowerings) == 1 else frozenset[str]()
        return Located(
            module=lowering.module,
            sizes=lowering.sizes,
            fixed=alone,
            others=tuple(
                Located(module=other.module, sizes=other.sizes)
                for other in others.values()
                if other is not None and other.module is not None
            ),
            failed=tuple(probe for probe, other in others.items() if other is None),
        )

    def _is_open(self, lowering: Lowering) -> bool:
        """Whether another lowering would tell something."""
        if self.varies:
            return self._compared(lowering.signature) < _COMPARED
        # One more in any case: what others have seen says nothing about Shardy's answer.
        return len(self.lowerings) < 2 or not self._is_alike

    def _compared(self, kind: str) -> int:
        """How many lowerings a fit explains that it was not made of: two axes changed, or more."""
        fit = self._fits.get(kind)
        if fit is None:
            return 0
        return sum(
            len(_changed(fit, one)) > 1 and _explains(fit, one) for one in self.lowerings.of(kind)
        )

    def _whole(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: sizes.get(name, 1) for name in self.axis_names}

    def _lower(
        self, sizes: Mapping[str, int], enter: Callable[[str], None], *, is_asked: bool = False
    ) -> Lowering:
        begun = perf_counter()
        whole = self._whole(sizes)
        enter("build")
        built = self.build([MeshAxis(name=name, ici=size) for name, size in whole.items()])
        enter("lower")
        program = lower(built, platforms=lowered_for(self.platform))
        module = plain(program.lowered.compiler_ir("stablehlo"))
        state_costs(module)
        counted = count_numbers(module)
        lowering = Lowering(
            module=module,
            text=text_of(module),
            signature=counted.signature,
            sample=Sample(sizes=whole, numbers=counted.numbers, elements=counted.elements),
            is_asked=is_asked,
        )
        self.lowered += 1
        self.lower_s += perf_counter() - begun
        if self._first is None:
            self._first = lowering
        self.lowerings.add(lowering)
        if self.varies:
            self.lowerings.settle("varied")
        elif self._is_alike:
            self.lowerings.settle("alike")
        return lowering

    def _try(self, sizes: Mapping[str, int], enter: Callable[[str], None]) -> Lowering | None:
        """The step at other sizes than those asked for; None if the user's code refuses them."""
        whole = self._whole(sizes)
        if self.lowerings.find(whole) is None:
            self.lowerings.share(claim=whole)
        if (known := self.lowerings.find(whole)) is not None:
            return known
        if self.lowerings.is_refused(whole):
            return None
        try:
            return self._lower(sizes, enter)
        # The user's code may refuse sizes for any reason; they then have no terms.
        except Exception:  # noqa: BLE001
            self.lowerings.refuse(whole)
            return None

    def _double_any(
        self, lowering: Lowering, active: Sequence[str], enter: Callable[[str], None]
    ) -> None:
        for axis in active:
            if self._try({**lowering.sizes, axis: lowering.sizes[axis] * 2}, enter):
                return

    def _fitted(
        self,
        lowering: Lowering,
        active: Sequence[str],
        others: Mapping[Sizes, Lowering | None],
        enter: Callable[[str], None],
        largest: Mapping[str, int],
    ) -> Located:
        kind = lowering.signature
        fit = self._fit(lowering, active, enter, largest)
        if kind not in self._doubled and self._is_contradicted(fit, kind):
            self._doubled.add(kind)
            self._forget(kind)
            fit = self._fit(lowering, active, enter, largest)
        if not _explains(fit, lowering) and self._is_foreign(fit, kind):
            self._forget(kind)
            self._rebased[kind] = lowering.sample
            fit = self._fit(lowering, active, enter, largest)
        fixed = {axis for axis in active if axis in self._rigid[kind]}
        if not _explains(fit, lowering):
            fit = Fit(base=lowering.sample)
            fixed.update(active)
        agreeing: list[Located] = []
        failed: list[Sizes] = []
        for probe, other in others.items():
            if other is None or other.signature != kind or not _explains(fit, other):
                failed.append(probe)
                if other is not None:
                    fixed.update(axis for axis, size in probe if size != lowering.sizes[axis])
                continue
            if other.module is not None:
                note_fit(other.module, fit, fixed.add)
                agreeing.append(Located(module=other.module, sizes=other.sizes))
        varied = [axis for axis in active if axis not in fixed]
        limits = self._limits(lowering, fit, varied, enter, largest)
        note_fit(lowering.module, fit, fixed.add)
        return Located(
            module=lowering.module,
            sizes=lowering.sizes,
            fixed=frozenset(fixed & set(active)),
            limits=limits,
            others=tuple(agreeing) if not fixed else (),
            failed=tuple(failed),
        )

    def _is_contradicted(self, fit: Fit, kind: str) -> bool:
        """Whether a lowering of this kind has other numbers than its fit expects there."""
        return any(
            all(map(fit.knows, _changed(fit, one))) and not fit.holds(one.sample)
            for one in self.lowerings.of(kind)
        )

    def _is_foreign(self, fit: Fit, kind: str) -> bool:
        """Whether a fit starts from a lowering of another worker: this one may start elsewhere."""
        base = self.lowerings.find(fit.base.sizes)
        return kind not in self._rebased and base is not None and not base.is_mine

    def _forget(self, kind: str) -> None:
        for known in (self._fits, self._rigid, self._reaches):
            known.pop(kind, None)

    def _base(self, lowering: Lowering) -> Sample:
        """What the fit of a kind of program starts from: of those asked for, here or elsewhere, the
        one with most axes, and the smallest of these."""
        kind = lowering.signature
        asked = [one.sample for one in self.lowerings.of(kind) if one.is_asked]
        return self._rebased.get(kind) or min(asked, key=_telling, default=lowering.sample)

    def _fit(
        self,
        lowering: Lowering,
        active: Sequence[str],
        enter: Callable[[str], None],
        largest: Mapping[str, int],
    ) -> Fit:
        """The fit of this kind of program; notes the axes at whose other sizes it is of another.

        What one axis does is learnt from two sizes of it, and a third one is looked at. Where a
        lowering in between is that third one, the axis is learnt from its largest size, which need
        not be tried then. Elsewhere, or where that size is refused, it is learnt from the double,
        and `_limits` tries the largest.

        Args:
          largest: see `at`.
        """
        kind = lowering.signature
        fit = self._fits.setdefault(kind, Fit(base=self._base(lowering)))
        rigid = self._rigid.setdefault(kind, set())
        reach = self._reaches.setdefault(kind, _Reach())
        base = fit.base.sizes
        changed = _changed(fit, lowering)
        waiting = [
            axis
            for axis in self.axis_names
            if (axis in active or axis in changed) and not fit.knows(axis) and axis not in rigid
        ]
        while waiting:
            sizes = {axis: self._steps(kind, base, axis, active, largest) for axis in waiting}
            free = (
                axis
                for axis in waiting
                if not any(self.lowerings.is_claimed({**base, axis: size}) for size in sizes[axis])
            )
            axis = next(free, waiting[0])  # Another worker is about to tell of the others.
            waiting.remove(axis)
            for size in sizes[axis]:
                sample = self._try({**base, axis: size}, enter)
                if sample is not None and sample.signature == kind:
                    fit.learn(axis, sample.sample)
                    reach.held[axis] = size
                    break
            else:
                rigid.add(axis)
        return fit

    def _steps(
        self,
        kind: str,
        base: Mapping[str, int],
        axis: str,
        active: Sequence[str],
        largest: Mapping[str, int],
    ) -> tuple[int, ...]:
        """Sizes of an axis from which its fit may be learnt, the first to be tried first."""
        double = 2 * base[axis]
        if kind in self._doubled:
            return (double,)
        alike = self.lowerings.of(kind)
        more = [one.sizes for one in alike if one.sizes[axis] > base[axis]]
        known = [sizes[axis] for sizes in more if _differ(base, sizes) == [axis]]
        top = _top(base, axis, largest) if axis in active else double
        most = max(known, default=top)
        is_between = any(sizes[axis] < most for sizes in more)
        return (most, double) if is_between and most > double else (double,)

    def _limits(
        self,
        lowering: Lowering,
        fit: Fit,
        active: Sequence[str],
        enter: Callable[[str], None],
        largest: Mapping[str, int],
    ) -> tuple[tuple[str, int], ...]:
        """Tries each axis at the largest size that is wanted and that the devices allow: a program
        may have a `min` of something and a size in it, which shows only there."""
        reach = self._reaches.setdefault(lowering.signature, _Reach())
        explained = [one for one in self.lowerings.of(lowering.signature) if _explains(fit, one)]
        for axis in active:
            shown = max((one.sizes[axis] for one in explained), default=0)
            known = max(reach.held.get(axis, 0), 2 * fit.base.sizes[axis], shown)
            size = _top(lowering.sizes, axis, largest)
            while size > known and axis not in reach.limited:
                if size < reach.refused.get(axis, size + 1):
                    other = self._try({**lowering.sizes, axis: size}, enter)
                    if other is None:
                        reach.refused[axis] = size
                    elif other.signature == lowering.signature and _explains(fit, other):
                        known = size
                    else:
                        reach.limited[axis] = self._last_held(lowering, fit, axis, size, enter)
                size //= 2
            reach.held[axis] = known
        return tuple((axis, reach.limited[axis]) for axis in active if axis in reach.limited)

    def _last_held(
        self, lowering: Lowering, fit: Fit, axis: str, size: int, enter: Callable[[str], None]
    ) -> int:
        """The largest size of an axis below `size` at which the fit holds, by halving."""
        size //= 2
        while size > lowering.sizes[axis]:
            other = self._try({**lowering.sizes, axis: size}, enter)
            same = other is not None and other.signature == lowering.signature
            if other is not None and same and _explains(fit, other):
                break
            size //= 2
        return size


def _top(sizes: Mapping[str, int], axis: str, largest: Mapping[str, int]) -> int:
    """The largest size of an axis that is wanted and for which there are devices, at these sizes of
    the others."""
    room = len(jax.devices()) // math.prod(sizes.values())
    most = sizes[axis] * 2 ** (max(1, room).bit_length() - 1)
    return min(most, largest.get(axis, most))


def text_of(module: Any) -> str:
    """A hash of a program without the sizes of its mesh."""
    return hashlib.sha256(lowered_text(module).encode()).hexdigest()


def _explains(fit: Fit, lowering: Lowering) -> bool:
    """Whether a fit has the numbers of a lowering."""
    return all(map(fit.knows, _changed(fit, lowering))) and fit.holds(lowering.sample)


def _telling(sample: Sample) -> tuple[object, ...]:
    """What tells more comes first: more axes, then smaller ones, whose multiples are in reach."""
    sizes = [size for _, size in sorted(sample.sizes.items())]
    return -sum(size > 1 for size in sizes), math.prod(sizes), sizes


def _changed(fit: Fit, lowering: Lowering) -> list[str]:
    """Axes whose sizes differ from those that a fit starts from."""
    return _differ(fit.base.sizes, lowering.sizes)


def _differ(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    return [axis for axis, size in other.items() if size != one[axis]]
