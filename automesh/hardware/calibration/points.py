"""The probes and points of a calibration: one probe is one piece of work, done on all devices at
once (no jax)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automesh.collectives import MeasuredName

StreamForm = Literal["copy", "map", "reduce", "transpose"]
STREAM_FORMS: tuple[StreamForm, ...] = ("copy", "map", "reduce", "transpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulProbe:
    """`[batch, m, k] x [batch, k, n]` on each device.

    Attributes:
      dtype: in XLA's words: bf16, f32.
    """

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    kind: Literal["matmul"] = "matmul"

    @property
    def flops(self) -> float:
        """Floating-point operations of one device."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.dtype} matmul {batch}{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProbe:
    """A kernel that reads one array and writes another of the same size, on each device.

    Attributes:
      form: `copy` adds a constant, `map` takes a sigmoid, `reduce` normalises rows, `transpose`
        turns a matrix.
      bytes: read and written together, by one device.
    """

    form: StreamForm
    bytes: int
    kind: Literal["stream"] = "stream"

    def __str__(self) -> str:
        return f"{self.form} {self.bytes} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProbe:
    """One kernel in a chain of nearly empty ones: measures what starting a kernel costs."""

    kind: Literal["kernel"] = "kernel"

    def __str__(self) -> str:
        return "tiny kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """One collective over groups of the devices, all groups at once.

    Attributes:
      group_size: devices of one group inside a granule.
      stride: mesh positions between neighbours in a group: 1 if the axis is the innermost one.
      payload_bytes: the full (gathered, unreduced) array of one group; for collective-permute what
        one device sends.
      link_s: the time of its bytes at the nominal speed of the links; not part of the probe's
        identity.
      granules: that a group spans; with more than one, its bytes cross DCN.
    """

    collective: MeasuredName
    group_size: int
    stride: int
    payload_bytes: int
    link_s: float = field(compare=False)
    granules: int = 1
    kind: Literal["collective"] = "collective"

    @property
    def num_devices(self) -> int:
        """Number of devices in one group."""
        return self.group_size * self.granules

    def __str__(self) -> str:
        where = "" if self.stride == 1 else f" (stride {self.stride})"
        group = group_words(self.group_size, self.granules)
        return f"{self.collective} over {group}{where} {self.payload_bytes} B"


def group_words(group_size: int, granules: int) -> str:
    """Describes a group of devices: `4`, `2 granules`, `4 in each of 2 granules`."""
    if granules == 1:
        return str(group_size)
    several = f"{granules} granules"
    return several if group_size == 1 else f"{group_size} in each of {several}"


Probe = MatmulProbe | StreamProbe | KernelProbe | CollectiveProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A probe that was measured.

    Attributes:
      seconds: median over the rounds, of one execution with all devices at work; 0 if it was not
        above the noise.
      spread: half the distance between the quartiles, as a fraction of the median.
      samples: rounds that it was measured in.
      made: when, ISO 8601 in UTC.
    """

    probe: Probe
    seconds: float
    spread: float
    samples: int
    made: str
