"""TPUs, whose chips are linked in a torus inside a slice."""

from __future__ import annotations

from automesh.platforms.platform import Platform, Plugin, Scheduling

# jax's EffortLevel O0 (jax/_src/config.py); XLA takes the number. It skips slow passes that change
# the schedule: a compile takes a fifth of the time, and still rejects programs that need too much
# memory.
_O0 = (("optimization_level", 9),)

TPU = Platform(
    name="tpu",
    devices="TPUs",
    one_device="a TPU, whose chips are linked in a torus",
    backends=("tpu",),
    lowered_for=("tpu",),
    fabric="torus",
    # TPUs multiply f32 in one bf16 pass unless told otherwise (jax's default precision).
    slower_bits=((64, 16.0),),
    # The process also needs memory for prefetched batches, metrics, and the code of other programs
    # (initialization, evaluation); the compiler's limit already excludes the runtime's own share.
    reserve_bytes=256 * 2**20,
    library_variable="TPU_LIBRARY_PATH",
    scheduling=Scheduling(
        hides=frozenset(("all-gather", "collective-permute")),
        has_slots=True,
        combined_kinds=frozenset(("all-reduce",)),
        combined_bytes=30.0 * 2**20,
        # Such a sum is never scattered: each device gets it whole and keeps a part. Seen in
        # programs of libtpu 0.0.42 for 16 chips of v5e without rings; over 4 or 8 of them it is.
        whole_sum_cost=2.0,
        # By default the compiler made rings of all sizes in the programs of `cost.windowed`
        # (weights of 4 MiB and more), so that its default counts as 0.
        window_option="xla_jf_spmd_threshold_for_windowed_einsum_mib",
        source="54 schedules of libtpu 0.0.42 for v5e: gathers are asynchronous where a product "
        "stands before their first use, reductions never",
    ),
    quick_options=_O0,
    low_effort_options=_O0,
    plugins=(Plugin(module="libtpu", packages=("libtpu",)),),
    compiler="libtpu",
    jax_extra="tpu",
    package_prefix="libtpu",
    # Several processes may then compile with libtpu at the same time, which is safe as none of them
    # opens a TPU; and libtpu does not ask Google's metadata server for this machine's TPUs.
    worker_variables=(("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_SKIP_MDS_QUERY", "1")),
    link_latency_s=1e-6,
    cluster_keys=("torus", "wraps", "slices", "host"),
    needed_cluster_keys=("torus",),
)
