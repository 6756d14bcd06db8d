"""Published runs on TPUs, as `benchmarks/data/tpu_recipes.json` has them.

Each record has the devices, the flags, and what the source measured: a time of a step, or TFLOP/s
of a chip alone. Times are then derived from the FLOPs that the source counts for a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from automesh.errors import UsageError
from automesh.reading import read_text

# How the flags of records came about that the file itself says not to take as exact.
_NOT_EXACT = ("reconstructed", "approximate")
_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of axes inside a slice and between slices; axes of size 1 are left out."""

    ici: dict[str, int] = field(default_factory=dict[str, int])
    dcn: dict[str, int] = field(default_factory=dict[str, int])

    def has(self, axis: str) -> bool:
        """Whether more than one device lies along an axis."""
        return self.ici.get(axis, 1) * self.dcn.get(axis, 1) > 1

    @property
    def text(self) -> str:
        """As automesh writes a mesh: `dcn.data:4,fsdp:256`."""
        between = [f"dcn.{name}:{size}" for name, size in self.dcn.items() if size > 1]
        within = [f"{name}:{size}" for name, size in self.ici.items() if size > 1]
        return ",".join([*between, *within])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the source prints; None for what it does not."""

    step_s: float | None = None
    tflops_per_chip: float | None = None
    tokens_per_s_per_chip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One published run.

    Attributes:
      chip: as `TPU v6e`.
      topology: chips of a slice along each dimension; None where the source does not say.
      devices: of all slices; a chip of TPU 7x has two.
      flags: keys of the framework's configuration, as texts.
      xla_flags: as the source has them: options of XLA, or names of MaxText's sets of them.
      group: records of one model on one kind of slice.
      flags_basis: how the flags were obtained.
      tflop_per_token: that the source counts; None where it cannot be derived from what it prints.
      outcome: of a run that did not fit, what was said.
    """

    id: str
    source: str
    framework: str
    model: str
    chip: str
    chips: int
    devices: int
    flags: dict[str, str]
    xla_flags: str
    mesh: Mesh
    precision: str
    group: str
    flags_basis: str
    measured: Measured = field(default_factory=Measured)
    topology: str | None = None
    slices: int = 1
    seq_len: int | None = None
    global_batch: float | None = None
    per_device_batch_size: float | None = None
    tflop_per_token: float | None = None
    jax: str | None = None
    libtpu: str | None = None
    outcome: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the flags are those of the run."""
        return not self.flags_basis.startswith(_NOT_EXACT)

    @property
    def generation(self) -> str:
        """As targets call it: `v6e`, `7x`."""
        return self.chip.removeprefix("TPU ")

    @property
    def target(self) -> str:
        """The devices, as automesh names them.

        Raises:
          UsageError: there is no name for them.
        """
        within = self.chips // self.slices
        several = f"*{self.slices}" if self.slices > 1 else ""
        if self.topology:
            return f"{self.generation}:{self.topology}{several}"
        # The number in a name counts cores for these; for the others it counts chips.
        count = {"v4": 2 * within, "v5p": 2 * within, "7x": 2 * within}.get(self.generation, within)
        return f"tpu-{self.generation}-{count}{several.replace('*', '-')}"

    @property
    def tokens_per_step(self) -> float:
        """Of all devices; 0 where the record does not say."""
        return (self.global_batch or 0.0) * (self.seq_len or 0)

    @property
    def is_mixture(self) -> bool:
        """Whether the model routes tokens to experts, by its name or its flags."""
        name = self.model.lower()
        named = ("mixtral", "deepseek", "gpt-oss", "a22b", "moe", "hunyuan3", "16e", "-e128")
        return any(one in name for one in named) or int(self.flags.get("num_experts", "1")) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The file: runs that were measured, and runs that did not fit."""

    records: tuple[Record, ...]
    oom_records: tuple[Record, ...] = ()


def read_published(path: Path) -> Published:
    """Reads the file.

    Raises:
      UsageError: it is not there, or not of that form.
    """
    try:
        data: Any = json.loads(read_text(path))
        found = TypeAdapter(Published).validate_python(
            {name: data[name] for name in ("records", "oom_records") if name in data}
        )
    except (ValueError, ValidationError, TypeError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(
            f"`{path}` is no file of published TPU runs: {first}",
            hint="give one of the form of benchmarks/data/tpu_recipes.json",
        ) from None
    ids = [record.id for record in (*found.records, *found.oom_records)]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        raise UsageError(f"`{path}` has the record `{twice[0]}` twice")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time of a step.

    Attributes:
      step_s: seconds.
      basis: where it comes from, in words.
    """

    step_s: float
    basis: str


def measured_time(record: Record, sizes: Mapping[str, float]) -> Time | None:
    """The time of a step that was measured, or that follows from the TFLOP/s of a chip.

    Args:
      sizes: of the model, where it is MaxText's own GPT, see `gpt_tflop_per_token`; else empty.

    Returns:
      None where the source prints neither, or its FLOPs are not known.
    """
    if record.measured.step_s:
        return Time(step_s=record.measured.step_s, basis="measured")
    rate, tokens = record.measured.tflops_per_chip, record.tokens_per_step / record.chips
    if not rate or not tokens:
        return None
    if record.tflop_per_token:
        return Time(step_s=record.tflop_per_token * tokens / rate, basis="from TFLOP/s of a chip")
    if sizes and record.seq_len:
        counted = gpt_tflop_per_token(sizes, record.seq_len)
        return Time(
            step_s=counted * tokens / rate,
            basis="from TFLOP/s of a chip and the FLOPs that MaxText counted",
        )
    return None


def gpt_tflop_per_token(sizes: Mapping[str, float], seq_len: int) -> float:
    """TFLOPs of a token as MaxText counted them when its tables were made (December 2023).

    Six for every parameter, and causal attention.

    Args:
      sizes: emb_dim, num_heads, head_dim, mlp_dim, num_layers, vocab_size, mlp_matrices (2 without
        a gate).
    """
    inner = sizes["num_heads"] * sizes["head_dim"]
    layer = (
        4 * sizes["emb_dim"] * inner + sizes["mlp_matrices"] * sizes["emb_dim"] * sizes["mlp_dim"]
    )
    parameters = sizes["num_layers"] * layer + sizes["vocab_size"] * sizes["emb_dim"]
    attention = 12 * inner * sizes["num_layers"] * seq_len / 2
    return (6 * parameters + attention) / _TERA


def cheapest_first(records: Sequence[Record]) -> list[Record]:
    """Those first whose step is likely to compile soonest: few devices, little work for a token."""
    return sorted(
        records,
        key=lambda one: (one.devices, one.is_mixture, one.tflop_per_token or 0.0, one.id),
    )
