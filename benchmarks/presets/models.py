"""Which models and targets have presets, each with its batch, its length and its search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SPACES = Path(__file__).resolve().parent / "spaces"
FRAMEWORK = "maxtext"
TARGETS = ("tpu-v5p-64", "tpu-v6e-64", "tpu-7x-64", "tpu-v5litepod-64", "gpu-h100-64")
# MaxText's own choice for GPUs is a Triton kernel outside of any manual region, which XLA cannot
# partition: every device computes the attention of all rows. Its other kernels need cuDNN.
ATTENTION_OF_GPUS = "attention=dot_product"
# MaxText's grouped multiplication is a kernel for TPUs, which it interprets on GPUs block by block,
# and of `jax.lax.ragged_dot` (`megablox=false` alone) XLA makes a masked product for every expert:
# qwen3-30b-a3b then needs 227 GiB of a device. What is left is the dense way, which drops tokens
# beyond a capacity; 1.25 of an even share is usual (Switch Transformers, arXiv 2101.03961).
EXPERTS_ON_GPUS = ("megablox=false", "sparse_matmul=false", "capacity_factor=1.25")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of MaxText's own configurations.

    Attributes:
      name: as MaxText calls it.
      kind: what it stands for, in words.
      space: its search space, in the folder `spaces`.
      length: tokens of a row.
      rows: of a device in one update.
      rows_on: the same on targets that hold less or for which MaxText publishes another batch.
      more: further arguments, on every target.
      experts: whether it is a mixture of experts.
      axlearn: what AXLearn calls a model of this size, whose mesh rules are compared; empty if it
        has none.
    """

    name: str
    kind: str
    space: str
    length: int
    rows: int
    rows_on: Mapping[str, int] = field(default_factory=dict[str, int])
    more: tuple[str, ...] = ()
    experts: bool = False
    axlearn: str = ""

    @property
    def preset(self) -> str:
        """The name of the preset."""
        return f"{FRAMEWORK}/{self.name}"

    @property
    def space_path(self) -> Path:
        return SPACES / f"{self.space}.toml"

    def arguments(self, target: str) -> tuple[str, ...]:
        """What MaxText's training command gets for a target."""
        rows = self.rows_on.get(target, self.rows)
        found = (
            f"model_name={self.name}",
            f"max_target_length={self.length}",
            f"per_device_batch_size={rows}",
            *self.more,
        )
        if target.startswith("tpu"):
            return found
        return (*found, ATTENTION_OF_GPUS, *(EXPERTS_ON_GPUS if self.experts else ()))


MODELS = (
    Model(
        name="qwen3-1.7b",
        kind="dense, 1B class",
        space="dense",
        length=4096,
        rows=4,
        axlearn="gala-1B",
    ),
    Model(
        name="llama3.1-8b",
        kind="dense, 8B class",
        space="large",
        length=8192,
        rows=4,
        rows_on={"tpu-v6e-64": 5, "tpu-v5litepod-64": 1, "gpu-h100-64": 2},
        axlearn="fuji-8B-v3-tiktoken",
    ),
    Model(
        name="gemma3-12b",
        kind="dense, long context",
        space="long_context",
        length=32768,
        rows=1,
        # Its logits over 262,144 tokens would take 34 GB of a device.
        more=("num_vocab_tiling=8",),
    ),
    Model(
        name="qwen3-30b-a3b",
        kind="mixture of 128 experts",
        space="mixture",
        length=4096,
        rows=4,
        rows_on={"tpu-v5litepod-64": 1},
        experts=True,
        axlearn="qwen3-30B-A3B",
    ),
    Model(
        name="mixtral-8x7b",
        kind="mixture of 8 experts",
        space="mixture",
        length=4096,
        rows=4,
        rows_on={"tpu-v5litepod-64": 1},
        experts=True,
    ),
    Model(
        name="llama3.1-70b",
        kind="dense, 70B class",
        space="large",
        length=8192,
        rows=2,
        rows_on={"tpu-v5litepod-64": 1, "gpu-h100-64": 1},
        axlearn="fuji-70B-v3-tiktoken",
    ),
)
