"""What the compiler's refusals become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from automesh.outcomes import Failed, OutOfMemory
from automesh.program.lower.compiled import compile_lowered, read_memory
from automesh.program.refused import StepRefused

SCOPED = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem "
    "while allocating on stack for %flash_attention.1 = bf16[1,16,25344,80]{3,2,1,0:T(8,128)(2,1)} "
    "custom-call(bf16[1,16,25344,80] %copy.4). Scoped allocation with size 37.22M and limit 32.00M "
    "exceeded scoped vmem limit by 5.22M."
)
ON_CHIP = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. "
    "Used 32.42M of 16.00M vmem. Exceeded vmem capacity by 16.42M."
)
HBM = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G."
)


def refusal(text: str) -> Any:
    def refuse(**_: object) -> None:
        raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(StepRefused) as caught:
        compile_lowered(SimpleNamespace(compile=refuse), ())  # pyright: ignore
    return caught.value.outcome


def test_blocks_of_a_kernel_that_are_too_large_are_no_want_of_the_devices_memory() -> None:
    """Before, the first was told as a device that is out of memory."""
    assert refusal(SCOPED) == Failed(
        stage="compile",
        reason="the kernel `flash_attention.1` needs 37.2 MiB of vmem, of which one kernel may "
        "take 32.0 MiB",
        hint="make its blocks smaller, or let it take more: "
        "--xla xla_tpu_scoped_vmem_limit_kib=38912",
    )
    assert refusal(ON_CHIP) == Failed(
        stage="compile",
        reason="a kernel needs 32.4 MiB of vmem, the memory on the chip, which has 16.0 MiB",
        hint="make its blocks smaller",
    )


def test_what_the_device_has_not_is_out_of_memory() -> None:
    found = refusal(HBM)
    assert isinstance(found, OutOfMemory)
    assert (found.needed_bytes, found.limit_bytes) == (
        int(21.95 * 2**30),
        int(15.48 * 2**30),
    )


def test_arguments_on_the_host_are_none_of_the_devices() -> None:
    """As libtpu 0.0.52 says it of two moments on the host, 32 MiB each, and 16 on the device."""
    stats = SimpleNamespace(
        argument_size_in_bytes=16,
        output_size_in_bytes=16,
        alias_size_in_bytes=16,
        temp_size_in_bytes=64,
        host_temp_size_in_bytes=0,
        host_argument_size_in_bytes=32,
        peak_memory_in_bytes=123,
    )
    compiled: Any = SimpleNamespace(memory_analysis=lambda: stats)
    assert read_memory(compiled, platform="tpu").peak_bytes == 123 - 32


@pytest.mark.parametrize(("on_host", "peak"), [(0, 30), (45, 10 + 9 - 8 + 22)])
def test_temporaries_on_the_host_are_none_of_the_devices(on_host: int, peak: int) -> None:
    """The peak that libtpu states has both: 10 of arguments and 45 on the host are not 55."""
    stats = SimpleNamespace(
        argument_size_in_bytes=10,
        output_size_in_bytes=9,
        alias_size_in_bytes=8,
        temp_size_in_bytes=22,
        host_temp_size_in_bytes=on_host,
        peak_memory_in_bytes=55 if on_host else 30,
    )
    compiled: Any = SimpleNamespace(memory_analysis=lambda: stats)
    assert read_memory(compiled, platform="tpu").peak_bytes == peak
