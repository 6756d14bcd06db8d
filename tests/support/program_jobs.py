"""Doing jobs in the test's own process: real jax on the first of its virtual devices."""

import sys

import pytest

from automesh.mesh.axes import DEFAULT_AXES, Plan, parse_mesh
from automesh.program.nouns import Entry, Inspection, StepRef
from automesh.tuner.measure import rung as measure_rung
from automesh.tuner.measure import time_left
from automesh.tuner.measure.final import FEWEST
from automesh.worker.handlers import jobs
from automesh.worker.messages import CompileJob, InspectJob, VisitJob


def script(path, function="build", argv=()):
    return Entry(kind="script", location=str(path), function=function, argv=tuple(argv))


class Worker:
    """Sends jobs about one script, as a parent would."""

    def __init__(self, entry, cache_dir, names=DEFAULT_AXES):
        self.entry, self.names, self.cache_dir = entry, tuple(names), str(cache_dir)
        self.store_dir = ""
        self.events = []
        self.go = True
        self._inspection = None

    def inspect(self) -> Inspection:
        if self._inspection is None:
            job = InspectJob(step=self.step(), axis_names=self.names)
            self._inspection = jobs.handle(job, self._emit)
        return self._inspection

    def compile(self, mesh, knobs=(), options=()):
        return jobs.handle(
            CompileJob(
                plan=self.plan(mesh, knobs, options), store_dir=self.store_dir, **self._common()
            ),
            self._emit,
        )

    def visit(
        self,
        mesh,
        knobs=(),
        options=(),
        steps=0,
        samples=0,
        loss_steps=3,
        warmup_s=0.0,
        sensitivity=False,
        keep=False,
    ):
        plan = self.plan(mesh, knobs, options)
        job = VisitJob(
            plan=plan,
            steps=steps,
            samples=samples,
            loss_steps=loss_steps,
            warmup_s=warmup_s,
            sensitivity=sensitivity,
            keep=keep,
            **self._common(),
        )
        return jobs.handle(job, self._emit)

    def plan(self, mesh, knobs=(), options=()):
        axes = parse_mesh(mesh, self.names)
        return Plan(axes=axes, knobs=tuple(knobs), compiler_options=tuple(options))

    def step(self, **found):
        return StepRef(entry=self.entry, **found)

    def _common(self):
        seen = self.inspect()
        step = self.step(axis_types=seen.axis_types, facts=seen.facts)
        return {"step": step, "cache_dir": self.cache_dir}

    def _emit(self, event):
        self.events.append(event)
        return {"go": self.go} if event.get("reply") else {}

    def stages(self):
        return [event["stage"] for event in self.events if event["event"] == "stage"]


def few_processes(monkeypatch):
    """Lets a search end with the fewest processes that become evidence: each starts jax anew."""
    monkeypatch.setattr(measure_rung, "EARLY", FEWEST)
    monkeypatch.setattr(measure_rung, "LOOKS", (FEWEST,))
    monkeypatch.setattr(time_left, "LOOKS", (FEWEST,))


def forget_scripts(before_modules):
    """Drops what jobs and imports of scripts have left in this process."""
    jobs._MEMORY.scripts.loaded.clear()
    jobs._MEMORY.ready.clear()
    jobs._MEMORY.domains.clear()
    jobs._MEMORY.programs.clear()
    for name in set(sys.modules) - before_modules:
        where = getattr(sys.modules[name], "__file__", None) or ""
        if "site-packages" not in where and "automesh/" not in where and "/lib/python" not in where:
            del sys.modules[name]


@pytest.fixture
def own_process(monkeypatch, tmp_path):
    """Undoes what loading a script does to the process; stays in an empty directory meanwhile."""
    import jax

    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    directory = jax.config.jax_compilation_cache_dir
    yield tmp_path
    forget_scripts(before)
    if jax.config.jax_compilation_cache_dir != directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
