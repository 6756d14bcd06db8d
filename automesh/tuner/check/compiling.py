"""Compiles today's step for the devices of a rule: gives its figures, or why there are none."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from automesh.errors import UsageError
from automesh.hardware import Target, check_compilable, chip_for, clusters_in, parse_target
from automesh.hlo.store import default_store
from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.rules.rule import MeshRule, matches_only
from automesh.outcomes import Compiled, Failed, Failure, OutOfMemory
from automesh.program.capture.nouns import parse_splits
from automesh.program.nouns import CompileAnswer, Entry, Inspection
from automesh.report.progress import Progress
from automesh.tuner.compile.jobs import predicted
from automesh.tuner.compile.replay import Player
from automesh.tuner.explain.study import hardware_for
from automesh.tuner.preparation import Aim, aim_of, step_ref
from automesh.tuner.request import UNMODIFIED, SearchRequest
from automesh.tuner.script.capture import space_for
from automesh.tuner.workers import ask, one_worker, surroundings_of
from automesh.units import format_bytes
from automesh.worker.messages import CompileJob, InspectJob, Surroundings
from automesh.worker.pool import Pool

_CPU = re.compile(r"cpu-([0-9]+)")


class Workers:
    """One worker for each kind of devices, which rules for several targets can share."""

    def __init__(self, stack: ExitStack, request: SearchRequest, progress: Progress) -> None:
        self._stack, self._request, self._progress = stack, request, progress
        self._pools: dict[Surroundings, Pool] = {}

    def on(self, target: Target) -> Pool:
        """Returns the worker for a target; it ends with the stack."""
        surroundings = surroundings_of(target)
        if surroundings not in self._pools:
            limit = self._request.memory_limit_bytes
            self._pools[surroundings] = self._stack.enter_context(
                one_worker(surroundings, memory_limit_bytes=limit, progress=self._progress)
            )
        return self._pools[surroundings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aimed:
    """A rule with the devices for which it is checked.

    Attributes:
      plan: the plan of the rule, with all sizes.
    """

    rule: MeshRule
    target: Target
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The reason why the step cannot be compiled as the rule says.

    Attributes:
      of_rule: True if the rule is wrong: the script no longer has its axis or knob, or the memory
        does not suffice; False if the check itself failed.
    """

    reason: str
    of_rule: bool


def aim_at(rule: MeshRule, axes: tuple[str, ...], request: SearchRequest) -> Aimed:
    """Finds the devices and the plan of a rule.

    Raises:
      UsageError: its pattern names no single target or an unknown one; or it leaves sizes open.
    """
    if rule.evidence.command:
        raise UsageError(
            f"the rule `{rule.match}` was found by running `{rule.evidence.command}`, whose "
            "program nobody has seen",
            hint="check rules that were found for a script",
        )
    name = matches_only(rule.match)
    if not name:
        raise UsageError(
            f"its pattern `{rule.match}` names no devices in particular",
            hint="name them with --select",
        )
    virtual = _CPU.fullmatch(name)
    target = parse_target(
        f"cpu:{virtual[1]}" if virtual else name, os.environ, clusters_in(request.hardware)
    )
    check_compilable(target)
    shape = rule.hybrid_shape
    sizes = zip(axes, shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    plan = Plan(
        axes=tuple(MeshAxis(name=axis, ici=ici, dcn=dcn) for axis, ici, dcn in sizes),
        mapping=rule.mapping.axes,
        knobs=tuple(rule.knobs.items()),
        compiler_options=tuple(rule.compiler_options.items()),
    )
    return Aimed(rule=rule, target=target, plan=plan)


def compile_today(
    aimed: Aimed, request: SearchRequest, workers: Workers, progress: Progress
) -> Compiled | Broken:
    """Compiles the step of a script for a rule.

    Raises:
      UsageError: the script cannot be loaded.
    """
    target, plan = aimed.target, aimed.plan
    request = replace(request, target=target.name)
    if request.entry.function == UNMODIFIED and aimed.rule.evidence.split:
        splits = parse_splits(aimed.rule.evidence.split.split())
        request = replace(request, splits=splits)
    request, target, space = space_for(request, target, progress)
    names = tuple(axis.name for axis in plan.axes)
    if request.entry.capture is not None and space.names != names:
        return Broken(
            reason=f"the mesh of the script has the axes {', '.join(space.names)}, and the rule "
            f"has {', '.join(names)}",
            of_rule=True,
        )
    absent = target.absent
    store = default_store(os.environ) if absent is not None else None
    pool = workers.on(target)
    progress.now(f"looking at {request.entry.location}")
    inspected = ask(
        pool,
        InspectJob(
            step=step_ref(request.entry, target),
            axis_names=names,
            platform="",
            mapping=plan.mapping,
        ),
        Inspection,
        request.timeout_s,
    )
    if isinstance(inspected, Failure):
        return _broken(inspected, request.entry)
    missing = _missing_knobs(plan, inspected)
    if missing:
        return missing
    progress.now(f"compiling {plan} for {target.name}")
    job = CompileJob(
        step=step_ref(request.entry, target, inspected),
        plan=plan,
        cache_dir="",
        store_dir=str(store.folder) if store is not None else "",
    )
    answer = ask(pool, job, CompileAnswer, request.timeout_s, _go, patient=True)
    if isinstance(answer, Failure):
        return _broken(answer, request.entry)
    aim = aim_of(target, inspected)
    compiled = Compiled(
        fingerprint=answer.fingerprint,
        memory=answer.memory,
        counts=answer.counts,
        step_s=0.0,
        compile_s=answer.compile_s,
        stored=answer.stored,
        pipeline=answer.pipeline,
    )
    if absent is None or store is None:
        return predicted(compiled, chip_for(aim.device_kind, aim.platform))
    if aim.memory_bytes and answer.memory.peak_bytes > aim.memory_bytes:
        return _too_large(answer.memory.peak_bytes, aim)
    hardware = hardware_for(
        absent.fabric, [plan], platform=aim.platform, device_kind=aim.device_kind
    )
    played = Player(store=store, hardware=hardware).replayed(plan, compiled)
    return played if isinstance(played, Compiled) else predicted(compiled, absent.fabric.chip)


def _go(event: Any) -> Any:
    return {"go": True} if event.get("reply") else None


def _too_large(needed: int, aim: Aim) -> Broken:
    return Broken(
        reason=f"out of memory: it needs {format_bytes(needed)} of the "
        f"{format_bytes(aim.memory_bytes)} of a device",
        of_rule=True,
    )


def _missing_knobs(plan: Plan, inspected: Inspection) -> Broken | None:
    known = dict(inspected.knobs)
    missing = [name for name, _ in plan.knobs if name not in known]
    if not missing or inspected.takes_any_knob:
        return None
    return Broken(reason=f"`build` takes no knob `{missing[0]}` any more", of_rule=True)


def _broken(answer: Failure, entry: Entry) -> Broken:
    """Turns a failure into a `Broken`; only a failure of the user's step is one of the rule."""
    if isinstance(answer, OutOfMemory):
        return Broken(
            reason=f"out of memory in stage {answer.stage}: {answer.detail}",
            of_rule=not answer.is_host,
        )
    if isinstance(answer, Failed):
        # A script that does not load says nothing about the rule.
        of_rule = answer.stage not in ("start", "load")
        return Broken(reason=f"failed in stage {answer.stage}: {answer.reason}", of_rule=of_rule)
    return Broken(
        reason=f"`{entry.location}` was not compiled within {answer.limit_s:.0f} s "
        f"(stage {answer.stage})",
        of_rule=False,
    )
