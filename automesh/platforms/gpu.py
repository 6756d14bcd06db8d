"""NVIDIA GPUs, joined by NVLink inside a node."""

from __future__ import annotations

from automesh.collectives import KINDS
from automesh.platforms.platform import Platform, Plugin, Scheduling

# Without a GPU there is nothing to time kernels on, and Triton's untimed tiles are arbitrary:
# matrix products go to cuBLAS.
_UNTIMED = (("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False))
# XLA replaces small sums inside an NVLink domain by its own kernels, with which jaxlib 0.12.0.1
# crashes on 64 devices. A replay treats them like NCCL's.
_NO_OWN_KERNELS = (("xla_gpu_experimental_use_collective_kernels", ""),)

GPU = Platform(
    name="gpu",
    devices="NVIDIA GPUs",
    one_device="a GPU, which sits in a node",
    backends=("gpu", "cuda"),
    lowered_for=("cuda",),
    fabric="switch",
    sends_at_once=True,
    library_operations=frozenset({"convolution"}),  # by cuDNN; Triton also does products
    # f32 multiplications run as TF32, half of bf16 (NVIDIA data sheets, A100 to B200).
    slower_bits=((32, 2.0), (64, 16.0)),
    # jax takes three quarters of a GPU's memory at its start and no more (its documentation, "GPU
    # memory allocation"); a variable changes that. Of its two names jaxlib 0.10 calls the second
    # one deprecated (jaxlib/xla_client.py).
    reserve_share=0.25,
    share_variables=("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    scheduling=Scheduling(
        hides=frozenset(kind.name for kind in KINDS if kind.stablehlo),
        combined_kinds=frozenset(("all-reduce", "all-gather", "reduce-scatter")),
        combined_bytes=30.0 * 2**20,
        source="xla/service/gpu/gpu_compiler.cc: asynchronous collectives for all kinds, combiners "
        "with thresholds of 30 MiB",
    ),
    quick_options=_UNTIMED,
    needed_options=_UNTIMED + _NO_OWN_KERNELS,
    plugins=tuple(
        Plugin(
            module=f"jax_cuda{major}_plugin",
            packages=(f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt"),
        )
        for major in (12, 13)
    ),
    compiler="the CUDA plugin of jax",
    jax_extra="cuda12-local",
    package_prefix="jax-cuda",
    link_latency_s=3.4e-6,  # NCCL's ring over NVLink
    cluster_keys=("nodes", "devices_per_node", "joined_devices"),
    needed_cluster_keys=("nodes", "devices_per_node"),
)
