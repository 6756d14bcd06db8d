"""The messages between parent and worker.

Parent to worker: `{"job": ..., "label": ...}` and `{"reply": {...}}`.
Worker to parent: `{"accepted": true}` once jax is imported, `{"event": ...}` with `"reply": true`
if it waits for a reply, `{"answer": ...}`, `{"failure": ..., "retire": bool, "doubtful": bool,
"last_line": str}`, where the last line ends the job's output in the log. An event that enters the
stage `start` stops the clock of the job until the next stage.
"""

from __future__ import annotations

from typing import Any

from automesh.errors import AutomeshError
from automesh.hardware.fabric.fabric import Layouts
from automesh.jsonio import from_json, to_checked_json, to_json
from automesh.outcomes import Failure
from automesh.program.capture.nouns import CarryCheck, Discovery, OtherDevices
from automesh.program.nouns import (
    Attachment,
    BuildAnswer,
    CompileAnswer,
    Inspection,
    Lowered,
    ProbeTimes,
    Propagation,
    Traced,
    VisitAnswer,
)
from automesh.program.step_summary import StepSummary
from automesh.space.mapping import StepMapping
from automesh.worker.messages import (
    BuildJob,
    CompileJob,
    Job,
    SummarizeJob,
    TraceJob,
    VisitJob,
)
from automesh.worker.wire import Message

Answer = (
    Layouts
    | Inspection
    | Discovery
    | OtherDevices
    | CarryCheck
    | StepMapping
    | Attachment
    | BuildAnswer
    | CompileAnswer
    | Lowered
    | StepSummary
    | Traced
    | VisitAnswer
    | ProbeTimes
    | Propagation
)

# The worker's exit code (EX_IOERR of sysexits.h) when user code closed the channel.
CHANNEL_LOST = 74
NO_CHANNEL = "the script closed the worker's control channel"

_ANSWERS: dict[str, Any] = {
    "inspect": Inspection,
    "discover": Discovery | OtherDevices,
    "carry": CarryCheck,
    "arrays": StepMapping,
    "devices": Attachment,
    "build": BuildAnswer,
    "compile": CompileAnswer | Lowered,
    "summarize": StepSummary,
    "trace": Traced,
    "visit": VisitAnswer,
    "layout": Layouts,
    "calibrate": ProbeTimes,
    "propagate": Propagation,
}


def job_message(job: Job, label: str) -> Message:
    """Makes the order to do a job; `label` is the heading of its part of the log."""
    return {"job": to_json(job, Job), "label": label}


def read_job(message: Message) -> Job:
    """Reads the job of an order.

    Raises:
      AutomeshError: the message is not one.
    """
    return from_json(message.get("job"), Job)


def answer_message(job: Job, answer: object) -> Message:
    """Makes the message with the answer to a job.

    Raises:
      AutomeshError: `answer` is not of the type that this kind of job has.
    """
    kind = _ANSWERS[job.kind]
    if not isinstance(answer, kind):
        raise AutomeshError(f"a job of kind {job.kind} was answered with a {type(answer).__name__}")
    # A wrong type deep inside must fail here, where the job is known.
    return {"answer": to_checked_json(answer, kind)}


def failure_message(outcome: Failure, *, retire: bool, doubtful: bool = False) -> Message:
    """Makes the message with the failure of a job.

    Args:
      retire: whether the next job needs a new process.
      doubtful: whether an earlier job of this process may be the cause.
    """
    return {"failure": to_json(outcome, Failure), "retire": retire, "doubtful": doubtful}


def read_result(job: Job, message: Message) -> Answer | Failure:
    """Reads the answer or the failure in the last message of a job.

    Raises:
      AutomeshError: it holds neither, or an answer to another kind of job.
    """
    if "failure" in message:
        return from_json(message["failure"], Failure)
    return from_json(message.get("answer"), _ANSWERS[job.kind])


def label(job: Job) -> str:
    """Returns a heading for the log: `compile dp:2,tp:4 remat=full`."""
    has_plan = isinstance(job, BuildJob | CompileJob | SummarizeJob | TraceJob | VisitJob)
    return f"{job.kind} {job.plan}" if has_plan else job.kind
