"""Arguments that are kept on the host come back as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from automesh.program.capture.build import _on_host  # pyright: ignore[reportPrivateUsage]


def test_a_weak_type_stays_weak() -> None:
    for array in (jnp.full((2, 3), 0.1), jnp.full((2, 3), 0.1, jnp.float32)):
        kept = _on_host(array)
        assert kept is not None
        assert kept.made().weak_type == array.weak_type
        np.testing.assert_array_equal(kept.made(), array)


def test_an_array_that_nobody_has_put_anywhere_stays_so() -> None:
    for array in (jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[0]), jax.random.key(0)):
        kept = _on_host(array)
        assert kept is not None
        assert kept.made().committed == array.committed
