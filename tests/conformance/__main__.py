"""`python -m tests.conformance [FILE]`: see `tests.conformance.cases`."""

from __future__ import annotations

import os
import sys
import warnings

from tests.conformance.cases import main

if __name__ == "__main__":
    # Sixteen virtual CPU devices, as for the tests; set before anything imports jax.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "16",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    os.environ.pop("XLA_FLAGS", None)
    warnings.simplefilter("error")
    # As for the tests, in pyproject.toml.
    warnings.filterwarnings("ignore", "", DeprecationWarning, "haliax")
    sys.exit(main())
