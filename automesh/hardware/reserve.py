"""Memory of a device that no plan may use: one program is not the process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.units import format_bytes, format_percent, parse_bytes

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
# Beside the step live the batches that are on their way, metrics, and the code of other programs
# (initialization, evaluation); the runtime's own share is not in the compiler's limit anyway.
_TPU_BYTES = 256 * 2**20
# jax takes three quarters of a GPU's memory at its start and no more (its documentation, "GPU
# memory allocation"); a variable changes that. Of its two names jaxlib 0.10 calls the second one
# deprecated (jaxlib/xla_client.py).
_GPU_SHARE = 0.25
_GPU_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What is kept free of each device: a size, and a share of what a program could use."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, limit_bytes: int) -> int:
        """Bytes of a device on which a program could use `limit_bytes`."""
        return self.size_bytes + round(self.share * limit_bytes)

    def __str__(self) -> str:
        return format_percent(self.share) if self.share else format_bytes(self.size_bytes)


NO_RESERVE = Reserve()


def parse_reserve(text: str) -> Reserve:
    """Reads `1GiB`, `5%` or `0`.

    Raises:
      UsageError: neither a size nor a share of less than the whole.
    """
    stripped = text.strip()
    match = _PERCENT.fullmatch(stripped)
    if match and float(match[1]) < 100:
        return Reserve(share=float(match[1]) / 100)
    if match:
        raise UsageError(
            f"`{text}` leaves nothing of a device", hint="write for example `512MiB` or `5%`"
        )
    if stripped == "0":
        return NO_RESERVE
    try:
        return Reserve(size_bytes=parse_bytes(stripped))
    except UsageError as error:
        hint = "write for example `512MiB`, `5%`, or `0` for nothing"
        raise UsageError(error.message, hint=hint) from None


def default_reserve(platform: str, environ: Mapping[str, str]) -> Reserve:
    """What is kept free where nobody says.

    Args:
      platform: cpu, gpu or tpu.
      environ: may say which part of a GPU jax takes.

    Raises:
      UsageError: what it says is no part of a whole.
    """
    match platform:
        case "tpu":
            return Reserve(size_bytes=_TPU_BYTES)
        case "gpu":
            said = [(name, environ.get(name, "").strip()) for name in _GPU_VARIABLES]
            return Reserve(share=_gpu_share(next((one for one in said if one[1]), ("", ""))))
        case _:
            return NO_RESERVE


def _gpu_share(said: tuple[str, str]) -> float:
    """The part of a GPU that jax leaves alone, by the name and the value of a variable."""
    name, text = said
    if not text:
        return _GPU_SHARE
    try:
        taken = float(text)
    except ValueError:
        taken = -1.0
    if not 0 < taken <= 1:
        raise UsageError(
            f"`{name}` is `{text}`, which is no part of a GPU's memory",
            hint="set it to a number above 0 and up to 1, or unset it",
        )
    return 1 - taken
