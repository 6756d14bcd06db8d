"""Published measurements of several layouts of one model, read from a file (pure functions).

A record that an example can represent becomes a `Config`: a plan on a target with its measured
time. All else keeps the reason. Groups with pipelines are read by `layouts`.
`benchmarks/data/published_results.json` shows the format.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from scipy import stats

from automesh.errors import UsageError
from automesh.hardware import Absent, parse_target
from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.strict_files import parse_tree
from automesh.reading import read_text
from benchmarks.support.granules import split_over_granules
from benchmarks.support.models import MOE, Model, Unlike, arguments_of, chunk_of, model_called
from benchmarks.support.spaces import with_usual_axes

# Frameworks whose steps are one jitted JAX program; the others run pipelines or PyTorch.
_JAX = ("maxtext", "jax")
# Chips in the file -> ours, for a shape on one slice or a number of devices.
_SLICES = {"TPU7x": "7x"}
_CLUSTERS = {"A100-SXM-80GB": "gpu-a100-80gb", "A100-SXM-40GB": "gpu-a100-40gb"}
_SIZES = ("dp", "fsdp", "ep", "tp")
_USUAL_KERNELS = ("", "auto", "base")
# MaxText's default on TPUs (`attention: autoselected`).
_ATTENTION = "kernels: attention is one fused kernel there; here its scores go through memory"
# Images of 224 pixels in patches of 14: 256, and no class token.
_VIT_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement as published; seconds per step are derived where only a rate is given."""

    id: str
    framework: str
    group: str
    status: str
    model: dict[str, Any]
    hardware: dict[str, Any]
    parallelism: dict[str, Any]
    batch: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict[str, Any])
    precision: str = ""
    remat: str = ""
    group_class: str = ""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def step_s(self) -> float:
        """0 where it was not measured."""
        return float(self.measured.get("step_time_s") or 0.0)

    @property
    def kernel(self) -> str:
        return str(self.extra.get("kernel") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A record as a plan.

    Attributes:
      measured_s: seconds of a step.
      kernel: what the original ran with; empty for what is usual.
      causes: what our step does otherwise, one phrase each: suspects where the times disagree.
    """

    id: str
    plan: Plan
    measured_s: float
    kernel: str
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layouts of one model on the same devices with the same batch.

    Attributes:
      target: as we call the devices.
      optimizer: `adamw`, or `sgd` where all of its records are known to have used that.
      left_out: records that cannot be represented, with the reasons.
      remarks: what differs from the original for all of them.
    """

    name: str
    model: Model
    target: str
    rows: int
    length: int
    dtype: str
    optimizer: str
    configs: tuple[Config, ...]
    left_out: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments of the example."""
        parts = max(int(dict(one.plan.knobs)["microbatches"]) for one in self.configs)
        devices = self.configs[0].plan.num_devices
        chunk = chunk_of(self.model, self.rows * self.length / devices / parts)
        values = {
            "rows": self.rows,
            "length": self.length,
            "chunk": min(chunk, self.length),
            "dtype": self.dtype,
            **({} if self.optimizer == "adamw" else {"optimizer": self.optimizer}),
        }
        return arguments_of(self.model, values)

    @property
    def space(self) -> str:
        """Every mesh, at the knobs of the group."""
        knobs = [dict(one.plan.knobs) for one in self.configs]
        remats = sorted({str(one["remat"]) for one in knobs})
        parts = sorted({int(one["microbatches"]) for one in knobs})
        axes = "".join(f"{name} = {{ dcn = true }}\n" for name in _axes_of(self.model))
        knobs = f"[knobs]\nremat = {json.dumps(remats)}\nmicrobatches = {parts}\n"
        return with_usual_axes(f"[axes]\n{axes}{knobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How well predictions order a group.

    Attributes:
      kendall_tau: tau-b: plans that we cannot tell apart count as ties.
      top1_regret: how much slower than the fastest the predicted best was, with the fastest of its
        kernels where several records are the same plan.
      top1_regret_worst: the same with the slowest of its kernels.
      median_time_error: of predicted over measured time, less 1, without sign.
    """

    configs: int
    kendall_tau: float
    top1_regret: float
    top1_regret_worst: float
    median_time_error: float


def read_records(path: Path) -> tuple[Record, ...]:
    """Reads the records of a file.

    Raises:
      UsageError: it is not of the format.
    """
    listed = parse_tree(read_text(path), source=path).get("records")
    if not isinstance(listed, list):
        raise UsageError(f"`{path}` has no list `records`", hint="see benchmarks/data")
    try:
        return tuple(TypeAdapter(list[Record]).validate_json(json.dumps(listed)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].lower()
        raise UsageError(f"`{path}`: `records.{where}`: {said}") from None


def groups_of(
    records: Iterable[Record],
) -> tuple[tuple[Group, ...], tuple[tuple[str, str], ...]]:
    """The groups of which at least two records can be represented, and the others with reasons."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_name[record.group].append(record)
    groups: list[Group] = []
    others: list[tuple[str, str]] = []
    for name, members in by_name.items():
        try:
            groups.append(_group_of(name, members))
        except Unlike as reason:
            others.append((name, str(reason)))
    return tuple(groups), tuple(others)


def _group_of(name: str, records: Sequence[Record]) -> Group:
    first = records[0]
    if any(record.group_class != "strict" for record in records):
        raise Unlike("its records differ in more than their layout")
    if not first.framework.lower().startswith(_JAX):
        raise Unlike(
            f"{first.framework} is no JAX program: pipelines are read by `published.layouts`"
        )
    model = model_called(str(first.model.get("name", "")))
    target, absent = target_of(first)
    configs: list[Config] = []
    left_out: list[tuple[str, str]] = []
    for record in records:
        try:
            configs.append(config_of(record, absent, model))
        except Unlike as reason:
            left_out.append((record.id, str(reason)))
    if len(configs) < 2:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in left_out))
        raise Unlike(f"fewer than two of its records can be represented: {reasons}")
    rows = first.batch.get("global_batch")
    length = first.batch.get("seq_len") or (_VIT_LENGTH if model.size.startswith("vit") else 0)
    if not rows or not length:
        raise Unlike("its batch or its sequence length is not on record")
    is_wide = first.precision == "fp32"
    precision = "precision: f32 there and here; how its products round there is not on record"
    optimizers = {str(one.extra.get("optimizer") or "") for one in records}
    optimizer = "sgd" if optimizers == {"sgd"} else "adamw"
    return Group(
        name=name,
        model=model,
        target=target,
        rows=int(rows),
        length=int(length),
        dtype="float32" if is_wide else "bfloat16",
        optimizer=optimizer,
        configs=tuple(configs),
        left_out=tuple(left_out),
        remarks=(
            *model.remarks,
            *([_ATTENTION] if first.framework.lower().startswith("maxtext") else []),
            *([precision] if is_wide else []),
            *_optimizer_remarks(optimizers, optimizer),
            *(["remat is not on record, and full here"] if not first.remat else []),
        ),
    )


def _optimizer_remarks(theirs: set[str], ours: str) -> Iterable[str]:
    others = ", ".join(sorted(theirs - {"", ours}))
    if others:
        which = "the optimizer of some" if len(theirs) > 1 else "the optimizer"
        yield f"{which} is {others} there, {ours} here"
    if "" in theirs:
        which = "an optimizer" if len(theirs) > 1 else "the optimizer"
        yield f"{which} is not on record, and {ours} here"


def target_of(record: Record) -> tuple[str, Absent]:
    """The devices, as we call them and what is known of them.

    Raises:
      Unlike: they are not among ours.
    """
    chip, count = str(record.hardware.get("chip")), record.hardware.get("count")
    topology = record.extra.get("topology")
    if chip in _SLICES and topology:
        name = f"{_SLICES[chip]}:{topology}"
    elif chip in _CLUSTERS:
        name = f"{_CLUSTERS[chip]}-{count}"
    else:
        raise Unlike(f"{count} x {chip} is no target of ours")
    try:
        absent = parse_target(name, os.environ).absent
    except UsageError as error:
        raise Unlike(error.message) from None
    assert absent is not None
    return name, absent


def config_of(record: Record, absent: Absent, model: Model) -> Config:
    """A record as a plan.

    Raises:
      Unlike: no plan of ours is like it, or it was not measured.
    """
    if record.status != "ok" or not record.step_s:
        raise Unlike(f"it has no time: {record.status}")
    remat = record.remat if record.remat in ("none", "full") else "full"
    microbatches = int(record.batch.get("grad_accum") or 1)
    plan = Plan(
        axes=_axes_from(record.parallelism, absent, model),
        knobs=(("remat", remat), ("microbatches", microbatches)),
    )
    kernel = "" if record.kernel in _USUAL_KERNELS else record.kernel
    return Config(
        id=record.id,
        plan=plan,
        measured_s=record.step_s,
        kernel=kernel,
        causes=tuple(_causes_of(kernel, microbatches)),
    )


def _axes_from(
    parallelism: Mapping[str, Any], absent: Absent, model: Model
) -> tuple[MeshAxis, ...]:
    """The mesh: sizes in the record count all devices, the innermost axis last."""
    if int(parallelism.get("pp") or 1) > 1:
        raise Unlike("pipelines are not searched yet")
    if int(parallelism.get("zero_stage") or 0) > 0:
        raise Unlike("ZeRO splits the optimizer's state alone, which no mesh axis of ours does")
    unknown = [
        name
        for name, size in parallelism.items()
        if name not in (*_SIZES, "pp", "zero_stage") and size not in (None, 1, False)
    ]
    if unknown:
        raise Unlike(f"`{unknown[0]}` is no axis of ours")
    mesh = {name: int(parallelism.get(name) or 1) for name in _SIZES}
    if mesh["ep"] > 1 and model.script != MOE:
        raise Unlike("it splits experts, and its model is represented without")
    if math.prod(mesh.values()) != absent.num_devices:
        raise Unlike(f"its mesh is not one of {absent.num_devices} devices")
    axes = split_over_granules(mesh, absent.num_devices // absent.fabric.num_granules)
    if axes is None:
        raise Unlike("the rows of its mesh and the machines do not end at the same devices")
    return axes


def _causes_of(kernel: str, microbatches: int) -> Iterable[str]:
    """What a step with another kernel does otherwise; `deferred` is how often it reduces."""
    if "deferred" in kernel:
        if microbatches > 1:
            yield (
                "reduction frequency: gradients are reduced once per step there, once per "
                "microbatch here"
            )
    elif kernel:
        yield f"kernels: `{kernel}` there, plain XLA here"


def figures(
    measured_s: Sequence[float], predicted_s: Sequence[float], *, refused_s: Sequence[float] = ()
) -> Figures:
    """Holds predictions against measurements of the same plans, in the same order.

    Args:
      refused_s: what other plans took that are predicted not to run: nobody would choose them.

    >>> figures([1.0, 2.0, 4.0], [1.0, 1.0, 2.0]).top1_regret_worst
    1.0
    """
    found: Any = stats.kendalltau(measured_s, predicted_s)
    tau = float(found.statistic)
    best = min(predicted_s)
    # Plans that differ in kernels alone are the same program here, give or take a rounding.
    first = [
        measured
        for measured, predicted in zip(measured_s, predicted_s, strict=True)
        if predicted <= best * (1 + 1e-9)
    ]
    fastest = min([*measured_s, *refused_s])
    errors = sorted(
        abs(predicted / measured - 1.0)
        for measured, predicted in zip(measured_s, predicted_s, strict=True)
    )
    return Figures(
        configs=len(measured_s),
        kendall_tau=0.0 if math.isnan(tau) else tau,
        top1_regret=min(first) / fastest - 1.0,
        top1_regret_worst=max(first) / fastest - 1.0,
        median_time_error=statistics.median(errors),
    )


def _axes_of(model: Model) -> tuple[str, ...]:
    return _SIZES if model.script == MOE else tuple(name for name in _SIZES if name != "ep")
