"""Every test sees 16 virtual CPU devices; set before anything can import jax."""

import os
import signal
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ.pop("XLA_FLAGS", None)
# What somebody has calibrated on this machine is none of a test's business.
os.environ["AUTOMESH_PROFILES"] = str(Path(__file__).parent / "no-profiles")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for any command in the background: what the tests start would ignore their Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
