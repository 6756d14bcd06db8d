"""Pallas asks for the kind of the default device when it traces and lowers TPU kernels (jax).

It asks jax's inside, where the devices are those that are here; so its question is answered in its
own place. Should jax move that place, kernels that depend on the kind of TPU fail to lower, in
Pallas' own words.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.chips import chip_for

# Where the questions are answered: up to jax 0.10.2 in Pallas, since then one level up, and Pallas
# passes them on under the same names.
_PLACES = ("jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info")
_CACHED = ("get_tpu_info", "get_tpu_info_for_chip")


def cores_of(one: AbsentDevices) -> int:
    """TensorCores of one TPU device: two where a chip of two cores is one device."""
    return chip_for(one.device_kind, "tpu").counted_per_device


@contextmanager
def answering_kernels(one: AbsentDevices) -> Generator[None]:
    """Lets Pallas lower for the TPUs of `one` while the body runs; does nothing for GPUs."""
    answers: dict[str, Any] = {
        "get_device_kind": one.device_kind,
        "get_num_device_cores": cores_of(one),
    }
    places = _places(answers) if one.platform == "tpu" else []
    before = [{name: getattr(place, name) for name in answers} for place in places]
    try:
        for place in places:
            for name, answer in answers.items():
                setattr(place, name, _always(answer))
            _forget(place)
        yield
    finally:
        for place, originals in zip(places, before, strict=True):
            for name, original in originals.items():
                setattr(place, name, original)
            _forget(place)


def _always(answer: Any) -> Callable[[], Any]:
    return lambda: answer


def _places(names: Collection[str]) -> list[Any]:
    """The modules that have all of these functions; none in a jax that has moved them again."""
    found: list[Any] = []
    for name in _PLACES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if all(hasattr(module, function) for function in names):
            found.append(module)
    return found


def _forget(info: Any) -> None:
    """What was found out for other devices must not be remembered."""
    for name in _CACHED:
        clear = getattr(getattr(info, name, None), "cache_clear", None)
        if clear is not None:
            clear()
