"""Compiles lowered programs for absent devices, each only once (jax).

The compiled programs, and refusals for lack of memory, are kept in a store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import jax

from automesh.hardware.absent import AbsentDevices
from automesh.hlo.store import ModuleStore, Stored, key_of
from automesh.outcomes import Counts, Effort, Failed, Memory, OutOfMemory
from automesh.platforms import platform_named
from automesh.platforms.platform import Options
from automesh.program.absent.client import (
    check_compiled_for,
    compiler_input,
    devices_of,
    settings,
    usable_bytes,
    versions_for,
)
from automesh.program.kernels.annotate import kernel_costs
from automesh.program.lower.compiled import (
    compile_lowered,
    count_serialized,
    read_memory,
    serialized,
)
from automesh.program.lower.compiler_options import known
from automesh.program.lower.lowering import SETTLING_TRIES, SingleProgram, after_one_step
from automesh.program.notes import note
from automesh.program.refused import StepRefused
from automesh.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOrder:
    """The devices, options and store for the compile of a program.

    Attributes:
      one: the devices.
      options: compiler options of the plan.
      effort: the compiler's effort, low or default.
      store: keeps the outcome; None keeps nothing.
      plan: the plan as text.
      axes: names and sizes of its axes, in order.
      dcn: number of granules that each axis spans.
      began_s: when the job began, by `time.perf_counter`, without waits for other workers.
    """

    one: AbsentDevices
    options: Options
    effort: Effort
    store: ModuleStore | None
    plan: str
    axes: tuple[tuple[str, int], ...]
    dcn: tuple[int, ...]
    began_s: float

    def at_known_effort(self) -> CompileOrder:
        """Returns the order at default effort, if the compiler has no other."""
        return (
            self
            if platform_named(self.one.platform).low_effort_options
            else replace(self, effort="default")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObtainedModule:
    """A program that was compiled, or found in the store.

    Attributes:
      key: its key in the store; empty if it is not stored.
      module: serialized HLO module, scheduled.
      compile_s: seconds of its compile, which may have been in an earlier search.
      effort: its effort; `default` if the compiler has no other.
    """

    key: str
    module: bytes
    memory: Memory
    counts: Counts
    compile_s: float
    effort: Effort


def obtain(program: SingleProgram, order: CompileOrder, *, fingerprint: str) -> ObtainedModule:
    """Compiles a program, or finds the outcome of an earlier compile.

    Args:
      fingerprint: fingerprint of the program with its devices and the plan's compiler options.

    Raises:
      StepRefused: `OutOfMemory`; or `Failed` for an option that this compiler does not accept, or a
        store that cannot be written.
    """
    order = order.at_known_effort()
    key = _key(order, fingerprint, order.effort)
    stored = order.store.find(key) if order.store is not None else None
    if stored is not None:
        note(f"found in the store: {stored.label}, compiled in {stored.compile_s:.1f} s")
        return _module(stored, order, key)
    is_settled = _is_settled(order, fingerprint)
    try:
        stored = _compiled(program, order, is_settled)
    except StepRefused as refused:
        if isinstance(verdict := refused.outcome, OutOfMemory):
            if not verdict.limit_bytes:
                verdict = replace(verdict, limit_bytes=usable_bytes(order.one))
            _keep(order, key, _blank(order, verdict))
            raise StepRefused(verdict) from refused
        raise
    _keep(order, key, stored)
    return _module(stored, order, key)


def find_part(order: CompileOrder, *, fingerprint: str) -> ObtainedModule | None:
    """Finds one of the programs of a step that has several, if it is stored; see `keep_part`."""
    key = _key(order, fingerprint, order.effort)
    stored = order.store.find(key) if order.store is not None else None
    return _module(stored, order, key) if stored is not None else None


def keep_part(
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    order: CompileOrder,
    *,
    fingerprint: str,
) -> ObtainedModule:
    """Stores one of the programs of a step that has several.

    Args:
      lowered: the lowered program.
      order: the order; its `axes` and `dcn` are those of the devices that run the program.
      fingerprint: the fingerprint of this program.

    Raises:
      StepRefused: the program cannot be read, or the store cannot be written.
    """
    check_compiled_for(order.one, compiled)
    stored = _read(lowered, compiled, order)
    key = _key(order, fingerprint, order.effort)
    _keep(order, key, stored)
    return _module(stored, order, key)


def _key(order: CompileOrder, fingerprint: str, effort: Effort) -> str:
    platform = platform_named(order.one.platform)
    options = platform.low_effort_options if effort == "low" else ()
    return key_of(
        fingerprint=fingerprint,
        target=compiler_input(order.one),
        effort=(("effort", effort), *options, *platform.needed_options),
        versions=versions_for(order.one.platform),
        environment=settings(),
    )


def _module(stored: Stored, order: CompileOrder, key: str) -> ObtainedModule:
    if stored.out_of_memory is not None:
        raise StepRefused(stored.out_of_memory)
    assert stored.memory is not None
    return ObtainedModule(
        key=key if order.store is not None else "",
        module=stored.module,
        memory=_within_limit(stored.memory, order),
        # Counted again: it may have been compiled for a plan with other names of axes.
        counts=count_serialized(stored.module, order.axes, order.dcn),
        compile_s=stored.compile_s,
        effort=stored.effort,
    )


def _within_limit(memory: Memory, order: CompileOrder) -> Memory:
    """Returns the memory of a program that a TPU compiler has accepted, limited to what it accepts.

    For a program with temporaries on the host, the compiler states no peak of the device.
    `read_memory` then adds arrays that do not exist at the same time: 18.5 GiB for a program of
    which the compiler accepts at most 15.75 GiB (a test of this module has it).
    """
    if order.one.platform != "tpu" or memory.peak_bytes != memory.total_bytes:
        return memory
    return replace(memory, peak_bytes=min(memory.peak_bytes, usable_bytes(order.one)))


def _keep(order: CompileOrder, key: str, stored: Stored) -> None:
    if order.store is None:
        return
    try:
        order.store.keep(key, stored)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StepRefused(
            Failed(
                stage="start",
                reason=f"compiled programs cannot be kept in `{order.store.folder}`: "
                f"{reason.lower()}",
                hint="make room there, or name another folder in AUTOMESH_CACHE",
            )
        ) from error


def _blank(order: CompileOrder, verdict: OutOfMemory | None) -> Stored:
    """Returns the stored entry of a program that the compiler refused."""
    return Stored(
        module=b"",
        memory=None,
        counts=None,
        compile_s=perf_counter() - order.began_s,
        effort=order.effort,
        target=_in_words(order.one),
        label=order.plan,
        versions=versions_for(order.one.platform),
        out_of_memory=verdict,
    )


def _in_words(one: AbsentDevices) -> str:
    """Returns the devices as text: `tpu v5e:4x4*2`, `gpu h100 2x1x8`."""
    if one.platform == "gpu":
        return f"gpu {one.gpu} {one.topology}"
    return f"tpu {one.topology}" + (f"*{one.num_granules}" if one.num_granules > 1 else "")


def _compiled(program: SingleProgram, order: CompileOrder, is_settled: bool | None) -> Stored:
    compiled, settled_at_once, first = _settle(program, order, is_settled)
    stored = replace(_read(program.lowered, compiled, order), is_settled=settled_at_once)
    assert stored.memory is not None
    memory = stored.memory.after(first)
    return replace(stored, memory=memory, out_of_memory=_verdict(memory, order))


def _read(
    lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, order: CompileOrder
) -> Stored:
    memory = read_memory(compiled, platform=order.one.platform)
    module = serialized(compiled, kernel_costs(lowered))
    return replace(
        _blank(order, None),
        module=module,
        memory=memory,
        counts=count_serialized(module, order.axes, order.dcn),
    )


def _verdict(memory: Memory, order: CompileOrder) -> OutOfMemory | None:
    """Checks the memory limit for GPUs, whose compilers accept programs of any size."""
    limit = usable_bytes(order.one) if order.one.platform == "gpu" else 0
    if not limit or memory.peak_bytes <= limit:
        return None
    return OutOfMemory(
        stage="compile",
        needed_bytes=memory.peak_bytes,
        limit_bytes=limit,
        detail=f"the program takes {format_bytes(memory.peak_bytes)} of each device, "
        f"which has {format_bytes(limit)}",
    )


def _is_settled(order: CompileOrder, fingerprint: str) -> bool | None:
    """Whether the outputs of the program are laid out like its inputs, known from an earlier
    compile at low effort; None if there was none."""
    if order.store is None or order.effort == "low":
        return None
    before = order.store.find(_key(order, fingerprint, "low"))
    return None if before is None or before.out_of_memory is not None else before.is_settled


def _settle(
    program: SingleProgram, order: CompileOrder, is_settled: bool | None
) -> tuple[jax.stages.Compiled, bool, Memory | None]:
    """Compiles the program that a training loop settles to, once at the requested effort.

    If it may differ from the given program, a compile at low effort finds it.

    Returns:
      The executable; whether the given program was the settled one; if not, the memory of the given
      one, by a compile at low effort.
    """
    quick: Effort = "low" if platform_named(order.one.platform).low_effort_options else order.effort
    tried: Effort = quick if is_settled is False else order.effort
    compiled = _compile(program, order, tried)
    following = None if is_settled else after_one_step(program, compiled)
    settled_at_once = following is None
    first = None if settled_at_once else read_memory(compiled, platform=order.one.platform)
    for _ in range(SETTLING_TRIES):
        if following is None:
            break
        program, tried = following, quick
        compiled = _compile(program, order, tried)
        following = after_one_step(program, compiled)
    if tried != order.effort:
        compiled = _compile(program, order, order.effort)
    return compiled, settled_at_once, first


def all_options(order: CompileOrder, effort: Effort) -> Options:
    """Returns the compiler options of the plan, with those that absent devices need."""
    platform, device = platform_named(order.one.platform), devices_of(order.one)[0]
    low = known(platform.low_effort_options, device) if effort == "low" else ()
    # The plan's values override needed ones: somebody has chosen them.
    options = {**dict(known(platform.needed_options, device)), **dict(order.options), **dict(low)}
    return tuple(options.items())


def _compile(program: SingleProgram, order: CompileOrder, effort: Effort) -> jax.stages.Compiled:
    compiled = compile_lowered(program.lowered, all_options(order, effort))
    check_compiled_for(order.one, compiled)
    return compiled
