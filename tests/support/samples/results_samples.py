"""Results of searches as the tests of the results package see them."""

from dataclasses import replace

from automesh.mesh.axes import DEFAULT_AXES, Plan, parse_mesh
from automesh.outcomes import (
    Collective,
    Compiled,
    Counts,
    Estimated,
    Failed,
    Measured,
    Memory,
    OutOfMemory,
    ReplayOutcome,
    TimedOut,
)
from automesh.report.comparison import Comparison, Verification
from automesh.report.facts import Devices, Provenance, Searched, StudyFacts
from automesh.report.result import Candidate, Footer, Funnel, SearchResult
from tests.support.samples.changed_results import changed

GIB = 2**30


def plan(mesh: str, **knobs: bool | int | float | str) -> Plan:
    return Plan(axes=parse_mesh(mesh, num_devices=None), knobs=tuple(knobs.items()))


def compiled(step_s: float, *, peak_bytes: int = 3 * GIB // 4) -> Compiled:
    gather = Collective(
        kind="all-gather",
        axes=("fsdp",),
        group_size=4,
        count=12,
        payload_bytes=12_000_000,
        wire_bytes=9_000_000,
    )
    reduce = Collective(
        kind="all-reduce",
        axes=("dp", "fsdp"),
        group_size=8,
        count=1,
        payload_bytes=4_000_000,
        wire_bytes=7_000_000,
    )
    return Compiled(
        fingerprint="ab12cd34",
        memory=Memory(
            argument_bytes=500_000_000,
            output_bytes=500_000_000,
            alias_bytes=500_000_000,
            temporary_bytes=peak_bytes - 500_000_000,
            peak_bytes=peak_bytes,
        ),
        counts=Counts(flops=81_000_000_000, hbm_bytes=2_400_000_000, collectives=(gather, reduce)),
        step_s=step_s,
        compile_s=2.5,
    )


def measured(step_s: float, *, half: float = 0.012, **changes: object) -> Measured:
    outcome = Measured(
        step_s=step_s,
        interval_s=(step_s * (1 - half), step_s * (1 + half)),
        rounds_s=(step_s * 1.01, step_s, step_s * 0.99),
        losses=(5.54, 5.31),
        numerics="agree",
        numerics_detail="",
        values="synthetic",
        raced_out=False,
        confirmed=False,
        peak_bytes=3 * GIB // 4,
    )
    return replace(outcome, **changes)


def candidate(
    made: Plan, outcome: object, verdict: str, ratio: float = 1.0, **changes: object
) -> Candidate:
    half = 0.02 if isinstance(outcome, Measured) else 0.0
    span = (ratio * (1 - half), ratio * (1 + half))
    standing = Comparison(verdict=verdict, ratio=ratio, interval=span)
    return replace(Candidate(plan=made, outcome=outcome, standing=standing), **changes)


def estimated_candidate(mesh: str) -> Candidate:
    """A plan of a dry run, of 12 ms."""
    outcome = Estimated(
        step_s=0.012,
        bracket_s=(0.011, 0.015),
        bound_s=0.005,
        memory_bytes=3 * GIB // 4,
        causes=(("compute", 0.012),),
    )
    return candidate(plan(mesh), outcome, "not_measured", peak_bytes=3 * GIB // 4)


def measured_search() -> SearchResult:
    """A search that ran to its end on devices, with every kind of failure."""
    extras = {"bound_by": "compute", "peak_bytes": 3 * GIB // 4}
    first = measured(0.0123, confirmed=True)
    base = measured(0.0161, half=0.02, numerics="reference", confirmed=True)
    odd = measured(
        0.0102,
        numerics="differ",
        numerics_detail="the loss of step 2 is 5.91, the script's dp:8 gives 5.31",
    )
    blank = measured(0.0110, numerics="unverified", numerics_detail="the loss of step 1 is nan")
    ranked = (
        candidate(plan("dp:2,tp:4", remat="dots"), first, "new", **extras),
        candidate(plan("dp:4,tp:2", remat="none"), measured(0.01233), "equal", 1.002, **extras),
        candidate(
            plan("dp:2,fsdp:2,tp:2", remat="full"),
            measured(0.0131, raced_out=True),
            "slower",
            1.063,
            bound_by="fsdp",
            peak_bytes=GIB // 2,
            compiled=compiled(0.0098, peak_bytes=GIB // 2),
        ),
        candidate(plan("dp:8", remat="full"), base, "slower", 1.312, is_baseline=True, **extras),
        candidate(
            plan("fsdp:8", remat="full"),
            compiled(0.0152),
            "not_measured",
            1.171,
            bound_by="fsdp",
            peak_bytes=700 * 2**20,
        ),
        candidate(
            plan("dp:2,fsdp:2,sp:2", remat="none"),
            compiled(0.0289),
            "not_measured",
            2.35,
            bound_by="memory",
            peak_bytes=GIB,
        ),
    )
    out_of_memory = OutOfMemory(
        stage="compile", needed_bytes=31 * GIB // 10, limit_bytes=2 * GIB, detail=""
    )
    fallen = (
        candidate(plan("tp:8", remat="dots"), odd, "excluded"),
        candidate(plan("sp:8", remat="none"), blank, "excluded"),
        candidate(plan("dp:1", remat="none"), out_of_memory, "failed"),
        candidate(
            plan("dp:4,sp:2", remat="dots"),
            Failed(stage="build", reason="ValueError: heads (6) must be a multiple of tp (4)"),
            "failed",
        ),
        candidate(plan("ep:8", remat="full"), TimedOut(stage="compile", limit_s=60.0), "failed"),
    )
    rules = (
        ("axis ep is never used", 120),
        ("dp*fsdp divides batch", 60),
        ("tp divides heads", 9),
        ("sp divides sequence", 5),
        ("tp at most 4", 1),
    )
    funnel = Funnel(
        enumerated=315,
        ruled_out=rules,
        legal=120,
        compiled=93,
        duplicates=20,
        out_of_memory=1,
        failed=1,
        timed_out=1,
        waiting=4,
        measured=6,
    )
    return SearchResult(
        facts=StudyFacts(
            searched=Searched(
                workload="dense_lm",
                axes=DEFAULT_AXES,
                batch_axes=("dp", "fsdp"),
                axis_types=("auto",) * 5,
                tokens_per_step=2048,
                made_up=("params", "opt_state", "batch"),
            ),
            devices=Devices(target="cpu-8", platform="cpu", kind="cpu device", count=8),
            provenance=Provenance(
                source_hash="abc",
                versions=(("automesh", "0.1.0"), ("jax", "0.10.2")),
                location="results/dense_lm-cpu-8-3fa9c1/study.db",
                results_dir="results/dense_lm-cpu-8-3fa9c1",
            ),
            details=("the program depends on the size of `tp` in a way that has no formula",),
        ),
        candidates=(*ranked, *fallen),
        funnel=funnel,
        reference="the script's dp:8",
        verifications=(
            Verification(
                processes=3,
                baseline="dp:8 remat=full",
                gain=Comparison(
                    verdict="slower",
                    ratio=1.309,
                    interval=(1.271, 1.353),
                    basis="fresh processes",
                    processes=3,
                ),
            ),
        ),
        footer=Footer(
            stop_reason="The budget of 5 min is spent. The next best compiled plan is 17 % behind.",
            rules_path="mesh_rules.toml",
            interrupted=False,
            made="2026-11-21T08:07:00Z",
        ),
        notices=("the knob `microbatches` of the space is not taken by `build` and was dropped",),
        command="automesh show results/dense_lm-cpu-8-3fa9c1",
    )


def compiled_search() -> SearchResult:
    """A search for absent hardware: nothing was measured, meshes cross a slow network."""
    meshes = (
        ("dcn.dp:4,fsdp:32,tp:4", 0.412, 1.0, 14 * GIB),
        ("dcn.dp:2,dcn.fsdp:2,fsdp:64,tp:2", 0.441, 1.07, 12 * GIB),
        ("dcn.dp:4,dp:8,fsdp:4,ep:2,tp:2", 0.512, 1.243, 28 * GIB),
        ("dcn.fsdp:4,fsdp:128", 1.48, 3.592, 9 * GIB),
    )
    rows = tuple(
        candidate(
            plan(mesh, remat="full", microbatches=4 if place % 2 else 1),
            compiled(step_s, peak_bytes=peak),
            "not_measured" if place else "best",
            ratio,
            bound_by="dcn.dp" if place else "compute",
            peak_bytes=peak,
            is_baseline=place == 3,
        )
        for place, (mesh, step_s, ratio, peak) in enumerate(meshes)
    )
    base = measured_search()
    funnel = replace(
        base.funnel,
        enumerated=4950,
        ruled_out=(("dp*fsdp divides batch", 4800),),
        legal=150,
        compiled=4,
        duplicates=0,
        out_of_memory=0,
        failed=0,
        timed_out=0,
        waiting=146,
        measured=0,
    )
    return changed(
        base,
        workload="moe_lm",
        target="tpu-v5p-1024-4",
        platform="tpu",
        kind="TPU v5p",
        count=512,
        candidates=rows,
        funnel=funnel,
        reference="",
        verifications=(),
        stop_reason="Interrupted.",
        notices=(),
        tokens_per_step=2_097_152,
        rules_path="",
        interrupted=True,
        location="postgresql+psycopg://me:secret@host/automesh",
        command="automesh search moe_lm.py --target tpu-v5p-1024-4",
    )


def replayed(step_s: float) -> ReplayOutcome:
    return ReplayOutcome(
        step_s=step_s,
        bracket_s=(0.7 * step_s, 1.9 * step_s),
        causes=(
            ("compute", 0.74 * step_s),
            ("ici tp", 0.12 * step_s),
            ("memory", 0.08 * step_s),
            ("dcn dp", 0.05 * step_s),
            ("latency", 0.01 * step_s),
        ),
        communication_s=(("ici tp", 0.5 * step_s), ("dcn dp", 0.2 * step_s)),
        busy_s=(("core", step_s),),
        mfu=0.42 * 0.412 / step_s,
        uncounted=("custom call x: its inside is not seen",),
    )


def predicted_search() -> SearchResult:
    """A search for absent hardware that ran to its end: replays, low effort, no memory left."""
    base = compiled_search()
    ranked = [
        replace(
            one,
            outcome=replace(one.outcome, stored="ab", replay=replayed(one.outcome.step_s)),
            bound_by="compute",
        )
        for one in base.candidates
        if isinstance(one.outcome, Compiled)
    ]
    estimate = Estimated(
        step_s=0.5,
        bracket_s=(0.3, 0.9),
        bound_s=0.0,
        memory_bytes=20 * GIB,
        causes=(("compute", 0.5),),
    )
    low = candidate(
        plan("dcn.dp:4,fsdp:16,tp:8", remat="full", microbatches=1),
        estimate,
        "not_measured",
        1.2,
        compiled=replace(compiled(9.0, peak_bytes=11 * GIB), effort="low"),
    )
    refused = candidate(
        plan("dcn.dp:4,dp:128", remat="none", microbatches=1),
        OutOfMemory(
            stage="compile",
            needed_bytes=131 * GIB,
            limit_bytes=383 * GIB // 4,
            detail="Ran out of memory on HBM",
            reserve_bytes=GIB // 4,
        ),
        "failed",
    )
    funnel = replace(
        base.funnel, compiled=4, out_of_memory=1, screened=1, waiting=145, estimated=140
    )
    return changed(
        base,
        candidates=(*ranked, low, refused),
        funnel=funnel,
        stop_reason="the plans that promised most were compiled and replayed, and nothing was run",
        belief="none of the 145 plans not compiled is believed to be more than 2.0 % faster than "
        "the best (highest chance 1.2 %: dcn.dp:4,fsdp:16,tp:8); its leave-one-out error is 3.1 % "
        "over 4 replayed plans; the estimate orders 5 of 6 pairs that are no ties as the replay "
        "does",
        speeds="data sheet of TPU v5p",
        interrupted=False,
        rules_path="mesh_rules.toml",
        is_ahead=True,
        memory_bytes=383 * GIB // 4,
        reserve_bytes=GIB // 4,
        versions=(
            ("automesh", "0.1.0"),
            ("jax", "0.10.2"),
            ("jax-cuda12-plugin", "0.10.2"),
            ("libtpu", "0.0.42.1"),
            ("LIBTPU_INIT_ARGS", "--xla_x=1"),
        ),
        location="results/moe_lm-tpu-v5p-1024-4-77aa01/study.db",
        results_dir="results/moe_lm-tpu-v5p-1024-4-77aa01",
    )


def empty_search() -> SearchResult:
    """A search that found nothing: all plans failed."""
    base = measured_search()
    fallen = tuple(one for one in base.candidates if one.standing.verdict == "failed")
    funnel = replace(
        base.funnel, legal=3, compiled=0, duplicates=0, waiting=0, measured=0, enumerated=198
    )
    return changed(
        base,
        candidates=fallen,
        funnel=funnel,
        verifications=(),
        tokens_per_step=0,
        rules_path="",
        notices=(),
        stop_reason="Every legal plan was tried.",
    )
