"""Makes jax's public queries answer for absent devices while user code runs (jax).

Attached devices that a process does not have, since it lowers on virtual ones, are treated
likewise: virtual devices answer for them, so that arrays on these stay where they are.

Only the names that users import are replaced, in `jax`, `jax.extend.backend` and
`jax.experimental.mesh_utils`; jax itself asks `jax._src.xla_bridge`, and still sees the devices of
this process. The functions that `install` puts under the public names check at each call for which
devices they answer, so user code may import them early (`from jax import devices`) and keep them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.extend import backend as extended

from automesh.errors import AutomeshError, UsageError
from automesh.hardware.absent import AbsentDevices
from automesh.hardware.chips import chip_for
from automesh.platforms import platform_named
from automesh.program.absent import mesh_devices, unsaid_axes
from automesh.program.absent.mesh_devices import PROCESS_ATTRIBUTES, answering_meshes, as_said
from automesh.program.absent.pallas import answering_kernels
from automesh.program.notes import note

_QUERIES = (
    "devices",
    "local_devices",
    "device_count",
    "local_device_count",
    "default_backend",
    "process_count",
    "process_index",
    "process_indices",
)
# jax's errors when user code puts data on absent devices or runs there, and the errors of
# stand-ins.
_SAID = re.compile(
    r"compile-only client|\bExecutable' object has no attribute"
    r"|id=\d+, not here|a device that is not here"
)
# Queries that jax still has under old names.
_OLD_NAMES = {
    "host_count": "process_count",
    "host_id": "process_index",
    "host_ids": "process_indices",
}
# A query of `jax.extend.backend`: libraries choose kernels by the device that it returns.
_DEFAULT_DEVICE = "get_default_device"
# Functions that use all devices by default.
_MAKERS = (
    (jax, "make_mesh"),
    (mesh_utils, "create_device_mesh"),
    (mesh_utils, "create_hybrid_device_mesh"),
)
_HYBRID = "create_hybrid_device_mesh"
_TYPES = "axis_types"
# Queries whose answers depend on the process that asks.
_OF_PROCESSES = frozenset({
    "local_devices", "local_device_count", "process_count", "process_index", "process_indices",
})  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Answers:
    """The answers for user code, and the questions that it has asked.

    Attributes:
      one: the devices to answer for.
      make: makes these devices, in jax's order; is called when user code asks for them.
      in_meshes: True if meshes that user code makes consist of these devices.
      as_one: True if user code sees a single process with all devices. Then the virtual devices of
        this process replace them, and answer as they would.
      hides_processes: True if user code has asked for processes and got one although there are
        more.
      questions: the questions in words, each once.
    """

    one: AbsentDevices
    make: Callable[[], Sequence[Any]]
    in_meshes: bool
    as_one: bool = False
    hides_processes: bool = False
    questions: dict[str, None] = field(default_factory=dict[str, None])

    @property
    def asked(self) -> tuple[str, ...]:
        """The questions with their answers, in words, each once, in order."""
        return tuple(self.questions)

    def concern(self, backend: Any) -> bool:
        """Whether a question about `backend` is about these devices."""
        return backend is None or backend in platform_named(self.one.platform).backends

    def devices(self) -> list[Any]:
        return list(self.make())

    def local_devices(self, process_index: int | None = None) -> list[Any]:
        index = process_index or 0
        if not 0 <= index < self.one.num_hosts:
            raise ValueError(f"Unknown process_index {process_index}")
        return [device for device in self.make() if device.process_index == index]

    def device_count(self) -> int:
        return self.one.num_devices

    def local_device_count(self) -> int:
        return self.one.num_devices // self.one.num_hosts

    def default_backend(self) -> str:
        return self.one.platform

    def process_count(self) -> int:
        return self.one.num_hosts

    def process_index(self) -> int:
        return 0

    def process_indices(self) -> list[int]:
        return list(range(self.one.num_hosts))

    @property
    def are_virtual(self) -> bool:
        """Whether virtual devices of this process replace them."""
        return self.as_one or self.one.is_attached

    def note(self, query: str, answer: Any) -> None:
        """Notes a question of user code, also in the worker's log."""
        self._note(f"jax.{query}()", answer)

    def note_of_device(self, attribute: str, answer: Any) -> None:
        """Notes that user code has read an attribute of a device of its mesh."""
        if attribute in PROCESS_ATTRIBUTES:
            self.note_of_processes()
        self._note(f"device.{attribute}", answer)

    def note_of_processes(self) -> None:
        """Notes that user code has asked for its process or for the devices of a process."""
        self.hides_processes |= self.as_one and self.one.num_hosts > 1

    def _note(self, question: str, answer: Any) -> None:
        text = f"{question} in {_asking()}: {_in_words(answer)}"
        if text not in self.questions:
            self.questions[text] = None
            note(f"answered for the target: {text}")


@dataclass(slots=True)
class _QueryState:
    """The state of this module for the process, for all threads: user code may ask from its own
    threads.

    Attributes:
      shown: number of devices that user code sees; 0 for all.
    """

    answers: Answers | None = None
    shown: int = 0
    real: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])


_STATE = _QueryState()


def install() -> None:
    """Replaces jax's public queries by functions that answer as jax does outside of `answering`."""
    if _STATE.real:
        return
    for name in (*_QUERIES, *_OLD_NAMES):
        if callable(original := vars(jax).get(name)):
            _STATE.real[name] = original
            setattr(jax, name, _query(name, original))
    _STATE.real[_DEFAULT_DEVICE] = extended.get_default_device
    setattr(extended, _DEFAULT_DEVICE, _default_device(extended.get_default_device))
    for module, name in _MAKERS:
        setattr(module, name, _maker(getattr(module, name)))


@contextmanager
def answering(
    one: AbsentDevices,
    devices: Callable[[], Sequence[Any]],
    *,
    in_meshes: bool,
    as_one: bool = False,
) -> Generator[Answers]:
    """Makes the queries answer for `one` while the body runs.

    Args:
      devices: makes the devices for the answers, in jax's order.
      in_meshes: True if meshes that user code makes consist of these. Otherwise they consist of
        virtual devices, which answer for these.
      as_one: see `Answers`; meshes that user code makes then consist of virtual devices.
    """
    install()
    before = _STATE.answers
    in_meshes = in_meshes and not as_one
    answers = Answers(one=one, make=devices, in_meshes=in_meshes, as_one=as_one)
    _STATE.answers = answers
    in_their_name = (
        nullcontext()
        if in_meshes
        else answering_meshes(
            answers.devices,
            hbm_bytes=_hbm_bytes(one),
            asked=answers.note_of_device,
            as_one=as_one,
        )
    )
    try:
        with answering_kernels(one), in_their_name:
            yield answers
    finally:
        _STATE.answers = before


@contextmanager
def showing(count: int) -> Generator[None]:
    """Shows user code only the first `count` devices while the body runs; 0 for all."""
    install()
    before = _STATE.shown
    _STATE.shown = count
    try:
        yield
    finally:
        _STATE.shown = before


def hidden_processes() -> int:
    """Returns the number of processes of the target if user code has asked for it and got one; else
    0."""
    answers = _STATE.answers
    return answers.one.num_hosts if answers is not None and answers.hides_processes else 0


def shows_other_platform() -> bool:
    """Whether user code sees devices of another platform than those on which it runs."""
    answers = _STATE.answers
    return answers is not None and answers.one.platform != attached()[0].platform


def _hbm_bytes(one: AbsentDevices) -> int:
    return one.memory_bytes or chip_for(one.device_kind, one.platform).hbm_bytes


def attached() -> list[Any]:
    """Returns the real devices, whatever devices user code sees."""
    return _STATE.real.get("devices", jax.devices)()


def seen_by_scripts() -> tuple[str, str, int, bool]:
    """Returns platform, kind and number of the devices that user code sees now, and whether virtual
    ones answer for attached ones."""
    answers = _STATE.answers
    if answers is not None:
        one = answers.one
        return one.platform, one.device_kind, one.num_devices, one.is_attached
    here = attached()[: _STATE.shown or None]
    return str(here[0].platform), str(here[0].device_kind), len(here), False


def own() -> list[Any]:
    """Returns the real devices of this process: in a gang a part of them, else all."""
    index = _STATE.real.get("process_index", jax.process_index)()
    return [one for one in attached() if one.process_index == index]


def _query(asked: str, original: Callable[..., Any]) -> Callable[..., Any]:
    # Some of jax's functions are caches written in C++, which have no name of their own.
    signature, name = inspect.signature(original), _OLD_NAMES.get(asked, asked)

    @functools.wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        answers = _STATE.answers
        if answers is None:
            return _shown(name, original(*args, **kwargs))
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # jax raises the error for wrong arguments
        if not answers.concern(given.get("backend")):
            found = original(*args, **kwargs)
            # Beside accelerators jax has one CPU device.
            return found[:1] if answers.as_one and isinstance(found, list) else found
        if name in _OF_PROCESSES:
            answers.note_of_processes()
        if answers.are_virtual and name != "default_backend":
            # As many virtual devices replace them, and answer as they would.
            rest = {key: value for key, value in given.items() if key != "backend"}
            found = _shown(name, original(**rest))
            kind = answers.one.device_kind
            answers.note(asked, f"{len(found)} x {kind}" if "devices" in name else found)
            return found
        answer: Any
        if name == "local_devices":
            answer = answers.local_devices(given.get("process_index", given.get("host_id")))
        else:
            answer = getattr(answers, name)()
        answers.note(asked, answer)
        return answer

    return query


def _shown(name: str, found: Any) -> Any:
    """Returns the part of an answer that user code shall see."""
    if not _STATE.shown:
        return found
    if name in ("devices", "local_devices"):
        return found[: _STATE.shown]
    if name in ("device_count", "local_device_count"):
        return min(found, _STATE.shown)
    return found


def _default_device(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def query() -> Any:
        answers = _STATE.answers
        # A device that user code has chosen is kept. A virtual one answers as an attached one.
        if answers is None or answers.are_virtual or jax.config.jax_default_device is not None:
            return original()
        device = answers.devices()[0]
        answers.note(f"extend.backend.{_DEFAULT_DEVICE}", device.device_kind)
        return device

    return query


def _maker(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        answers = _STATE.answers
        as_one = answers is not None and answers.as_one
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)
        if _TYPES in signature.parameters and given.arguments.get(_TYPES) is None:
            types = unsaid_axes.types_for(given.arguments["axis_names"], _asking())
            if types is not None:
                given.arguments[_TYPES] = types
        if not (as_one or _STATE.shown or (answers is not None and answers.in_meshes)):
            return original(*given.args, **given.kwargs)
        if given.arguments.get("devices") is None:
            in_meshes = answers is not None and answers.in_meshes
            here = answers.devices() if answers is not None and in_meshes else attached()
            given.arguments["devices"] = here if in_meshes else _shown("devices", here)
        if answers is not None and as_one and original.__name__ == _HYBRID:
            return _hybrid(original, given, answers)
        return original(*given.args, **given.kwargs)

    return make


def _hybrid(original: Callable[..., Any], given: inspect.BoundArguments, answers: Answers) -> Any:
    """Makes a mesh over slices from virtual devices: jax's own function would see that they are
    virtual."""
    devices = list(given.arguments["devices"])
    shown = answers.devices()
    said = [as_said(device, shown, as_one=True) for device in devices]
    if given.arguments.get("process_is_granule"):
        answers.note_of_processes()
    given.arguments["devices"] = said
    laid_out = original(*given.args, **given.kwargs)
    here = {id(one): device for one, device in zip(said, devices, strict=True)}
    found = np.empty(laid_out.shape, dtype=object)
    found.flat = [here[id(one)] for one in laid_out.flat]
    return found


def _asking() -> str:
    """Returns the line of user code that asks: the nearest one outside of this module."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, mesh_devices.__file__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "?"


def _in_words(answer: Any) -> str:
    if isinstance(answer, list) and answer and hasattr(answer[0], "device_kind"):
        return f"{len(answer)} x {answer[0].device_kind}"
    return str(answer)


@contextmanager
def explaining_real_arrays(function: str) -> Generator[None]:
    """Explains what to do if the body puts arrays on absent devices.

    Args:
      function: name of the user's function that the body calls.

    Raises:
      UsageError: the body puts arrays on absent devices.
      Exception: any other exception of the body.
    """
    try:
        yield
    except Exception as error:
        # An error while the script was loaded has another explanation already; look at its cause.
        seen = error.__cause__ if isinstance(error, AutomeshError) else error
        if seen is None or not _SAID.search(str(seen)):
            raise
        raise UsageError(
            f"`{function}`, or the script that it is in, puts arrays on devices that are not here",
            hint="return `jax.ShapeDtypeStruct(shape, dtype, sharding=...)` instead; "
            "`jax.eval_shape` makes them from the function that makes the arrays",
        ) from error
