"""A stand-in for EasyDeL, see the README beside it.

Like EasyDeL it changes variables of the process when it is imported, and starts a cluster.
"""

import os

if os.environ.get("EASYDEL_AUTO") != "0":
    raise RuntimeError("a newer XLA ends the process: Unknown flag in XLA_FLAGS")
os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_enable_async_collective_fusion=true"
os.environ.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "true")
if os.environ.get("ENABLE_DISTRIBUTED_INIT") != "0":
    raise RuntimeError("jax.distributed.initialize() must be called before any JAX computations")
