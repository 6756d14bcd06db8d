"""Makes Pallas trace and lower kernels for absent devices (jax).

Pallas asks jax's internal functions for the kind of the default device, and they see the devices of
this process. So this module replaces the functions that Pallas calls: those for TPU kernels, and
those for Triton kernels on GPUs. Mosaic kernels for GPUs use public names (see `device_queries`).
If a later jax moves these functions, kernels that depend on the kind of device fail to lower, with
Pallas' own errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.chips import chip_for
from automesh.hardware.gpu_configurations import compute_capability

# The modules that answer. For TPUs: up to jax 0.10.2 in Pallas, since then one level above, and
# Pallas has them under the same names. For GPUs: since jax 0.11; before that a Triton kernel used
# public names.
_PLACES = {
    "tpu": ("jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info"),
    "gpu": ("jax._src.pallas.triton.gpu_info",),
}
_CACHED = ("get_tpu_info", "get_tpu_info_for_chip", "get_gpu_info")


def cores_of(one: AbsentDevices) -> int:
    """Returns the number of TensorCores of one TPU device: two if a chip with two cores is one
    device."""
    return chip_for(one.device_kind, "tpu").counted_per_device


@contextmanager
def answering_kernels(one: AbsentDevices) -> Generator[None]:
    """Lets Pallas lower for the devices of `one` while the body runs."""
    answers = _answers(one)
    places = _places(_PLACES.get(one.platform, ()), answers)
    before = [{name: getattr(place, name) for name in answers} for place in places]
    try:
        for place in places:
            for name, answer in answers.items():
                setattr(place, name, answer)
            _forget(place)
        yield
    finally:
        for place, originals in zip(places, before, strict=True):
            for name, original in originals.items():
                setattr(place, name, original)
            _forget(place)


def _answers(one: AbsentDevices) -> Mapping[str, Callable[..., Any]]:
    def say(answer: Any) -> Callable[..., Any]:
        return lambda *_: answer

    if one.platform == "tpu":
        return {
            "get_device_kind": say(one.device_kind),
            "get_num_device_cores": say(cores_of(one)),
        }
    answers = {
        "get_device_kind": say(one.device_kind),
        "get_device_platform": say(one.platform),
    }
    stated = dict(one.says).get("compute_capability") or compute_capability(one.gpu)
    if stated:  # Asked only of GPUs whose kind jax does not know.
        answers["_get_device_arch_name"] = say(stated)
    return answers


def _places(names: tuple[str, ...], answers: Mapping[str, Any]) -> list[Any]:
    """Returns the modules that have all of these functions; none in a jax that has moved them
    again."""
    found: list[Any] = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if all(hasattr(module, function) for function in answers):
            found.append(module)
    return found


def _forget(info: Any) -> None:
    """Clears caches of answers for other devices."""
    for name in _CACHED:
        clear = getattr(getattr(info, name, None), "cache_clear", None)
        if clear is not None:
            clear()
