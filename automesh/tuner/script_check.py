"""Checks a script as a search would, in seconds and without searching: its arguments and results,
the meshes on which it can be traced, whether every process traces the same program, and what should
be fixed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from automesh.errors import AutomeshError, NoFeasibleMesh, UsageError
from automesh.hardware import Target, parse_target
from automesh.mesh.axes import MAPPING, MeshAxis, Plan, Scalar
from automesh.outcomes import Failure
from automesh.program.lower.program_text import first_difference, read_text
from automesh.program.nouns import Inspection, Traced
from automesh.program.step_summary import StepSummary
from automesh.report.progress import Progress, Silent
from automesh.report.script_check.nouns import (
    CheckedScript,
    KnobUse,
    PlanCount,
    Problem,
    ProgramCheck,
    Sameness,
)
from automesh.report.words import count
from automesh.space.legal import Enumeration
from automesh.space.space import SearchSpace
from automesh.tuner.estimate.buildable import BuildCheck, refusal_notices
from automesh.tuner.estimate.logical_knobs import with_knobs
from automesh.tuner.preparation import (
    LegalPlans,
    Preparation,
    aim_of,
    inspect_job,
    prepare,
    step_ref,
)
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.capture import alone_notice
from automesh.tuner.start import read_aim
from automesh.tuner.study.retrace import CURE
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import (
    ask,
    memory_share_bytes,
    refuse_gang,
    refuse_several_processes,
    surroundings_of,
)
from automesh.worker.environment import hash_seed
from automesh.worker.messages import BuildJob, Job, SummarizeJob, Surroundings, TraceJob
from automesh.worker.pool import Pool
from automesh.worker.protocol import Answer
from automesh.worker.temporary import temporary_folder

_T = TypeVar("_T")
_VIRTUAL = "cpu:8"  # if the machine has only one device, which leaves no mesh to check
_MOST_MESHES = 6
BUILDING_S = 10.0  # in which builds of further plans begin
_SCRIPTS_OWN = ("start", "load")  # a failure in these stages shows nothing about the step
_NO_LOSS = (
    "return the loss beside the new state: meshes are compared by it, and what cannot be compared "
    "becomes no rule"
)


def check_script(
    request: SearchRequest,
    *,
    script: str,
    command: Callable[[str], str],
    progress: Progress,
) -> CheckedScript:
    """Checks a script.

    Args:
      script: the script as the user gave it.
      command: returns the command that searches the script for a target.

    Raises:
      UsageError: an argument is wrong, or the script cannot be loaded.
    """
    request, target, space = read_aim(request, progress, check=_check_at_once, alone=_VIRTUAL)
    with _Check.on(target, request, space, progress) as check:
        inspected = check.inspect()
        if not _is_single(inspected, target):
            return check.look(inspected, script=script, command=command(request.target))
    virtual = parse_target(_VIRTUAL, os.environ)
    with _Check.on(virtual, request, space, progress) as check:
        check.notes.append(alone_notice(virtual))
        return check.look(check.inspect(), script=script, command=command(_VIRTUAL))


def _check_at_once(_: SearchRequest, target: Target) -> None:
    refuse_gang(target, "a look at a script")


def _is_single(inspected: Inspection | Failure, target: Target) -> bool:
    return (
        isinstance(inspected, Inspection)
        and target.absent is None
        and not target.cpu_devices
        and len(inspected.devices) == 1
        and inspected.devices[0].platform == "cpu"
    )


@dataclass(slots=True, kw_only=True)
class _Workers:
    """A worker like those of a search, and on CPUs a second one.

    Attributes:
      first: a worker with the hash seed of all workers.
      second: a worker with another hash seed; None if the accelerator serves only one process.
      folder: the folder for the texts of programs.
    """

    first: Pool
    second: Pool | None
    surroundings: Surroundings
    other_seed: str
    folder: Path

    @staticmethod
    @contextmanager
    def on(target: Target, request: SearchRequest) -> Generator[_Workers]:
        """Starts the workers of a target; they end when the body ends."""
        surroundings, seed = surroundings_of(target), hash_seed(os.environ)
        other_seed = str(int(seed) + 1) if seed.isdecimal() else "1"
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder("check"))

            def open_pool(around: Surroundings, name: str) -> Pool:
                pool = Pool(
                    size=1,
                    surroundings=around,
                    log_dir=folder / name,
                    memory_limit_bytes=request.memory_limit_bytes or memory_share_bytes(2),
                )
                return stack.enter_context(pool)

            other = _with_seed(surroundings, other_seed)
            yield _Workers(
                first=open_pool(surroundings, "first"),
                second=open_pool(other, "second") if serves_several(target) else None,
                surroundings=surroundings,
                other_seed=other_seed,
                folder=folder,
            )


def serves_several(target: Target) -> bool:
    """Whether several processes can have the devices of a target at the same time."""
    return target.platforms == "cpu"


def _with_seed(surroundings: Surroundings, seed: str) -> Surroundings:
    variables = {**dict(surroundings.variables), "PYTHONHASHSEED": seed}
    return replace(surroundings, variables=tuple(sorted(variables.items())))


@dataclass(slots=True)
class _Tracing:
    """The meshes that were tried.

    Attributes:
      traced: plans that the step could be traced for.
      step: the step on the first of these plans.
      refused: plans for which the step could not be traced, and why.
    """

    traced: list[Plan] = field(default_factory=list[Plan])
    step: StepSummary | None = None
    refused: list[tuple[Plan, Failure]] = field(default_factory=list[tuple[Plan, Failure]])


@dataclass(slots=True, kw_only=True)
class _Check:
    """The check of one script on one target.

    Attributes:
      begun: the job of the second worker.
    """

    request: SearchRequest
    target: Target
    space: SearchSpace
    workers: _Workers
    progress: Progress
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])
    begun: Plan | None = None

    @staticmethod
    @contextmanager
    def on(
        target: Target, request: SearchRequest, space: SearchSpace, progress: Progress
    ) -> Generator[_Check]:
        """Starts a check on a target; its workers end when the body ends."""
        with _Workers.on(target, request) as workers:
            yield _Check(
                request=request, target=target, space=space, workers=workers, progress=progress
            )

    def inspect(self) -> Inspection | Failure:
        """Inspects the script, as every search does first.

        Raises:
          UsageError: the script cannot be loaded.
        """
        self.progress.log(f"importing {self.request.entry.location}")
        answer = self._ask(
            inspect_job(self.request, self.target, self.space),
            Inspection,
            {"build": f"calling `{self.request.entry.function}` on one device"},
        )
        if isinstance(answer, Inspection):
            refuse_several_processes(
                answer.process_count, "a search", hint="run it on one host, without a launcher"
            )
            self.notes += answer.notices
        elif answer.stage in _SCRIPTS_OWN:
            raise inspection_error(answer, self.request.entry, self.space)
        return answer

    def look(self, inspected: Inspection | Failure, *, script: str, command: str) -> CheckedScript:
        """Makes all checks that follow an inspection."""
        found = CheckedScript(
            script=script,
            function=self.request.entry.function,
            target=self.target.selector or self.target.name,
            axes=self.space.names,
            program=self._program("not looked at", ""),
            command=command,
        )
        if not isinstance(inspected, Inspection):
            self._blame("", inspected)
            return replace(found, problems=tuple(self.problems), notes=tuple(self.notes))
        aim = aim_of(self.target, inspected)
        prepared = self._prepare(inspected)
        enumeration = prepared[1].enumeration if prepared else None
        legal = enumeration.legal if enumeration else ()
        tracing = self._trace_meshes(inspected, legal)
        meshes, step = tracing.traced, tracing.step
        program = found.program
        if step is not None:
            self._judge(step)
            if not step.change:  # With other arguments the program differs in any case.
                program = self._compare_programs(meshes[0], step, inspected)
        plans = self._build_plans(inspected, prepared[1], tracing) if prepared else None
        return replace(
            found,
            target=prepared[0].selector if prepared else self.target.selector,
            platform=aim.platform,
            device=aim.device_kind,
            device_count=aim.num_devices,
            mesh=_short(meshes[0], legal) if meshes else "",
            meshes=tuple(_short(plan, legal) for plan in meshes),
            step=step,
            used_axes=self._used(inspected, legal),
            searched_axes=tuple(name for name in self.space.names if name in _covered(legal)),
            axis_types=inspected.axis_types,
            baseline=self.request.baseline or inspected.baseline,
            facts=inspected.facts,
            tokens_per_step=inspected.tokens_per_step,
            knobs=_knobs_of(inspected, legal),
            left_out=enumeration.notices if enumeration else (),
            program=program,
            plans=plans,
            notes=tuple(self.notes),
            problems=tuple(self.problems),
            versions=tuple(sorted((*inspected.versions, *inspected.environment))),
        )

    def _prepare(self, inspected: Inspection) -> tuple[Preparation, LegalPlans] | None:
        """Returns the plans of a search, with the baseline if it fits; None if there is none."""
        try:
            if self.space.mapping:
                self.progress.log("looking at what the knobs do to the arrays")
            inspected = with_knobs(
                self.workers.first,
                inspect_job(self.request, self.target, self.space),
                inspected,
                self.space,
                self.progress,
                timeout_s=self.request.timeout_s,
            )
            request = replace(self.request, baseline="")
            alone = replace(inspected, baseline="")
            prepared = prepare(request, self.target, self.space, alone, Silent())
        except NoFeasibleMesh as error:
            self._add(error if inspected.used_axes else self._nothing_split())
            return None
        except UsageError as error:
            self._add(error)
            return None
        try:
            return prepare(self.request, self.target, self.space, inspected, Silent())
        except UsageError as error:
            self._add(error)
            return prepared

    def _nothing_split(self) -> UsageError:
        names = ", ".join(f"`{name}`" for name in self.space.names)
        return UsageError(
            f"the step splits nothing over the mesh axes {names}: every mesh would do the same",
            hint=f'give arrays shardings such as NamedSharding(mesh, P("{self.space.names[0]}")); '
            "axes of other names go into a search space of your own, --space FILE",
        )

    def _build_plans(
        self, inspected: Inspection, legal: LegalPlans, tracing: _Tracing
    ) -> PlanCount:
        """Builds the step on as many legal plans as the time allows, rules out those that it
        refuses, as a search does, and counts the plans."""
        if not any(plan.num_devices > 1 for plan in tracing.traced):
            return _counted(legal.enumeration, built=0)  # A problem already says why.
        self.progress.log("building the step on the other meshes")
        step = step_ref(self.request.entry, self.target, inspected)
        check = BuildCheck(
            entry=self.request.entry,
            job=lambda plan: BuildJob(step=step, plan=plan),
            pool=self.workers.first,
            progress=Silent(),
            workers=1,
            deadline_s=time.monotonic() + BUILDING_S,
            timeout_s=self.request.timeout_s,
        )
        try:
            for plan in legal.baseline:
                check.require(plan)
        except UsageError as error:
            self._add(error)
        check.build(_most_telling_first(legal.plans, self.space.names), wanted=len(legal.plans))
        refused = check.refused(legal.plans)
        told = {plan for plan, _ in tracing.refused}
        rules = {why.rule for plan, why in refused.items() if plan in told}
        self.notes += refusal_notices(
            {plan: why for plan, why in refused.items() if why.rule not in rules}
        )
        try:
            enumeration = legal.without(refused).enumeration
        except NoFeasibleMesh as error:
            self._add(error)
            return replace(_counted(legal.enumeration, built=0), legal=0)
        return _counted(enumeration, built=sum(map(check.can_be_built, enumeration.legal)))

    def _trace_meshes(self, inspected: Inspection, legal: Sequence[Plan]) -> _Tracing:
        """Builds and traces the step on meshes that make every axis larger than 1, if they can."""
        tracing = _Tracing()
        axes = self._used(inspected, legal)
        plans = covering(legal, axes)[:_MOST_MESHES] or [self._single(inspected)]
        self._begin_second(plans[0], inspected)
        self._trace_all(tracing, inspected, plans)
        if tracing.refused:
            rest = _uncovered(tracing.traced, axes)
            self._trace_all(tracing, inspected, alone(legal, rest)[:_MOST_MESHES])
        if tracing.step is None:
            self._trace_all(tracing, inspected, [self._single(inspected)])
        self._tell_refused(tracing)
        return tracing

    def _trace_all(self, tracing: _Tracing, inspected: Inspection, plans: Sequence[Plan]) -> None:
        for plan in plans:
            if plan in tracing.traced or any(plan == one for one, _ in tracing.refused):
                continue
            answer = self._trace_or_summarize(plan, inspected, is_first=tracing.step is None)
            if isinstance(answer, Failure):
                tracing.refused.append((plan, answer))
                continue
            tracing.traced.append(plan)
            tracing.step = answer if isinstance(answer, StepSummary) else tracing.step

    def _used(self, inspected: Inspection, legal: Sequence[Plan]) -> tuple[str, ...]:
        """Returns the axes that the step uses by itself, and those that a searched mapping makes it
        use."""
        used = {*inspected.used_axes, *_covered(legal)}
        return tuple(name for name in self.space.names if name in used)

    def _single(self, inspected: Inspection) -> Plan:
        mapping = inspect_job(self.request, self.target, self.space).mapping
        axes = tuple(MeshAxis(name=name) for name in self.space.names)
        return Plan(axes=axes, mapping=mapping if inspected.mapping is not None else ())

    def _tell_refused(self, tracing: _Tracing) -> None:
        """Reports meshes for which the step cannot be traced: as a note, or as a problem if there
        are no others."""
        has_mesh = any(plan.num_devices > 1 for plan in tracing.traced)
        for plan, failure in tracing.refused:
            if not has_mesh:
                self._blame(f"on {plan.mesh}: ", failure)
                return
            error = inspection_error(failure, self.request.entry, self.space)
            self.notes.append(f"not on {plan.mesh}: {error.message}")

    def _trace_or_summarize(
        self, plan: Plan, inspected: Inspection, *, is_first: bool
    ) -> StepSummary | Traced | Failure:
        name = self.request.entry.function
        if not is_first:
            self.progress.log(f"calling `{name}` on {plan.mesh}")
            return self._ask(self._trace_job(plan, inspected, "another mesh"), Traced)
        self.progress.log(f"calling `{name}` twice on {plan.mesh}")
        step = step_ref(self.request.entry, self.target, inspected)
        job = SummarizeJob(step=step, plan=plan)
        return self._ask(job, StepSummary, {"lower": "tracing the step"})

    def _trace_job(self, plan: Plan, inspected: Inspection, name: str) -> TraceJob:
        return TraceJob(
            step=step_ref(self.request.entry, self.target, inspected),
            plan=plan,
            text_file=str(self._text(name)),
        )

    def _judge(self, step: StepSummary) -> None:
        """Reports what prevents a search of the step, and what the user should know."""
        if step.change:
            self.problems.append(
                Problem(
                    what="two calls of `build` on the same mesh give other arguments: "
                    + step.change,
                    hint="let what it returns depend on its parameters alone",
                )
            )
        carries = (
            step.carried or step.has_advance or any(argument.is_ref for argument in step.arguments)
        )
        if not step.losses:
            what = "the step returns no scalar float, such as its loss"
            if carries:
                self.notes.append(
                    f"{what}: meshes are compared by the first updates of what it carries on, and "
                    "by arrays of losses if it returns some"
                )
            elif self.target.absent is None:
                other = "; `--step NAME` looks at another function of the script"
                hint = _NO_LOSS + (other if self.request.entry.capture is not None else "")
                self.problems.append(Problem(what=what, hint=hint))
            else:
                self.notes.append(f"{what}: it could not be measured on devices that are here")
        unsaid = [
            argument.name for argument in step.arguments if not argument.spec and argument.shape
        ]
        if unsaid:
            self.notes.append(
                f"nothing says how {count(len(unsaid), 'array')} are split, such as "
                f"`{unsaid[0]}`: the compiler chooses; give them a NamedSharding"
                if len(unsaid) > 1
                else f"nothing says how `{unsaid[0]}` is split: the compiler chooses; give it a "
                "NamedSharding"
            )
        is_captured = self.request.entry.capture is not None
        if step.lost:
            self.notes.append(
                f"`{step.lost[0]}`"
                + (f" and {len(step.lost) - 1} more" if len(step.lost) > 1 else "")
                + ": donated, and no output replaces it, so that it is made anew for every step"
                + ("" if is_captured else "; `Workload(advance=...)` can say what does")
            )
        # For scripts that are run unchanged, the first run has reported this.
        if not carries and not is_captured:
            self.notes.append(
                "no output looks like an argument, so that every step starts from the same "
                "arguments; `Workload(advance=...)` can say how they go on"
            )

    def _compare_programs(
        self, plan: Plan, step: StepSummary, inspected: Inspection
    ) -> ProgramCheck:
        """Checks whether the step is the same program if it is traced again, in this process and in
        another one."""
        self.progress.log("tracing the step in a second process")
        here = self._ask(self._trace_job(plan, inspected, "here"), Traced)
        other = self._in_second(plan, inspected)
        if not isinstance(here, Traced) or not isinstance(other, Traced):
            failed = other if isinstance(here, Traced) else here
            if isinstance(failed, Failure):
                self._blame("traced once more: ", failed)
            return self._program("not looked at", "")
        if here.fingerprint == other.fingerprint == step.fingerprint:
            return self._program("same", "")
        if here.fingerprint == step.fingerprint:
            self.progress.log("tracing the step in a third process, to see why it differs")
            self.workers.first.recycle(self.workers.surroundings)
        third = self._ask(self._trace_job(plan, inspected, "third"), Traced)
        if isinstance(third, Traced) and third.fingerprint == here.fingerprint == step.fingerprint:
            return self._by_seed()
        return self._differing("third" if isinstance(third, Traced) else "second")

    def _begin_second(self, plan: Plan, inspected: Inspection) -> None:
        """Lets the second worker load the script and trace a plan meanwhile."""
        if self.workers.second is not None:
            job = self._trace_job(plan, inspected, "second")
            self.workers.second.submit(job, self.request.timeout_s)
            self.begun = plan

    def _in_second(self, plan: Plan, inspected: Inspection) -> Answer | Failure:
        """Traces a plan in a process with another hash seed."""
        second = self.workers.second
        if second is None:
            # An accelerator serves one process, so the first worker must end.
            seeded = _with_seed(self.workers.surroundings, self.workers.other_seed)
            self.workers.first.recycle(seeded)
            return self._ask(self._trace_job(plan, inspected, "second"), Traced)
        if self.begun != plan:
            second.wait()
            self._begin_second(plan, inspected)
        return second.wait()[0].result

    def _by_seed(self) -> ProgramCheck:
        detail = self._difference("second")
        self.notes.append(
            "the program depends on the order of a set"
            + (f" ({detail})" if detail else "")
            + f": the workers of a search agree on one (PYTHONHASHSEED={hash_seed(os.environ)}), "
            "and so must the processes of a training on several hosts; sort it"
        )
        return self._program("by hash seed", detail)

    def _differing(self, other: str) -> ProgramCheck:
        detail = self._difference(other)
        what = "the step is traced to another program every time"
        self.problems.append(Problem(what=what + (f": {detail}" if detail else ""), hint=CURE))
        return self._program("differs", detail)

    def _difference(self, other: str) -> str:
        texts = [read_text(self._text(name)) for name in ("here", other)]
        return str(first_difference(*texts) or "")

    def _text(self, name: str) -> Path:
        return self.workers.folder / f"{name}.txt"

    def _program(self, found: Sameness, detail: str) -> ProgramCheck:
        return ProgramCheck(
            found=found,
            detail=detail,
            hash_seed=hash_seed(os.environ),
            other_seed=self.workers.other_seed,
        )

    def _ask(self, job: Job, kind: type[_T], told: Mapping[str, str] | None = None) -> _T | Failure:
        """Has a worker do a job.

        Args:
          kind: the class of the answer.
          told: the message for each stage that is shown when the job enters it.
        """

        def on_event(event: dict[str, Any]) -> None:
            if event.get("event") == "stage" and (text := (told or {}).get(event["stage"])):
                self.progress.log(text)

        return ask(self.workers.first, job, kind, self.request.timeout_s, on_event)

    def _blame(self, where: str, failure: Failure) -> None:
        error = inspection_error(failure, self.request.entry, self.space)
        self.problems.append(Problem(what=where + error.message, hint=error.hint))

    def _add(self, error: AutomeshError) -> None:
        self.problems.append(Problem(what=error.message, hint=error.hint))


def covering(legal: Sequence[Plan], axes: Sequence[str]) -> list[Plan]:
    """Returns a few plans that together have every axis above 1 that any plan has above 1. The
    first has most of these axes, the settings of the first legal plan, and even sizes."""
    chosen: list[Plan] = []
    usual = [plan for plan in legal if plan.settings == legal[0].settings]
    for candidates in (usual, legal):
        while left := set(axes) - _covered(chosen):
            best = max(candidates, key=lambda plan: _merit(plan, left), default=None)
            if best is None or not left & _covered([best]):
                break
            chosen.append(best)
    return chosen or list(legal[:1])


def alone(legal: Sequence[Plan], axes: Sequence[str]) -> list[Plan]:
    """Returns, for each axis, the first plan in which only this axis is above 1."""
    found: dict[str, Plan] = {}
    for plan in legal:
        above = _covered([plan])
        if len(above) == 1 and (name := next(iter(above))) in axes:
            found.setdefault(name, plan)
    return list(found.values())


def _most_telling_first(plans: Sequence[Plan], axes: Sequence[str]) -> list[Plan]:
    """Orders plans for a time that may not suffice for all: first each axis with all devices, which
    a step refuses most often; then the meshes with the settings that are tried first."""
    usual = [plan for plan in plans if plan.settings == plans[0].settings]
    return list(dict.fromkeys([*alone(usual, axes), *usual, *plans]))


def _covered(plans: Sequence[Plan]) -> set[str]:
    return {axis.name for plan in plans for axis in plan.axes if axis.size > 1}


def _uncovered(plans: Sequence[Plan], axes: Sequence[str]) -> list[str]:
    covered = _covered(plans)
    return [name for name in axes if name not in covered]


def _merit(plan: Plan, wanted: set[str]) -> tuple[int, int, int]:
    sizes = [axis.size for axis in plan.axes]
    return len(wanted & _covered([plan])), -max(sizes), -plan.num_granules


def _knobs_of(inspected: Inspection, legal: Sequence[Plan]) -> tuple[KnobUse, ...]:
    """Returns keywords of `build`, then logical axes and compiler options that are searched."""
    values: dict[str, dict[str, Scalar]] = {}
    options: set[str] = set()
    for plan in legal:
        options.update(name for name, _ in plan.compiler_options)
        for name, value in plan.settings:
            values.setdefault(name, {})[repr(value)] = value  # As text, because True == 1.
    own = [
        KnobUse(
            name=name,
            kind=type(default).__name__,
            default=default,
            values=tuple(values.pop(name, {}).values()),
        )
        for name, default in inspected.knobs
    ]
    others = [
        KnobUse(name=name.removeprefix(MAPPING), kind=_kind(name, tried, options), default=None,
                values=tuple(tried.values()))
        for name, tried in values.items()
    ]  # fmt: skip
    return (*own, *others)


def _kind(name: str, tried: dict[str, Scalar], options: set[str]) -> str:
    if name.startswith(MAPPING):
        return "logical axis"
    return "compiler option" if name in options else type(next(iter(tried.values()))).__name__


def _counted(enumeration: Enumeration, *, built: int) -> PlanCount:
    return PlanCount(
        built=built,
        enumerated=enumeration.num_plans,
        legal=len(enumeration.legal),
        ruled_out=tuple((rejection.rule, rejection.count) for rejection in enumeration.rejections),
    )


def _short(plan: Plan, legal: Sequence[Plan]) -> str:
    """Returns a plan as text, without the settings that are tried first."""
    return plan.mesh if not legal or plan.settings == legal[0].settings else str(plan)
