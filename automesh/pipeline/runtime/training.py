"""Where `TrainState` was before the runtime became a plug-in: pickles name this module.

It is read from `automesh.pipeline`, and this module from nowhere else.
"""

from __future__ import annotations

from typing import Any

from automesh.plugins.pipelines import find_pipelines

_PICKLED = ("TrainState",)


def __getattr__(name: str) -> Any:
    if name in _PICKLED:
        return find_pipelines(f"`automesh.pipeline.{name}`").public(name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
