"""A small training loop whose mesh is given by flags, in several styles, for the tests."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--style", default="decorated")
    parser.add_argument("--metrics", default="")
    parser.add_argument("--steps", type=int, default=10**9)
    given = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = np.array(jax.devices()[: given.fsdp * given.tp])
    mesh = Mesh(devices.reshape(given.fsdp, given.tp), ("fsdp", "tp"))

    def update(weights, batch):
        def loss_of(weights):
            return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"] - batch) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), {"loss": loss}

    class Trainer:
        @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
        def step(self, weights, batch):
            return update(weights, batch)

    def placed(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    @jax.jit
    def make(key):
        return jax.random.normal(key, (64, 128)) * 0.1

    key = jax.random.key(0)
    weights = {
        "up": placed(make(key), "fsdp", "tp"),
        "down": placed(make(key).T, "tp", "fsdp"),
    }
    batch = placed(jax.random.normal(key, (32, 64)), "fsdp")

    @jax.jit
    def mean_of(x):
        return x.mean()

    # Smaller than the step, and called more often.
    for _ in range(20):
        mean_of(batch)
    inner = jax.jit(update)
    assert isinstance(inner, jax.stages.Wrapped)
    references = {name: jax.new_ref(weight) for name, weight in weights.items()}

    @jax.jit
    def write(references, batch):
        new, _ = update({name: one[...] for name, one in references.items()}, batch)
        for name, one in references.items():
            one[...] = new[name]

    styles = {
        "references": lambda: lambda weights, batch: (write(references, batch), {}),
        "decorated": lambda: jax.jit(update, donate_argnums=0),
        "method": lambda: Trainer().step,
        "ahead": lambda: jax.jit(update).lower(weights, batch).compile(),
        "wrapped": lambda: jax.jit(lambda w, x: inner(w, x)),
        "raises": lambda: jax.jit(update),
    }
    step = styles[given.style]()
    for number in itertools.islice(itertools.count(), given.steps):
        began_s = time.perf_counter()
        weights, metrics = step(weights, batch)
        mean_of(batch)
        if given.style == "raises" and number == 2:
            raise FloatingPointError("the loss is not finite")
        if given.metrics:
            loss, seconds = float(metrics["loss"]), time.perf_counter() - began_s
            print(f"step {number}: loss {loss:.6f} in {seconds:.6f} s", flush=True)
            with Path(given.metrics).open("a") as file:
                file.write(json.dumps({"loss": loss, "step_time": seconds}) + "\n")


if __name__ == "__main__":
    main()
