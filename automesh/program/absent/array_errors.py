"""Real arrays on devices that are not here: one sentence instead of jax's many (jax)."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from automesh.errors import AutomeshError, UsageError

# What jax says when it is to put data on devices that can only be compiled for, or to run there;
# and of what stands in for devices.
_SAID = re.compile(
    r"compile-only client|\bExecutable' object has no attribute"
    r"|id=\d+, not here|a device that is not here"
)


@contextmanager
def explaining_real_arrays(function: str) -> Generator[None]:
    """Says what to do if the body puts arrays on devices that are not here.

    Args:
      function: the user's, which the body calls.

    Raises:
      UsageError: it does.
      Exception: whatever else the body raises.
    """
    try:
        yield
    except Exception as error:
        # An error while the script was loaded is explained already, without this in mind.
        seen = error.__cause__ if isinstance(error, AutomeshError) else error
        if seen is None or not _SAID.search(str(seen)):
            raise
        raise UsageError(
            f"`{function}`, or the script that it is in, puts arrays on devices that are not here",
            hint="return `jax.ShapeDtypeStruct(shape, dtype, sharding=...)` instead; "
            "`jax.eval_shape` makes them from the function that makes the arrays",
        ) from error
