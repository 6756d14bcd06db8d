"""How well a search guesses the lengths of its compiles, and in which order it gives them then."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np

from automesh.outcomes import Compiled
from automesh.tuner.compile.lengths import expected_s
from automesh.tuner.compile.rung import LAST_PER_WORKER
from tests.regenerate.record_studies import FOLDER, read

_DRAWS = 50


def correlations() -> dict[str, float]:
    """Of recorded searches: between the logarithms of the seconds of half of their compiles and of
    what the other half says of them; the mean over random halves."""
    found: dict[str, float] = {}
    for path in sorted(FOLDER.glob("*.json")):
        recorded, luck = read(path), random.Random(0)
        estimates = dict(recorded.estimates)
        took_s = {
            plan: outcome.compile_s
            for plan, outcome in recorded.compiled
            if isinstance(outcome, Compiled) and outcome.compile_s > 0
        }
        each: list[float] = []
        for _ in range(_DRAWS):
            mixed = luck.sample(list(took_s), len(took_s))
            known, asked = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
            guessed = expected_s(asked, {plan: took_s[plan] for plan in known}, estimates)
            pairs = np.log([[guessed[plan], took_s[plan]] for plan in asked])
            each.append(float(np.corrcoef(pairs.T)[0, 1]))
        found[recorded.name] = round(statistics.mean(each), 2)
    return found


def in_given_order(
    lengths_s: Sequence[float], workers: int, *, correlation: float, sigma: float, seed: int = 1
) -> list[float]:
    """Lengths in the order in which a search gives its compiles.

    All but the last come as they are; of the last, those that are guessed to be longest come first.

    Args:
      correlation: of the logarithms of guesses and lengths.
      sigma: standard deviation of the logarithms of lengths.

    >>> in_given_order([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], 1, correlation=1.0, sigma=1.0)
    [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]
    """
    luck = random.Random(seed)
    noise = sigma * math.sqrt(max(1.0 - correlation**2, 0.0))
    guessed = [correlation * math.log(one) + luck.gauss(0.0, noise) for one in lengths_s]
    first = max(len(lengths_s) - LAST_PER_WORKER * workers, 0)
    last = sorted(range(first, len(lengths_s)), key=lambda at: -guessed[at])
    return [*lengths_s[:first], *(lengths_s[at] for at in last)]
