"""Pipelines, and the TensorFlow of Kauldron's: here, what it is asked."""

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

asked = []
tf = SimpleNamespace(
    config=SimpleNamespace(set_visible_devices=lambda devices, kind: asked.append((devices, kind)))
)


@dataclass(frozen=True)
class ArraySpec:
    """As in Kauldron, a leaf without a sharding."""

    shape: Any
    dtype: Any


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Made-up rows, which are there only while data sets are mocked."""

    batch_size: int
    width: int
    dtype: Any = field(default=np.float64)

    @cached_property
    def element_spec(self):
        from kauldron.data.py.data_sources import tfds

        if tfds.testing.mocked < self.batch_size:
            raise FileNotFoundError("the data set is not here")
        rows = self.batch_size // jax.process_count()
        return {"rows": ArraySpec((rows if self.width else None, self.width), self.dtype)}
