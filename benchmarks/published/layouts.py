"""Published measurements of layouts with pipelines, as what our terms are made of (pure functions).

vTrain, Aleph Alpha, AMP and the Ultra-Scale Playbook ran Megatron or its like. A record becomes a
`Layout`: sizes of the mesh, layers of each stage, rows of a microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published.groups import Record
from benchmarks.support.models import Unlike


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """How a publication trained over its replicas.

    Attributes:
      cluster: our name for the devices.
      gradient_bytes: of one parameter's gradient on the wires.
      scatters: whether ZeRO-1 leaves every replica only its part of the summed gradients; else all
        get all of them.
      overlaps: whether gradients that no ZeRO splits are reduced, bucket by bucket, while the last
        microbatch goes back; else when it has gone back.
    """

    cluster: str
    gradient_bytes: float
    scatters: bool = True
    overlaps: bool = False


# Whose groups are read. DeepSpeed reduces in the training type. nanotron accumulates and reduces in
# float32 (`accumulate_grad_in_fp32`); with ZeRO-1 it all-reduces one buffer after the last backward
# pass and gathers the parameters after the update, without it is torch's DistributedDataParallel
# that reduces (huggingface/nanotron @e24d2483, the playbook's: trainer.py, `make_ddp` and
# `sync_gradients_across_dp`; optim/gradient_accumulator.py, `get_fp32_accum_hook`; optim/zero.py).
_SOURCES = {
    "vtrain_single": Trainer(cluster="gpu-a100-80gb", gradient_bytes=2.0),
    "vtrain_multi": Trainer(cluster="vtrain", gradient_bytes=2.0),
    "aleph_alpha": Trainer(cluster="gpu-a100-80gb", gradient_bytes=2.0),
    "hf_ultrascale": Trainer(
        cluster="gpu-p5.48xlarge", gradient_bytes=4.0, scatters=False, overlaps=True
    ),
    "amp": Trainer(cluster="g4dn", gradient_bytes=2.0),
}
_GELU = "the feed-forward is a GELU of two matrices there; here a SwiGLU of as many parameters"
_PLAIN = "gradients are reduced once per step there and here, after the last microbatch"
_BESIDE = (
    "gradients are reduced once per step there and here, without ZeRO while the last microbatch "
    "goes back, with it after that"
)
_FLASH = (
    "attention is one fused kernel there: of ours the multiplications count, and no traffic",
    "what elementwise operations make is kept there, and computed again here when going back "
    "(remat = dots): memory is less here, above all where tp is large",
)
_LAUNCHED = "the host launches every kernel there, which small ones wait for; here a program is one"
_REMAT = "remat is not on record, and full here"
# Units of AMP's partitions before the first layer and after the last one: to fp16, the embedding, a
# transposition; its inverse, the norm, the head (Megatron-DeepSpeed's GPT2ModelPipe).
_UNITS_BEFORE = 3
_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as our decoder has it.

    Attributes:
      d_ff: of a SwiGLU.
      chunk: keys that attention looks at together.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    vocab: int
    tied: bool
    length: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One record.

    Attributes:
      stages: layers of each stage.
      rows: of a microbatch of one replica.
      microbatches: per step.
      remat: dots, where nothing was computed again, or full.
      zero: 1 if the optimizer's state is split over the replicas.
      measured_s: 0 where it did not run.
      ran_out: whether it is on record that memory did not suffice; None if it is not said why it
        did not run.
      theirs_s: what the publication's own model predicts; 0 if it has none.
    """

    id: str
    dp: int
    tp: int
    stages: tuple[int, ...]
    rows: int
    microbatches: int
    zero: int
    remat: str
    measured_s: float
    ran_out: bool | None
    theirs_s: float = 0.0

    @property
    def pp(self) -> int:
        return len(self.stages)

    def __str__(self) -> str:
        zero = " zero1" if self.zero else ""
        return (
            f"pp:{self.pp},dp:{self.dp},tp:{self.tp} {self.microbatches}x{self.rows}"
            f" remat={self.remat}{zero}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGroup:
    """Layouts of one model on the same devices with the same batch.

    Attributes:
      trainer: how it was trained, on which devices.
      devices: how many.
      is_fused: whether attention is one kernel that keeps no scores.
      left_out: records that cannot be represented, with the reasons.
      remarks: what differs from the original for all of them.
    """

    name: str
    shape: Shape
    trainer: Trainer
    devices: int
    is_fused: bool
    layouts: tuple[Layout, ...]
    left_out: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]

    @property
    def most_rows(self) -> int:
        """Rows that every layout's are a divisor of, at least twice over."""
        return 2 * math.lcm(*(one.rows for one in self.layouts))


def layout_groups_of(
    records: Iterable[Record],
) -> tuple[tuple[LayoutGroup, ...], tuple[tuple[str, str], ...]]:
    """The groups with pipelines of these sources, and those that cannot be read, with reasons."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.group.split("/")[0] in _SOURCES and record.group_class == "strict":
            by_name[record.group].append(record)
    groups: list[LayoutGroup] = []
    others: list[tuple[str, str]] = []
    for name, members in by_name.items():
        if all(int(one.parallelism.get("pp") or 1) == 1 for one in members):
            continue
        try:
            groups.append(_group_of(name, members))
        except Unlike as reason:
            others.append((name, str(reason)))
    return tuple(groups), tuple(others)


def _group_of(name: str, records: Sequence[Record]) -> LayoutGroup:
    first, source = records[0], name.split("/")[0]
    layouts: list[Layout] = []
    left_out: list[tuple[str, str]] = []
    for record in records:
        try:
            layouts.append(_layout_of(record, source))
        except Unlike as reason:
            left_out.append((record.id, str(reason)))
    if sum(one.measured_s > 0 for one in layouts) < 2:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in left_out))
        raise Unlike(f"fewer than two of its records can be represented: {reasons}")
    is_gelu = str(first.model.get("mlp") or "gelu") != "swiglu"
    is_flash = source in ("aleph_alpha", "hf_ultrascale")
    return LayoutGroup(
        name=name,
        shape=_shape_of(first, is_gelu=is_gelu, is_flash=is_flash),
        trainer=_SOURCES[source],
        devices=int(first.hardware["count"]),
        is_fused=is_flash,
        layouts=tuple(layouts),
        left_out=tuple(left_out),
        remarks=(
            *([_GELU] if is_gelu else []),
            *(_FLASH if is_flash else ()),
            *([_REMAT] if not first.remat else []),
            _BESIDE if _SOURCES[source].overlaps else _PLAIN,
            _LAUNCHED,
        ),
    )


def _shape_of(record: Record, *, is_gelu: bool, is_flash: bool) -> Shape:
    model = record.model
    d_model, d_ff = int(model["hidden"]), int(model["ffn"])
    length = int(record.batch["seq_len"])
    return Shape(
        layers=int(model["layers"]),
        d_model=d_model,
        d_ff=round(d_ff * 2 / 3 / _TILE) * _TILE if is_gelu else d_ff,
        heads=int(model["heads"]),
        vocab=int(model["vocab"]),
        tied=bool(model.get("tied_embeddings", is_gelu)),
        length=length,
        # A fused kernel keeps no scores: those of a part of the keys are made again going back.
        chunk=min(length // 2, 1024) if is_flash else length,
    )


def _layout_of(record: Record, source: str) -> Layout:
    if record.status == "kernel_not_available" or record.status == "error":
        raise Unlike(f"it did not run: {record.status}")
    sizes = {name: int(record.parallelism.get(name) or 1) for name in ("dp", "tp", "pp")}
    if math.prod(sizes.values()) != int(record.hardware["count"]):
        raise Unlike("its mesh is not of all devices")
    rows, parts = int(record.batch["micro_batch"]), int(record.batch["grad_accum"])
    if rows * parts * sizes["dp"] != int(record.batch["global_batch"]):
        raise Unlike("its microbatches are not those of its batch")
    return Layout(
        id=record.id,
        dp=sizes["dp"],
        tp=sizes["tp"],
        stages=_stages_of(record, source, sizes["pp"]),
        rows=rows,
        microbatches=parts,
        zero=int(record.parallelism.get("zero_stage") or 0),
        remat="dots" if record.remat.startswith("none") else "full",
        measured_s=record.step_s if record.status == "ok" else 0.0,
        ran_out={"ok": False, "oom": True}.get(record.status),
        theirs_s=float(record.extra.get("amp_predicted_s") or 0.0),
    )


def _stages_of(record: Record, source: str, ranks: int) -> tuple[int, ...]:
    """Layers of each stage."""
    layers = int(record.model["layers"])
    if partition := record.extra.get("partition"):
        return _of_partition(partition, layers)
    if source == "hf_ultrascale":
        return _of_costs(record.model, layers, ranks)
    if layers % ranks:
        raise Unlike(f"{layers} layers are not divided evenly over {ranks} stages")
    return (layers // ranks,) * ranks


def _of_partition(bounds: Sequence[Any], layers: int) -> tuple[int, ...]:
    def inside(bound: Any) -> int:
        return min(max(int(bound) - _UNITS_BEFORE, 0), layers)

    found = tuple(inside(end) - inside(start) for start, end in itertools.pairwise(bounds))
    if 0 in found[:-1]:
        raise Unlike("a stage before the last one has no layer")
    return found


def _of_costs(model: dict[str, Any], layers: int, ranks: int) -> tuple[int, ...]:
    """nanotron's models/base.py: layers and the head are dealt by their multiplications; a block
    after which a rank has more than its share is its last."""
    hidden, ffn = int(model["hidden"]), int(model["ffn"])
    layer = 4 * hidden * hidden + 3 * hidden * ffn
    total = layers * layer + hidden * int(model["vocab"])
    found, rank, cost = [0] * ranks, 0, 0
    for _ in range(layers):
        found[rank] += 1
        cost += layer
        if cost * ranks > total * (rank + 1):
            rank += 1
    if 0 in found[:-1]:
        raise Unlike("a stage before the last one has no layer")
    return tuple(found)
