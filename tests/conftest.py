"""Every test sees 16 virtual CPU devices; set before anything can import jax."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ.pop("XLA_FLAGS", None)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
