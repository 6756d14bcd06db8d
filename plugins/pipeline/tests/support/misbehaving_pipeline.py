"""A training step whose second stage fails or hangs while it runs: `... [fail|hang]`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def main(how: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    import jax
    import numpy as np
    import optax

    from automesh import pipeline
    from automesh.errors import AutomeshError

    def misbehave(x: Any) -> Any:
        if how == "fail":
            raise RuntimeError("no rows today")
        time.sleep(1000)

    def second(w: Any, x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x @ w + jax.pure_callback(misbehave, like, jax.lax.stop_gradient(x))

    step = pipeline.train_step(
        pipeline.chain([lambda w, x: x @ w, second], lambda y, _: jax.numpy.mean(y**2)),
        optimizer=optax.sgd(0.1),
        mesh=jax.sharding.Mesh(np.array(jax.devices()), ("pp",)),
        num_microbatches=2,
        timeout_s=5,
    )
    state = step.init((np.eye(8), np.eye(8)), np.ones((4, 8)))
    try:
        step(state, np.ones((4, 8)))
    except AutomeshError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
