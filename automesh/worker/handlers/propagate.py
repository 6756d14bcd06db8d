"""Does the propagations of one call of `build`, and keeps the parts that they share (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from automesh.mesh.axes import PIPELINE, MeshAxis
from automesh.plugins.pipelines import Stages, pipelines_of
from automesh.program.nouns import Propagation
from automesh.program.script.build import Built
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from automesh.worker.handlers.stages import Emit
from automesh.worker.messages import LOWERINGS, PropagateJob


@dataclass(slots=True, kw_only=True)
class Propagations:
    """The shared parts of the lowerings of one call of `build`.

    Attributes:
      build: the step on a mesh of these axes.
      programs: lowered programs of an ordinary step.
      asked: what user code asked about absent devices, in words.
    """

    build: Callable[[Sequence[MeshAxis]], Built]
    programs: Programs
    asked: dict[str, None] = field(default_factory=dict[str, None])
    _pipelines: dict[int, Stages | None] = field(default_factory=dict[int, "Stages | None"])

    @staticmethod
    def of(job: PropagateJob, build: Callable[[Sequence[MeshAxis]], Built]) -> Propagations:
        """Makes an object for the call of a job, with nothing lowered yet."""
        programs = Programs(
            build=build,
            axis_names=job.axis_names,
            platform=job.platform,
            seen=dict(job.seen),
        )
        return Propagations(build=build, programs=programs)

    def answer(self, job: PropagateJob, enter: Callable[[str], None], emit: Emit) -> Propagation:
        """Does one job.

        Args:
          enter: is called with the name of each stage.
          emit: sends an event to the parent and returns its reply.

        Raises:
          StepRefused, Exception: see `propagate`.
        """
        self.programs.lowerings.exchange = lambda news: emit(
            {"event": LOWERINGS, "reply": True, **news}
        )
        ranks = dict(job.sizes).get(PIPELINE, 1)
        stages = self._stages(job, ranks, enter) if ranks > 1 else None
        if stages is None:
            return propagate(
                self.programs,
                sizes=job.sizes,
                probes=job.probes,
                exact=job.exact,
                largest=job.largest,
                enter=enter,
                cure=job.cure,
            )
        # The programs of stages are few, and are not passed on.
        return stages.propagate(sizes=job.sizes, probes=job.probes, exact=job.exact, enter=enter)

    def _stages(self, job: PropagateJob, ranks: int, enter: Callable[[str], None]) -> Stages | None:
        """Returns the stages of a pipeline with `ranks` ranks; None if the step is no pipeline."""
        if ranks not in self._pipelines:
            enter("build")
            sizes = dict(job.sizes)
            built = self.build(
                [MeshAxis(name=name, ici=sizes.get(name, 1)) for name in job.axis_names]
            )
            self._pipelines[ranks] = None
            if (pipelines := pipelines_of(built.workload.step)) is not None:
                self._pipelines[ranks] = pipelines.stages(
                    build=self.build,
                    axis=PIPELINE,
                    ranks=ranks,
                    axis_names=job.axis_names,
                    platform=job.platform,
                )
        return self._pipelines[ranks]
