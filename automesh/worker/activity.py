"""Words on what a worker is doing, for the progress line: `calling build on dp:8` (no jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from automesh.program.capture.line_watch import last_line
from automesh.program.nouns import Entry
from automesh.worker.messages import (
    ArraysJob,
    BuildJob,
    CalibrateJob,
    CarryJob,
    CompileJob,
    DevicesJob,
    DiscoverJob,
    InspectJob,
    Job,
    LayoutJob,
    PropagateJob,
    SummarizeJob,
    TraceJob,
    VisitJob,
)

# Is called repeatedly during a wait for jobs, with words on what the workers are doing.
OnWait = Callable[[str], object]
_ONE_DEVICE = "a mesh of one device"


def activity_of(job: Job, stage: str) -> str:
    """Returns a few words on what one job is doing.

    Args:
      stage: the job's stage, as `Stages` reports it.
    """
    match stage:
        case "start":
            return "starting a worker and jax"
        case "layout":
            return "laying meshes out on the devices"
        case "calibrate":
            return "measuring the devices"
        case _:
            return _with_the_script(job, stage)


def doing_all(running: Sequence[tuple[Job, str]]) -> str:
    """Describes what several workers are doing: the first one, and the number of the others.

    Args:
      running: job and stage of each, the longest running one first.
    """
    if not running:
        return ""
    others = f" (and {len(running) - 1} more)" if running[1:] else ""
    return activity_of(*running[0]) + others


def _with_the_script(job: Job, stage: str) -> str:
    match job:
        case LayoutJob() | CalibrateJob() | DevicesJob():
            return "asking jax for its devices"
        case InspectJob() | DiscoverJob() | ArraysJob():
            where = _ONE_DEVICE
        case PropagateJob():
            where = ",".join(f"{name}:{size}" for name, size in job.sizes) or _ONE_DEVICE
        case CarryJob():
            where = "another mesh"
        case BuildJob() | CompileJob() | SummarizeJob() | TraceJob() | VisitJob():
            where = str(job.plan)
    name = _name(job.step.entry)
    if stage == "build" and _runs_script(job):
        at = last_line(job.folder) if isinstance(job, DiscoverJob) else None
        return f"running {name} up to its step" + (f" (at {at})" if at else "")
    words = {
        "load": f"importing {name}",
        "build": f"calling {job.step.entry.function} on {where}",
        "alone": f"{name} has failed: running it by itself, to see whether it fails there, too",
        "lower": f"tracing the step on {where}",
        "compile": f"compiling {where}",
        "materialize": f"making the arguments of {where}",
        "run": f"running {where}",
        "propagate": f"propagating shardings on {where}",
    }
    return words.get(stage, f"at work on {where} ({stage})")


def _runs_script(job: Job) -> bool:
    """Whether `build` is the script itself, run up to its step."""
    if isinstance(job, DiscoverJob | CarryJob):
        return True
    if isinstance(job, LayoutJob | CalibrateJob | DevicesJob):
        return False
    capture = job.step.entry.capture
    return capture is not None and not capture.is_carried


def _name(entry: Entry) -> str:
    return Path(entry.location).name if entry.kind == "script" else entry.location
