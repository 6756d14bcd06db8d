"""Pallas asks for the kind of the default device when it traces and lowers TPU kernels (jax).

It asks jax's inside, where the devices are those that are here; so its question is answered in its
own place. Should jax move that place, kernels that depend on the kind of TPU fail to lower, in
Pallas' own words.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from automesh.hardware.absent import Elsewhere
from automesh.hardware.chips import chip_for

_INFO = "jax._src.pallas.mosaic.tpu_info"
_CACHED = ("get_tpu_info", "get_tpu_info_for_chip")


def cores_of(one: Elsewhere) -> int:
    """TensorCores of one TPU device: two where a chip of two cores is one device."""
    return chip_for(one.device_kind, "tpu").counted_per_device


@contextmanager
def answering_kernels(one: Elsewhere) -> Generator[None]:
    """Lets Pallas lower for the TPUs of `one` while the body runs; does nothing for GPUs."""
    answers: dict[str, Any] = {
        "get_device_kind": one.device_kind,
        "get_num_device_cores": cores_of(one),
    }
    info = _tpu_info(answers) if one.platform == "tpu" else None
    if info is None:
        yield
        return
    before = {name: getattr(info, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(info, name, _always(answer))
        _forget(info)
        yield
    finally:
        for name, original in before.items():
            setattr(info, name, original)
        _forget(info)


def _always(answer: Any) -> Callable[[], Any]:
    return lambda: answer


def _tpu_info(names: dict[str, Any]) -> Any:
    try:
        info = importlib.import_module(_INFO)
    except ImportError:
        return None
    return info if all(hasattr(info, name) for name in names) else None


def _forget(info: Any) -> None:
    """What was found out for other devices must not be remembered."""
    for name in _CACHED:
        clear = getattr(getattr(info, name, None), "cache_clear", None)
        if clear is not None:
            clear()
