"""From what a record says of XLA to compiler options: flags, and MaxText's names of sets of them.

A record names its flags, or the sets in which MaxText's own launcher keeps them. Flags of the
runtime are no options of a compile; some that were options once are none for the installed
compiler, which is asked for them (`probe`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FUSED = "xla_tpu_enable_async_collective_fusion"
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
_SPARSE_CORE = {
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disjoint_spmem": "false",
    "xla_sc_disable_megacore_partitioning": "true",
}
# As MaxText's benchmarks define them (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py).
SETS: Mapping[str, Mapping[str, str]] = {
    "DENSE_VMEM_LIMIT_FLAG": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    "MOE_VMEM_LIMIT_FLAG": {"xla_tpu_scoped_vmem_limit_kib": "81920"},
    "CF_FOR_ALL_GATHER": {
        _FUSED: "true",
        f"{_FUSED}_fuse_all_gather": "true",
        f"{_FUSED}_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    },
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": {
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
        "xla_tpu_assign_all_reduce_scatter_layout": "true",
    },
    "DATA_PARALLEL_OVERLAP": {
        "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
        "xla_tpu_data_parallel_opt_different_sized_ops": "true",
    },
    "HOST_OFFLOAD_FLAGS": {
        "xla_tpu_enable_all_experimental_scheduler_features": "true",
        "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
        "xla_tpu_host_transfer_overlap_limit": "24",
        "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
        "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
        "xla_tpu_enable_ag_backward_pipelining": "true",
        "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
        "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
        "xla_max_concurrent_host_send_recv": "100",
        "xla_tpu_scheduler_percent_shared_memory_limit": "100",
        "xla_latency_hiding_scheduler_rerun": "2",
    },
    "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE": {
        f"{_FUSED}_fuse_all_reduce": "false",
        f"{_OFFLOAD}_all_reduce": "true",
        "xla_tpu_enable_all_reduce_offload_tracing": "true",
        **_SPARSE_CORE,
    },
    "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR": {
        f"{_FUSED}_fuse_all_gather": "false",
        f"{_FUSED}_fuse_all_reduce": "false",
        f"{_FUSED}_fuse_reduce_scatter": "false",
        f"{_OFFLOAD}_all_gather": "true",
        f"{_OFFLOAD}_reduce_scatter": "true",
        f"{_OFFLOAD}_all_reduce": "true",
        "xla_tpu_enable_all_gather_offload_tracing": "true",
        "xla_tpu_enable_reduce_scatter_offload_tracing": "true",
        "xla_tpu_enable_all_reduce_offload_tracing": "true",
        **_SPARSE_CORE,
    },
    "DISABLE_COLLECTIVE_MATMUL": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
    "DISABLE_MEGACORE_FUSION_ALLOW_AGS": {"xla_tpu_megacore_fusion_allow_ags": "false"},
    "ENABLE_ASYNC_COLLECTIVE_PERMUTE": {"xla_enable_async_collective_permute": "true"},
}
# What the launcher does to the servers of Pathways, with the set that follows: nothing of a step.
_OF_SERVERS = ("REMOVE", "ADD_SERVER", "ADD_PROXY", "ADD_WORKER", "ENHANCED_LAUNCH_BARRIER")
_OPTION = re.compile(r"--(xla_\w+)=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compiler options.

    Attributes:
      values: by name.
      left_out: words of the record that are none, and why.
    """

    values: dict[str, str]
    left_out: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """`NAME=VALUE` each."""
        return [f"{name}={value}" for name, value in self.values.items()]

    def without(self, refused: Mapping[str, str]) -> dict[str, str]:
        """Those that the compiler takes; `refused` is by `NAME=VALUE`."""
        return {
            name: value for name, value in self.values.items() if f"{name}={value}" not in refused
        }


def options_of(text: str) -> Options:
    """Reads what a record says of XLA; of an option that is said twice the last value counts.

    >>> options_of("--xla_tpu_a=true DISABLE_COLLECTIVE_MATMUL TPU_MEGACORE=X").values
    {'xla_tpu_a': 'true', 'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
    """
    values, left_out = dict[str, str](), list[str]()
    for word in text.split():
        if match := _OPTION.fullmatch(word):
            # As jax takes truth values; the flags of a command line are read in any case.
            value = {"True": "true", "False": "false"}.get(match[2], match[2])
            values[match[1]] = value
        elif word in SETS:
            values |= SETS[word]
        elif word in _OF_SERVERS:
            left_out.append(f"{word} (of servers)")
        else:
            left_out.append(f"{word} (no option, or its value is not stated)")
    return Options(values=values, left_out=tuple(left_out))
