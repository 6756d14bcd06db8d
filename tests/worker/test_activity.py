"""What progress lines say of workers."""

from dataclasses import replace
from pathlib import Path

import pytest

from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import Entry, StepRef
from automesh.worker.activity import activity_of, doing_all
from automesh.worker.messages import (
    CompileJob,
    DevicesJob,
    DiscoverJob,
    InspectJob,
    Job,
    PropagateJob,
)

ENTRY = Entry(kind="script", location="/somewhere/train.py", function="build")
PLAN = Plan(axes=(MeshAxis(name="dp", ici=8),))
INSPECT = InspectJob(step=StepRef(entry=ENTRY), axis_names=("dp",))
COMPILE = CompileJob(step=StepRef(entry=ENTRY), plan=PLAN, cache_dir="")
PROPAGATE = PropagateJob(
    step=StepRef(entry=ENTRY),
    axis_names=("dp", "tp"),
    knobs=(),
    sizes=(("dp", 2), ("tp", 4)),
    probes=(),
    platform="cpu",
)


@pytest.mark.parametrize(
    ("job", "stage", "words"),
    [
        (INSPECT, "start", "starting a worker and jax"),
        (INSPECT, "load", "importing train.py"),
        (INSPECT, "build", "calling build on a mesh of one device"),
        (DevicesJob(), "load", "asking jax for its devices"),
        (DiscoverJob(step=StepRef(entry=ENTRY)), "build", "running train.py up to its step"),
        (
            DiscoverJob(step=StepRef(entry=ENTRY)),
            "alone",
            "train.py has failed: running it by itself, to see whether it fails there, too",
        ),
        (COMPILE, "build", "calling build on dp:8"),
        (COMPILE, "compile", "compiling dp:8"),
        (COMPILE, "run", "running dp:8"),
        (PROPAGATE, "propagate", "propagating shardings on dp:2,tp:4"),
        (PROPAGATE, "lower", "tracing the step on dp:2,tp:4"),
        (
            replace(
                COMPILE,
                step=StepRef(entry=Entry(kind="module", location="my.steps", function="make")),
            ),
            "load",
            "importing my.steps",
        ),
    ],
)
def test_words(job: Job, stage: str, words: str) -> None:
    assert activity_of(job, stage) == words


def test_the_line_of_a_script_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    job = DiscoverJob(step=StepRef(entry=ENTRY), folder=str(tmp_path))
    assert activity_of(job, "build") == "running train.py up to its step"
    (tmp_path / "line").write_bytes(b"train.py:12\ncompiles".ljust(64, b"\0"))
    (tmp_path / "line").chmod(0o600)
    said = "running train.py up to its step (at train.py:12, which jax compiles)"
    assert activity_of(job, "build") == said


def test_the_first_of_several_is_named() -> None:
    assert doing_all([]) == ""
    assert doing_all([(COMPILE, "compile")]) == "compiling dp:8"
    several = [(COMPILE, "compile"), (PROPAGATE, "lower"), (INSPECT, "load")]
    assert doing_all(several) == "compiling dp:8 (and 2 more)"
