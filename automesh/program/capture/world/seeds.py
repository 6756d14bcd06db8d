"""Makes every run of a script draw the same random numbers (jax).

A generator that the script seeds keeps this seed. A generator without a seed, or with one that is
made of the time, gets the same seed in every run and in every process, so that the steps of two
meshes can be compared.

Private in Python and numpy: `random._urandom` and `bit_generator.randbits`, from which generators
without a seed take one. Where one of them is missing, those generators differ from run to run.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from automesh.program.capture.world.told import tell

_SEED = 20240229
# A seed within so many seconds of the present time counts as made of the time.
_NEAR_S = 3600.0
_SCALES = (1, 10**3, 10**6, 10**9)  # seconds, milliseconds, microseconds, nanoseconds


class _Entropy:
    """Bytes and bits that seem random, made from a counter."""

    def __init__(self) -> None:
        self._drawn = itertools.count()

    def bytes(self, size: int) -> bytes:
        """Returns bytes, as `os.urandom` does."""
        parts = [
            hashlib.sha256(f"{_SEED} {next(self._drawn)}".encode()).digest()
            for _ in range(-(-size // 32))
        ]
        return b"".join(parts)[:size]

    def bits(self, k: int) -> int:
        """Returns bits, as `secrets.randbits` does."""
        return int.from_bytes(self.bytes((k + 7) // 8), "little") >> (-k % 8)


@contextmanager
def repeatable() -> Generator[None]:
    """Makes generators draw the same numbers every time while the body runs."""
    kept_random, kept_numpy = random.getstate(), np.random.get_state()
    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    entropy = _Entropy()
    generators: Any = np.random
    replace(os, "urandom", entropy.bytes)
    replace(random, "_urandom", entropy.bytes)
    replace(generators.bit_generator, "randbits", entropy.bits)
    replace(random.Random, "seed", _seeding(random.Random.seed, entropy))
    replace(generators, "seed", _by_the_clock(generators.seed))
    replace(generators, "default_rng", _by_the_clock(generators.default_rng))
    for name in ("key", "PRNGKey"):
        replace(jax.random, name, _by_the_clock(getattr(jax.random, name)))
    random.seed(_SEED)
    np.random.seed(_SEED)
    _seed_torch()
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)
        random.setstate(kept_random)
        np.random.set_state(kept_numpy)


def _seed_torch() -> None:
    """Seeds torch where it was used before in this process; in a new process it always has the same
    seed."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "manual_seed"):
        torch.manual_seed(_SEED)


def _seeding(original: Callable[..., None], entropy: _Entropy) -> Callable[..., None]:
    """Returns a `random.Random.seed` that asks `entropy` where it gets no seed; the original would
    ask the operating system."""

    @functools.wraps(original)
    def seed(self: Any, a: Any = None, version: int = 2) -> None:
        original(self, entropy.bits(128) if a is None else _steady(a), version)

    return seed


def _by_the_clock(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose first argument is a seed, which is replaced if it is made of the
    time."""

    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_steady(args[0]), *args[1:])
        else:
            kwargs = {name: _steady(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return seeded


def _steady(seed: Any) -> Any:
    """Returns a seed; a fixed one if it is the present time."""
    if isinstance(seed, bool) or not isinstance(seed, int | float):
        return seed
    now_s = time.time()
    for scale in _SCALES:
        if abs(seed / scale - now_s) < _NEAR_S:
            tell("the script seeds random numbers by the clock: every run is given the same seed")
            return _SEED
    return seed
