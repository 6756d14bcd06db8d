"""Makes the devices of user code's meshes answer for absent devices (jax).

An estimate lays its meshes out on virtual CPU devices. A model that chooses a kernel by
`mesh.devices.flat[0].platform` would take the one for CPUs, or none. So Python code outside of jax
that reads an attribute of such a device gets the value of a target's device. jax, jaxlib and
automesh themselves still get the real values, and so does C++ code.

The attributes of the class `jaxlib._jax.Device` can be replaced. If a later jaxlib forbids that,
`answering_meshes` notes it in the log, and devices give their real values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import jax

from automesh.package import asks_as_user, is_our_module
from automesh.program.notes import note

# Attributes for which a target's device answers. Client and memories stay the real ones, since jax
# computes with them.
_SAID = ("platform", "device_kind", "process_index", "host_id", "task_id", "local_hardware_id")
# Attributes that TPUs and GPUs have, and CPUs do not.
_MORE = (
    "coords",
    "core_on_chip",
    "num_cores",
    "slice_index",
    "partition_index",
    "compute_capability",
    "core_count",
    "device_vendor",
    "fabric_uuid",
    "shared_memory_per_block_optin",
)
# The modules that ask, by the first part of their names: these, and automesh, get the real values.
_TRUTH = frozenset({"jax", "jaxlib"})
PROCESS_ATTRIBUTES = frozenset({"process_index", "host_id", "task_id"})
"""Attributes with the process that a device belongs to, under new and old names."""
_HERE = "cpu"


@contextmanager
def answering_meshes(
    devices: Callable[[], Sequence[Any]],
    *,
    hbm_bytes: int,
    asked: Callable[[str, Any], None],
    as_one: bool = False,
) -> Generator[None]:
    """Makes CPU devices of this process answer for those of a target while the body runs.

    Args:
      devices: devices of the target, in jax's order; a real device answers for the one with its id.
      hbm_bytes: memory of one of them, for `memory_stats()`; 0 if unknown.
      asked: is called with each question of user code and its answer.
      as_one: True if all devices belong to process 0 for user code.
    """
    device_class: Any = type(jax.devices(_HERE)[0])
    own = dict(vars(device_class))
    if missing := {*_SAID, "memory_stats", "__getattr__"} - own.keys():
        note(
            f"devices of meshes say what they are: this jaxlib has no {', '.join(sorted(missing))}"
        )
        yield
        return
    answers: dict[str, Any] = {
        name: property(_reader(name, own, devices, asked, as_one=as_one))
        for name in (*_SAID, *_MORE)
    }
    answers["memory_stats"] = _memory_stats(own["memory_stats"], own["platform"], hbm_bytes, asked)
    try:
        try:
            for name, answer in answers.items():
                setattr(device_class, name, answer)
        except (AttributeError, TypeError) as error:
            note(f"devices of meshes say what they are, since jaxlib allows no other: {error}")
        yield
    finally:
        for name in answers:
            if name in own:
                setattr(device_class, name, own[name])
            elif name in vars(device_class):
                delattr(device_class, name)


def _reader(
    name: str,
    own: dict[str, Any],
    devices: Callable[[], Sequence[Any]],
    asked: Callable[[str, Any], None],
    *,
    as_one: bool,
) -> Callable[[Any], Any]:
    platform = own["platform"]

    def truth(device: Any) -> Any:
        return own[name].__get__(device) if name in own else own["__getattr__"](device, name)

    def read(device: Any) -> Any:
        if as_one and name in PROCESS_ATTRIBUTES and _is_user(inspect.currentframe()):
            asked(name, 0)
            return 0
        if platform.__get__(device) != _HERE or not _is_user(inspect.currentframe()):
            return truth(device)
        shown = devices()
        one = shown[device.id % len(shown)]
        try:
            answer = getattr(one, name)
        except AttributeError:
            # A stand-in has fewer attributes; attributes that it lacks are those of the real
            # device.
            if name in _MORE:
                raise
            return truth(device)
        asked(name, answer)
        return answer

    return read


def as_said(device: Any, shown: Sequence[Any], *, as_one: bool) -> SimpleNamespace:
    """Returns the attributes that jax's mesh code reads, as the device would report them if it were
    one of `shown`, in a plain order: automesh lays meshes out itself."""
    one = shown[device.id % len(shown)]
    said = SimpleNamespace(id=device.id, platform=_HERE, device_kind=_HERE, process_index=0)
    if not as_one:
        said.process_index = one.process_index
    if (number := getattr(one, "slice_index", None)) is not None:
        said.slice_index = number
    return said


def _memory_stats(
    original: Any, platform: Any, hbm_bytes: int, asked: Callable[[str, Any], None]
) -> Callable[[Any], Any]:
    def memory_stats(device: Any) -> Any:
        is_users = platform.__get__(device) == _HERE and _is_user(inspect.currentframe())
        if not is_users or not hbm_bytes:
            return original(device)
        answer = {"bytes_in_use": 0, "peak_bytes_in_use": 0, "bytes_limit": hbm_bytes}
        asked("memory_stats()", answer)
        return answer

    return memory_stats


def _is_user(answering: FrameType | None) -> bool:
    """Whether the caller of `answering` is neither jax nor automesh."""
    caller = answering.f_back if answering is not None else None
    name = str(caller.f_globals.get("__name__", "")) if caller is not None else ""
    if is_our_module(name):
        return asks_as_user(name)
    return name.partition(".")[0] not in _TRUTH
