"""CPUs: virtual devices that share the cores of one machine."""

from __future__ import annotations

from automesh.platforms.platform import Platform, Scheduling

CPU = Platform(
    name="cpu",
    devices="CPUs",
    backends=("cpu",),
    lowered_for=("cpu",),
    fabric="shared",
    slower_bits=((64, 2.0),),
    # CpuInstructionFusion (xla/service/cpu/cpu_instruction_fusion.cc).
    least_joined=128,
    most_evaluations=15,
    scheduling=Scheduling(
        combined_kinds=frozenset(("all-reduce",)),
        combined_bytes=30.0 * 2**20,
        widens=True,
        source="passes of jaxlib 0.10.2's CPU compiler: float-normalization-bf16, "
        "all-reduce-promotion, cpu-all-reduce-combiner; no reduce-scatter is made, thunks of "
        "collectives wait",
    ),
    # Only the shardings of such programs are needed, so that fast compiles matter more than code.
    quick_options=(
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
    ),
)
