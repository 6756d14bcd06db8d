"""All that touches compiled executables: compiling, memory, the program in HLO (jax)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from automesh.errors import AutomeshError
from automesh.hlo import count, read_module
from automesh.mesh.axes import Scalar
from automesh.outcomes import Counts, Failed, Memory, OutOfMemory
from automesh.program.kernels.annotate import with_costs
from automesh.program.kernels.nouns import KernelCost
from automesh.program.lower import compilation_cache
from automesh.program.lower.memory_text import SIZE, needed_and_limit, size_bytes
from automesh.program.refused import StepRefused
from automesh.units import format_bytes

# Kernels whose blocks are larger than the memory on the chip: (needed, limit, which memory).
_ON_CHIP = (
    re.compile(
        rf"Used (?P<needed>{SIZE}) of (?P<limit>{SIZE}) (?P<space>vmem|smem|cmem)", re.DOTALL
    ),
    re.compile(
        rf"Allocation \(size=(?P<needed>{SIZE})\) would exceed memory \(size=(?P<limit>{SIZE})\)"
        r".*space=(?P<space>vmem|smem|cmem)"
    ),
)
# The limit of one kernel, in libtpu's error E1001, `CompileTimeScopedVmemOom`.
_SCOPED = re.compile(
    rf"memory space vmem.*?Scoped allocation with size (?P<needed>{SIZE}) and limit "
    rf"(?P<limit>{SIZE})",
    re.DOTALL,
)
_KERNEL = re.compile(r"while allocating on stack for %?([\w.\-]+)")
_SCOPED_OPTION = "xla_tpu_scoped_vmem_limit_kib"


def compile_lowered(
    lowered: jax.stages.Lowered, options: Sequence[tuple[str, Scalar]]
) -> jax.stages.Compiled:
    """Compiles with the plan's compiler options.

    Raises:
      StepRefused: `OutOfMemory`, or `Failed` for an option that this compiler does not take.
    """
    try:
        with compilation_cache.repaired():
            chosen: Any = dict(options) or None
            return lowered.compile(compiler_options=chosen)
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        raise _refusal(error, options) from error


def _refusal(error: Exception, options: Sequence[tuple[str, Scalar]]) -> Exception:
    text = str(error)
    if on_chip := _too_large_for_the_chip(text):
        return on_chip
    if is_out_of_memory(error):
        return StepRefused(out_of_memory(error, stage="compile"))
    if match := re.search(r"No such compile option: '([^']*)'", text):
        return StepRefused(
            Failed(stage="compile", reason=f"this compiler has no option `{match[1]}`")
        )
    if match := re.search(r"While setting option (\w+), (.*)", text):
        reason = f"the compiler option `{match[1]}` is wrong: {match[2].strip().rstrip('.')}"
        return StepRefused(Failed(stage="compile", reason=reason))
    if options and isinstance(error, (TypeError, ValueError)) and "option" in text.lower():
        reason = f"the compiler refuses the options {dict(options)}: {text.splitlines()[0]}"
        return StepRefused(Failed(stage="compile", reason=reason))
    return error


def _too_large_for_the_chip(text: str) -> StepRefused | None:
    """Returns the failure of a kernel that exceeds on-chip memory; None if the message is about
    something else.

    It does not mean that the device's memory is too small: smaller blocks help, another mesh may
    not.
    """
    if match := _SCOPED.search(text):
        return StepRefused(_beyond_its_scope(match, text))
    for pattern in _ON_CHIP:
        if match := pattern.search(text):
            needed, limit = (format_bytes(size) for size in _sizes_of(match))
            return StepRefused(
                Failed(
                    stage="compile",
                    reason=f"a kernel needs {needed} of {match['space']}, the memory on the chip, "
                    f"which has {limit}",
                    hint="make its blocks smaller",
                )
            )
    return None


def _beyond_its_scope(match: re.Match[str], text: str) -> Failed:
    """Returns the failure of a kernel whose blocks are larger than one kernel may have at a
    time."""
    needed, limit = _sizes_of(match)
    kernel = _KERNEL.search(text)
    enough_kib = math.ceil(needed / 2**20) * 2**10
    return Failed(
        stage="compile",
        reason=f"the kernel {f'`{kernel[1]}`' if kernel else 'of the step'} needs "
        f"{format_bytes(needed)} of vmem, of which one kernel may take {format_bytes(limit)}",
        hint=f"make its blocks smaller, or let it take more: --xla {_SCOPED_OPTION}={enough_kib}",
    )


def _sizes_of(match: re.Match[str]) -> tuple[int, int]:
    """Returns the bytes needed and available, from a match with these two groups."""
    needed, limit = (re.fullmatch(SIZE, match[part].rstrip(".")) for part in ("needed", "limit"))
    return (
        size_bytes(*needed.groups()) if needed else 0,
        size_bytes(*limit.groups()) if limit else 0,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether jax raised an exception because the compiler or the device has too little memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(error: BaseException, *, stage: str) -> OutOfMemory:
    """Reads the bytes needed and available from the message; 0 if it does not state them."""
    text = str(error)
    needed, limit = needed_and_limit(text)
    detail = text.strip().splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
    return OutOfMemory(stage=stage, needed_bytes=needed, limit_bytes=limit, detail=detail)


def output_shardings(compiled: jax.stages.Compiled) -> Any:
    """Returns the shardings of the step's outputs as a tree; None for unknown ones.

    jax 0.10 lists those of updated references after them, and then fails to build the tree.
    """
    try:
        return compiled.output_shardings
    except ValueError:
        flat = getattr(getattr(compiled, "_executable", None), "_out_shardings", None)
        structure = compiled.out_tree
        count = structure.num_leaves
        return structure.unflatten(list(flat)[:count] if flat else [None] * count)


def read_memory(compiled: jax.stages.Compiled, *, platform: str) -> Memory:
    """Reads the bytes on one device that the compiler states.

    Raises:
      StepRefused: the backend does not state memory.
    """
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise StepRefused(
            Failed(stage="compile", reason=f"the {platform} compiler does not state memory")
        )
    argument, output = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    alias, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    peak = int(getattr(stats, "peak_memory_in_bytes", 0) or 0)
    on_host = int(getattr(stats, "host_temp_size_in_bytes", 0) or 0)
    memory = Memory(
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temporary_bytes=temporary,
        peak_bytes=peak,
    )
    # The CPU compiler's peak does not contain temporaries, and that of a TPU also counts those on
    # the host (libtpu 0.0.50.1). Then the sum of the device's arrays, an upper limit, is used.
    if platform == "cpu" or peak == 0 or on_host:
        return replace(memory, peak_bytes=memory.total_bytes)
    # It counts arguments on the host, too.
    given = int(getattr(stats, "host_argument_size_in_bytes", 0) or 0)
    return replace(memory, peak_bytes=max(peak - given, argument)) if given else memory


def serialized(compiled: jax.stages.Compiled, costs: Mapping[str, KernelCost]) -> bytes:
    """Returns the compiled program as a serialized HLO module.

    Args:
      costs: costs from `kernel_costs` of the lowered program, which are added to the module.

    Raises:
      StepRefused: the executable holds no readable program, or not exactly one.
    """
    try:
        executable: Any = compiled.runtime_executable()
        modules: list[Any] = list(executable.hlo_modules())
        blobs: list[bytes] = [module.as_serialized_hlo_module_proto() for module in modules]
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        reason = f"the compiled program cannot be read: {str(error).splitlines()[0]}"
        raise StepRefused(Failed(stage="compile", reason=reason)) from error
    if len(blobs) != 1:
        what = "no program" if not blobs else f"{len(blobs)} programs"
        raise StepRefused(
            Failed(stage="compile", reason=f"the executable holds {what} instead of one")
        )
    return with_costs(blobs[0], costs)


def count_serialized(
    module: bytes, axes: Sequence[tuple[str, int]], dcn: Sequence[int] = ()
) -> Counts:
    """Counts the work of one device in one step.

    Args:
      axes: names and sizes of the mesh's axes, in order.
      dcn: number of granules that each axis spans; needed for several TPU slices.

    Raises:
      StepRefused: the program cannot be counted.
    """
    try:
        return count(read_module(module), axes, dcn)
    except (AutomeshError, ValueError) as error:
        reason = f"the compiled program cannot be counted: {str(error).splitlines()[0]}"
        raise StepRefused(Failed(stage="compile", reason=reason)) from error
