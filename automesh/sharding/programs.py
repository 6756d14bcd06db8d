"""The lowered programs of one step at several axis sizes, and what they share (jax)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import jax

from automesh.mesh.axes import MeshAxis
from automesh.platforms import platform_named
from automesh.program.kernels.annotate import state_costs
from automesh.program.lower.lowering import lower
from automesh.program.notes import note
from automesh.program.script.build import Built
from automesh.sharding.carry import note_carry
from automesh.sharding.fitting import Fitting, Laws, SizedProgram, Sizes
from automesh.sharding.lowerings import Lowering, Lowerings
from automesh.sharding.mlir.flat_meshes import on_one_mesh
from automesh.sharding.passes import PreparedModule, lowered_text, plain, prepared
from automesh.sharding.size_dependence import Sample, count_numbers, note_fit


def lowered_for(platform: str) -> tuple[str, ...]:
    """Returns jax's `lowering_platforms`; `none`, without a compiler, is lowered as for CPUs."""
    return platform_named("cpu" if platform == "none" else platform).lowered_for


# After so many lowerings that only differ in the sizes of their meshes, the others are derived.
ENOUGH = 4
# How often the fit of one kind of program is compared with lowerings that it was not made of.
_COMPARED = 2


@dataclass(slots=True, kw_only=True)
class Programs:
    """One step at one choice of knobs; a worker keeps it between jobs.

    Attributes:
      build: the step on a mesh of these axes.
      axis_names: all axes, in order.
      platform: whose programs are wanted: cpu, gpu, tpu, none.
      seen: number of meshes for which a program was lowered elsewhere, by `text_of`.
      lowerings: all lowerings, of this and of other workers.
      lower_s: seconds spent in building and lowering so far.
      lowered: number of programs that were lowered here so far.
      verified: number of sets of active axes that were partitioned at a second size.
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
    _ready: PreparedModule | None = None
    # Whether this worker has also lowered a probe of another worker: see `_with_other_probe`.
    _looked: bool = False
    _laws: Laws = field(default_factory=Laws)

    @property
    def varies(self) -> bool:
        """Whether lowerings differed in more than the sizes of the mesh."""
        return len({one.text for one in self.lowerings}) > 1

    @property
    def witnesses(self) -> int:
        """Counts the meshes for which the first program was lowered, here or elsewhere."""
        elsewhere = self.seen[self._first.text] if self._first is not None and self._is_seen else 0
        return len(self.lowerings) + elsewhere

    @property
    def _is_seen(self) -> bool:
        """Whether an inspection has lowered the first program and no other."""
        # One other mesh, or one program among several, may have the same program by chance.
        return self._first is not None and set(self.seen) == {self._first.text}

    def _is_alike(self, active: Iterable[str]) -> bool:
        """Whether the program is the same on all wanted meshes of these axes."""
        if self.varies:
            return False
        tried: dict[str, set[int]] = {}
        for lowering in self.lowerings:
            for axis, size in lowering.sizes.items():
                tried.setdefault(axis, set()).add(size)
        if self.witnesses >= ENOUGH:
            # An inspection has already tried all axes that the devices allow.
            return self._is_seen or all(len(tried[axis]) > 1 for axis in active)
        if not self.lowerings.is_alike_elsewhere:
            return False
        # An axis whose presence or size changes the program would have shown this with other knobs.
        used = {axis for axis, sizes in tried.items() if sizes != {1}} | {*active}
        return all(1 in tried[axis] and len(tried[axis]) > 2 for axis in used)

    def at(
        self,
        sizes: Mapping[str, int],
        probes: Sequence[Sizes],
        enter: Callable[[str], None],
        *,
        exact: bool = False,
        largest: Mapping[str, int] | None = None,
    ) -> SizedProgram:
        """Returns the program at `sizes`, annotated with how its numbers depend on the axes.

        Args:
          sizes: of the active axes.
          probes: other sizes of the same axes; without any, nothing is known about other sizes.
          enter: called with the next stage: build, lower.
          exact: lower at `sizes` in any case.
          largest: size of each axis up to which the program is wanted; the number of devices for
            other axes, and without it.

        Raises:
          Exception: whatever the user's code raises at `sizes`.
        """
        active = list(sizes)
        if self._first is None or not self._is_alike(active):
            self.lowerings.share()
        if self._first is not None and self._is_alike(active) and not exact:
            if self._ready is None:
                self._ready = prepared(self._first.module, is_plain=True, platform=self.platform)
            return SizedProgram(module=self._ready, sizes=self._whole(sizes), derived=True)
        lowering = self._lower(sizes, enter, is_asked=True)
        if not probes:
            unknown = self.varies or len(self.lowerings) == 1
            return SizedProgram(
                module=lowering.module,
                sizes=lowering.sizes,
                fixed=frozenset(sizes) if unknown else frozenset(),
            )
        for half in self._halves(dict(sizes), dict(probes[0])):
            if not self.varies and self._needs_lowering(lowering, active):
                self._try(half, enter)
        others: dict[Sizes, Lowering | None] = {}
        for probe in probes:
            if self._needs_lowering(lowering, active):
                others[probe] = self._try(dict(probe), enter)
                if others[probe] is None:
                    text = ",".join(f"{name}:{size}" for name, size in probe)
                    note(f"`{text}` cannot be lowered; meshes like it are propagated on their own")
        if len(self.lowerings) == 1:
            self._double_any(lowering, tuple(sizes), enter)
        if self.varies:
            fitting = Fitting(
                lowering=lowering,
                active=tuple(sizes),
                largest=largest or {},
                axis_names=self.axis_names,
                lowerings=self.lowerings,
                laws=self._laws,
                attempt=lambda other: self._try(other, enter),
            )
            located = fitting.located(others)
            return self._with_other_probe(located, lowering, probes[0], enter)
        failed = tuple(probe for probe, other in others.items() if other is None)
        good = [probe for probe in probes if probe not in failed]
        ready = prepared(lowering.module, is_plain=True, platform=self.platform)
        # Only this size could be lowered, so that nothing is known about others.
        is_alone = len(self.lowerings) == 1
        return SizedProgram(
            module=ready,
            sizes=lowering.sizes,
            fixed=frozenset(sizes) if is_alone else frozenset(),
            others=() if is_alone else tuple(self._at(ready, probe) for probe in good[:1]),
            failed=failed,
        )

    def _with_other_probe(
        self, located: SizedProgram, lowering: Lowering, probe: Sizes, enter: Callable[[str], None]
    ) -> SizedProgram:
        """Adds the program at a probe that another worker has lowered, once in each worker.

        The other worker's lowering says nothing about Shardy's result.
        """
        known = self.lowerings.find(self._whole(dict(probe)))
        is_alike = known is not None and known.signature == lowering.signature
        if self._looked or located.others or located.fixed or located.limits or not is_alike:
            return located
        self._looked = True
        other = self._try(dict(probe), enter, here=True)
        if other is None or other.module is None:
            return located
        for law in self._laws.of(lowering.signature):
            if law.explains(lowering) and law.explains(other):
                note_fit(other.module, law.fit, lambda _: None)
                return replace(
                    located, others=(SizedProgram(module=other.module, sizes=other.sizes),)
                )
        return located

    def _at(self, ready: PreparedModule, sizes: Sizes) -> SizedProgram:
        """Returns the same program at other sizes of its mesh."""
        return SizedProgram(module=ready, sizes=self._whole(dict(sizes)))

    def _halves(
        self, sizes: Mapping[str, int], probe: Mapping[str, int]
    ) -> Sequence[Mapping[str, int]]:
        """Returns two meshes that together have each axis at another size, and at 1.

        They show whether a step that is the same on all meshes with other knobs is so with these.
        """
        if not self.lowerings.is_alike_elsewhere:
            return ()
        axes = list(sizes)
        other = {
            axis: probe[axis] if probe[axis] != sizes[axis] else 2 * sizes[axis] for axis in axes
        }
        halves = ({axis: other[axis] for axis in half} for half in (axes[::2], axes[1::2]))
        return [half for half in halves if half]

    def _needs_lowering(self, lowering: Lowering, active: Sequence[str]) -> bool:
        """Whether another lowering would give information."""
        if self.varies:
            return self._laws.compared(lowering.signature, self.lowerings) < _COMPARED
        return len(self.lowerings) < 2 or not self._is_alike(active)

    def _whole(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: sizes.get(name, 1) for name in self.axis_names}

    def _lower(
        self, sizes: Mapping[str, int], enter: Callable[[str], None], *, is_asked: bool = False
    ) -> Lowering:
        return self._taken(self._made(sizes, enter, is_asked=is_asked))

    def _made(
        self, sizes: Mapping[str, int], enter: Callable[[str], None], *, is_asked: bool
    ) -> Lowering:
        begun = perf_counter()
        whole = self._whole(sizes)
        enter("build")
        built = self.build([MeshAxis(name=name, ici=size) for name, size in whole.items()])
        enter("lower")
        program = lower(built, platforms=lowered_for(self.platform))
        module = plain(program.lowered.compiler_ir("stablehlo"))
        module = on_one_mesh(module, self.axis_names)
        state_costs(module)
        counted = count_numbers(module)
        text = text_of(module)
        note_carry(module, program.carried_leaves)
        lowering = Lowering(
            module=module,
            text=text,
            signature=counted.signature,
            sample=Sample(sizes=whole, numbers=counted.numbers, elements=counted.elements),
            is_asked=is_asked,
        )
        self.lowered += 1
        self.lower_s += perf_counter() - begun
        return lowering

    def _taken(self, lowering: Lowering) -> Lowering:
        if self._first is None:
            self._first = lowering
        self.lowerings.add(lowering)
        if self.varies:
            self.lowerings.settle("varied")
        elif self.witnesses >= ENOUGH:  # Conclusions from fewer lowerings are no evidence.
            self.lowerings.settle("alike")
        return lowering

    def _try(
        self, sizes: Mapping[str, int], enter: Callable[[str], None], *, here: bool = False
    ) -> Lowering | None:
        """Lowers the step at other sizes; None if the user's code refuses them.

        Args:
          here: lower it, even if another worker has, as its program is needed.
        """
        whole = self._whole(sizes)
        if not here:
            if self.lowerings.find(whole) is None and not self.lowerings.is_refused(whole):
                self.lowerings.share(claim=whole)
            if (known := self.lowerings.find(whole)) is not None:
                return known
            if self.lowerings.is_refused(whole):
                return None
        try:
            lowering = self._made(sizes, enter, is_asked=False)
        except (MemoryError, jax.errors.JaxRuntimeError):
            return None  # It may succeed another time.
        # The user's code may refuse sizes for any reason; they then have no terms.
        except Exception:  # noqa: BLE001
            self.lowerings.refuse(whole)
            return None
        return self._taken(lowering)

    def _double_any(
        self, lowering: Lowering, active: Sequence[str], enter: Callable[[str], None]
    ) -> None:
        for axis in active:
            if self._try({**lowering.sizes, axis: lowering.sizes[axis] * 2}, enter):
                return


def text_of(module: Any) -> str:
    """Hashes a program without the sizes of its mesh."""
    return hashlib.sha256(lowered_text(module).encode()).hexdigest()
