"""How fast plans are priced: time, causes and memory of a million distinct ones."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pricing import PlanPrices, price
from automesh.cost.terms import Terms
from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.fabric.fabric import Layouts
from automesh.hardware.model import HardwareModel
from automesh.mesh.plan_arrays import Batch, Sizes
from automesh.program.nouns import Entry
from automesh.report.progress import Progress
from automesh.space.spec import read_space
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import open_session
from automesh.worker.messages import LayoutJob, Surroundings
from automesh.worker.pool import Pool

# A slice of 4,096 chips, all its factorizations, alone and in 2, 4 ... 8,192 slices.
TORUS = (16, 16, 16)
CHIPS_POWER, MOST_GRANULES_POWER = 12, 13
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is priced again and again."""

    terms: Mapping[tuple[str, ...], Terms]
    batch: Batch
    hardware: HardwareModel

    def prices(self) -> PlanPrices:
        return price(
            self.terms,
            self.batch,
            hardware=self.hardware,
        )


def measured(
    script: Path, arguments: tuple[str, ...], target: str, space: Path, progress: Progress
) -> dict[str, int]:
    """Prices a million plans of one step, whose terms are made first.

    Returns:
      Plain values for JSON: plans, plans per second (the best and the first of some repeats) and
      the size of the largest terms.
    """
    bench = _bench(script, arguments, target, space, progress)
    wall_s: list[float] = []
    cpu_s: list[float] = []
    for _ in range(REPEATS):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        prices = bench.prices()
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
        if prices.needs_own.any():
            raise RuntimeError(f"{int(prices.needs_own.sum())} plans have no price")
    plans = len(bench.batch)
    largest = max(bench.terms.values(), key=lambda terms: len(terms.kernels))
    return {
        "plans": plans,
        "plans_per_s": round(plans / min(wall_s)),
        "first_plans_per_s": round(plans / wall_s[0]),
        "plans_per_cpu_s": round(plans / min(cpu_s)),
        "sets_of_axes": len(bench.terms),
        "kernels": len(largest.kernels),
        "collectives": len(largest.collectives),
        "memory_points": len(largest.points),
    }


def _bench(
    script: Path, arguments: tuple[str, ...], target: str, space: Path, progress: Progress
) -> Bench:
    aim = parse_target(target, os.environ)
    if aim.absent is None:
        raise ValueError(f"{target} is here; the benchmark is about devices that are not")
    with tempfile.TemporaryDirectory() as folder:
        request = SearchRequest(
            subject=Entry(kind="script", location=str(script.resolve()), argv=arguments),
            target=target,
            space=str(space),
            rules="",
            results=Path(folder),
            dry_run=True,
        )
        with open_session(request, aim, read_space(str(space)), progress) as session:
            session.estimate(share=1.0, terms_folder=Path(folder))
        inspection = session.preparation.inspection
        kept = TermsCache(
            folder=Path(folder),
            source_hash=inspection.source_hash,
            versions=session.preparation.provenance,
        ).all()
        # Guards would send the extreme plans of this benchmark to propagations of their own.
        terms = {
            one.propagation.terms.active: replace(one.propagation.terms, guards=(), fixed=())
            for one in kept
        }
        names = tuple(axis for axis in kept[0].job.axis_names if any(axis in s for s in terms))
        batch = _with_terms(every_plan(names), terms)
        granule = aim.absent.fabric
        fabric = replace(
            granule,
            torus=TORUS,
            wraps=(True, True, True),
            num_granules=2**MOST_GRANULES_POWER,
            granule_devices=2**CHIPS_POWER,
        )
        shapes = tuple(map(tuple, np.unique(batch.ici, axis=0).tolist()))
        layouts = _laid_out(shapes, aim.absent.device_kind, Path(folder))
    return Bench(
        terms=terms,
        batch=batch,
        hardware=HardwareModel(
            fabric=fabric, layouts=layouts, speeds=datasheet_speeds(fabric.chip, fabric)
        ),
    )


def every_plan(names: tuple[str, ...]) -> Batch:
    """All ways to split the chips of a slice, and every number of slices, over the axes."""
    ici = 2 ** factorizations(CHIPS_POWER, len(names))
    dcn = 2 ** np.vstack(
        [factorizations(power, len(names)) for power in range(MOST_GRANULES_POWER + 1)]
    )
    return Batch(
        names=names,
        ici=np.repeat(ici, len(dcn), axis=0),
        dcn=np.tile(dcn, (len(ici), 1)),
    )


def factorizations(power: int, axes: int) -> Sizes:
    """Exponents of every ordered product of `axes` powers of two that is `2**power`."""
    if axes == 1:
        return np.array([[power]], np.int64)
    found: list[NDArray[np.int64]] = []
    for head in range(power + 1):
        tails = factorizations(power - head, axes - 1)
        found.append(np.hstack([np.full((len(tails), 1), head, np.int64), tails]))
    return np.vstack(found)


def _with_terms(batch: Batch, terms: Mapping[tuple[str, ...], Terms]) -> Batch:
    """Leaves out plans of sets of axes that no legal plan of the search has (tp alone)."""
    weights = 2 ** np.arange(len(batch.names))
    sets = [sum(weights[batch.names.index(axis)] for axis in active) for active in terms]
    kept = np.isin((batch.sizes > 1) @ weights, sets)
    return Batch(names=batch.names, ici=batch.ici[kept], dcn=batch.dcn[kept])


def _laid_out(shapes: tuple[tuple[int, ...], ...], device_kind: str, folder: Path) -> Layouts:
    job = LayoutJob(
        platform="tpu", device_kind=device_kind, torus=TORUS, devices_per_chip=1, shapes=shapes
    )
    with Pool(
        size=1,
        surroundings=Surroundings(platforms="cpu"),
        log_dir=folder / "logs",
        memory_limit_bytes=4 * 2**30,
    ) as pool:
        answer = pool.run(job, 600.0)
    if not isinstance(answer, Layouts):
        raise RuntimeError(f"no layouts: {answer}")
    if answer.refused:
        raise RuntimeError(f"jax lays out none of {answer.refused[:3]}")
    return answer
