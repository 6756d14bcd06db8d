"""One visit to a plan: its state rebuilt, the first losses recorded, samples of chained steps timed
(jax)."""

from __future__ import annotations

import gc
import zlib
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from automesh.errors import UsageError, kind_of
from automesh.program.distributed import gathered
from automesh.program.execute.prepare import Ready, conform, duplicate, is_elsewhere, state
from automesh.program.execute.team import Team
from automesh.program.lower.static_args import is_ref, leaf_shape
from automesh.program.nouns import LeafUpdate
from automesh.program.script.contexts import entered
from automesh.program.script.leaf_forms import difference, forms_of, repacked
from automesh.texts.terminal import as_unicode

# `perf_counter` and this are bound before any user code runs: what a script puts in their places
# must not time its own step.
_block_until_ready = jax.block_until_ready
SAMPLED = 8192
PROJECTIONS = 8
_NARROW_UNIT = 0.25
_SCRAMBLE = 98765.43
Floats = NDArray[np.float64]


# What one step changes: a sketch of the update of every float array that it carries on.
#
# Of each array the same elements are read before and after the step, on whichever devices they are:
# all of 8,192, else one of each of 8,192 equal stretches, so that every shard has its share. Their
# difference is taken in float64 on the host, where an update of a hundred-thousandth of the values
# loses nothing, and nothing is copied on the devices, so that donated arguments do no harm.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Elements of one array.

    Attributes:
      path: where it is among the arguments.
      leaf: the array itself, which the step may have donated since.
      values: of the chosen elements, from the first copy of each.
      apart: largest difference between two copies of an element.
    """

    path: str
    dtype: str
    leaf: Any
    values: Floats
    apart: float


def sampled(args: Any, *, is_shared: bool = False) -> dict[str, Sampled]:
    """Reads the chosen elements of all float arrays among the arguments, by their paths.

    Args:
      is_shared: the arguments are those of several processes, all of which call this: some may have
        an array that the others have nothing of, as stages of a pipeline do.
    """
    found: dict[str, Sampled] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        array: Any = leaf[...] if is_ref(leaf) else leaf
        if not isinstance(array, jax.Array) or not _is_float(array) or array.size == 0:
            continue
        path = jax.tree_util.keystr(keys)
        values, apart = _elements(array, path, is_shared=is_shared)
        found[path] = Sampled(
            path=path, dtype=str(array.dtype), leaf=leaf, values=values, apart=apart
        )
    return found


def updates_of(before: dict[str, Sampled], after: dict[str, Sampled]) -> tuple[LeafUpdate, ...]:
    """The sketch of what changed between two samples; arrays that stayed the same are left out."""
    return tuple(
        _update(old, after[path])
        for path, old in before.items()
        if path in after
        # What other processes alone have is stood in for by the same array at every step.
        and (after[path].leaf is not old.leaf or is_ref(old.leaf) or is_elsewhere(old.leaf))
        and len(after[path].values) == len(old.values)
    )


def disturbed(leaf: Any, dtype: str) -> Any:
    """An array whose values are changed by a unit in the last place of a type, up or down.

    Args:
      leaf: what is no array of floats stays as it is.
      dtype: name of a float type.
    """
    if not isinstance(leaf, jax.Array) or not _is_float(leaf) or leaf.size == 0:
        return leaf
    unit = max(_unit(dtype), float(jnp.finfo(leaf.dtype).eps))
    return _changer(leaf.sharding)(leaf, unit)


@cache
def _changer(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(_change, out_shardings=sharding)


def _change(values: Any, unit: Any) -> Any:
    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.float32)
    # As good as chance, and compiled in no time on any sharding.
    up = jnp.sin(wide * _SCRAMBLE) > 0
    return (wide * jnp.where(up, 1 + unit, 1 - unit)).astype(values.dtype)


def with_sensitivities(
    updates: tuple[LeafUpdate, ...], disturbed: tuple[LeafUpdate, ...]
) -> tuple[LeafUpdate, ...]:
    """Updates with how far those from disturbed arguments are from them."""
    others = {one.path: one for one in disturbed}
    return tuple(
        replace(update, sensitivity=_apart(update, others[update.path]))
        if update.path in others
        else update
        for update in updates
    )


def _apart(one: LeafUpdate, other: LeafUpdate) -> float:
    scale = max(one.norm, other.norm)
    gaps = np.subtract(one.projections, other.projections)
    return float(np.sqrt(np.mean(gaps**2)) / scale) if scale else 0.0


def _unit(dtype: str) -> float:
    try:
        return float(jnp.finfo(dtype).eps)
    except (TypeError, ValueError):  # A type that this jax does not know.
        return _NARROW_UNIT


def _update(old: Sampled, new: Sampled) -> LeafUpdate:
    change = new.values - old.values
    is_finite = bool(np.all(np.isfinite(change)))
    change = change if is_finite else np.zeros_like(change)
    sizes = np.abs(change)
    middle = float(sizes.mean())
    return LeafUpdate(
        path=new.path,
        dtype=new.dtype,
        norm=float(np.linalg.norm(change)),
        old_norm=float(np.linalg.norm(np.nan_to_num(old.values))),
        spread=float(sizes.std()) / middle if middle else 0.0,
        apart=new.apart,
        count=len(change),
        is_finite=is_finite,
        projections=tuple(float(one) for one in _signs(new.path, len(change)) @ change),
    )


def _signs(path: str, count: int) -> Floats:
    """Random signs, the same for an array of this path and size in every process."""
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(as_unicode(path).encode())))
    return luck.choice(np.array([-1.0, 1.0]), size=(PROJECTIONS, count))


def _places(size: int, path: str) -> NDArray[np.int64]:
    """Which elements are read, as places in the flattened array."""
    if size <= SAMPLED:
        return np.arange(size)
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(as_unicode(path).encode()) + 1))
    stretch = size / SAMPLED
    return ((np.arange(SAMPLED) + luck.random(SAMPLED)) * stretch).astype(np.int64)


def _elements(array: Any, path: str, *, is_shared: bool) -> tuple[Floats, float]:
    """The chosen elements, and how far copies of them are apart at most."""
    places = np.unravel_index(_places(array.size, path), array.shape) if array.shape else ()
    count = min(array.size, SAMPLED)
    values = np.full(count, np.nan)
    is_read = np.zeros(count, dtype=bool)
    apart = 0.0
    for shard in array.addressable_shards:
        inside = np.ones(count, dtype=bool)
        local: list[NDArray[np.int64]] = []
        for dim, part in enumerate(shard.index):
            start = part.start or 0
            stop = array.shape[dim] if part.stop is None else part.stop
            inside &= (places[dim] >= start) & (places[dim] < stop)
            local.append(places[dim] - start)
        if not inside.any():
            continue
        read = _read(shard.data, tuple(one[inside] for one in local))
        known = is_read[inside]
        if known.any():
            gaps = np.abs(values[inside] - read)[known]
            apart = max(apart, float(np.max(np.nan_to_num(gaps))))
        values[inside] = np.where(known, values[inside], read)
        is_read |= inside
    if array.is_fully_addressable and not is_shared:
        return values, apart
    return _elements_of_all(values, apart)


def _elements_of_all(values: Floats, apart: float) -> tuple[Floats, float]:
    """The same elements as all processes have read them, each of its own devices.

    Args:
      values: NaN where this process has none.
    """
    rows = gathered(np.append(values, apart))
    known, aparts = rows[:, :-1], rows[:, -1]
    # Of each element the copy of the first process that has one: the same in all of them.
    first = np.argmax(~np.isnan(known), axis=0)
    chosen = np.take_along_axis(known, first[None], axis=0)[0]
    gaps = np.abs(known - chosen)
    return chosen, float(max(aparts.max(), np.nanmax(gaps, initial=0.0)))


def _read(data: Any, index: tuple[NDArray[np.int64], ...]) -> Floats:
    """Elements of one shard, from its device."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[index].astype(np.float64).reshape(-1)  # No copy of the whole.
    return np.asarray(data[index]).astype(np.float64).reshape(-1)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


# Waiting for the devices, references included (jax).


def wait(outputs: Any, args: Any) -> None:
    """Waits until a step is done that gave `outputs`, or wrote to references among `args`.

    `jax.block_until_ready` passes over a reference without waiting (jax 0.10.1 to 0.12.0.1).
    """
    written = [_buffer(leaf) for leaf in jax.tree.leaves(args) if is_ref(leaf)]
    _block_until_ready((outputs, written))


def _buffer(reference: Any) -> Any:
    """The array in a reference; where this jax hides it, what can be read from it: a copy."""
    buffer = getattr(getattr(reference, "_refs", None), "_buf", None)
    return reference[...] if buffer is None else buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a visit gave.

    Attributes:
      samples_s: seconds per step.
      losses: scalar floats of the first steps, in order.
      setup_s: seconds before the first sample.
      state_s: those of them that made the state and warmed up.
      peak_bytes: most bytes in use on one device, 0 where that cannot be told.
      updates: what the first step changed, where losses are recorded.
    """

    samples_s: tuple[float, ...]
    losses: tuple[float, ...]
    setup_s: float
    state_s: float
    peak_bytes: int
    updates: tuple[LeafUpdate, ...]


class Kept:
    """Training loops whose states wait for the next visit to their plans."""

    def __init__(self) -> None:
        self._loops: dict[Any, _Loop] = {}

    def has(self, key: Any) -> bool:
        """Whether the state of this plan is here."""
        return key in self._loops

    def clear(self) -> None:
        """Frees all of them."""
        if self._loops:
            self._loops.clear()
            gc.collect()

    def take(self, key: Any) -> _Loop | None:
        """The loop of a plan, if it is here; it is no longer kept."""
        return self._loops.pop(key, None)

    def put(self, key: Any, loop: _Loop) -> None:
        """Keeps a loop."""
        self._loops[key] = loop


def visit(
    ready: Ready,
    *,
    kept: Kept,
    key: Any,
    keep: bool,
    steps: int,
    samples: int,
    loss_steps: int,
    warmup_s: float,
    since_s: float,
    started: Any,
    team: Team,
    sensitivity: bool = False,
) -> Visit:
    """Runs the step from its initial state, or from where the last visit to it has stopped.

    All of its arrays are freed before it returns, unless they are to be kept.

    Args:
      kept: states of earlier visits.
      key: of this plan among them.
      keep: leave the state there, for the next visit.
      steps: chained steps per sample; 0 takes no samples.
      samples: samples to take.
      loss_steps: how many first steps to record the scalar floats of.
      warmup_s: run for at least this long before the first sample.
      since_s: when the visit began, by `time.perf_counter`.
      started: called without arguments once the state is there.
      team: the processes that run the step.
      sensitivity: run the first step from disturbed arguments, too: see `LeafUpdate`.

    Raises:
      UsageError: `advance` returns something else than the step's arguments, or the clock stood
        still while the step ran.
    """
    before = _peak_bytes(ready)
    loop = kept.take(key)
    try:
        with entered(ready.ambient, ready.workload.context):
            is_new = loop is None
            disturbed = _disturbed_updates(ready) if sensitivity and loss_steps else ()
            state_s = 0.0
            if loop is None:
                begun_s = perf_counter()
                loop = _Loop(ready)
                state_s = perf_counter() - begun_s
                # Whoever is early would wait for the others in a collective of the step.
                team.gather("state")
            started()
            losses: list[float] = []
            updates: tuple[LeafUpdate, ...] = ()
            if loss_steps:
                found, updates = loop.first_step()
                losses += found
                updates = with_sensitivities(updates, disturbed)
            losses += [value for _ in range(loss_steps - 1) for value in loop.losses_of_step()]
            taken: list[float] = []
            setup_s = perf_counter() - since_s
            if steps > 0 and samples > 0:
                if is_new:
                    begun_s = perf_counter()
                    team.warm_up(loop.sample, warmup_s)
                    state_s += perf_counter() - begun_s
                setup_s = perf_counter() - since_s
                for _ in range(samples):
                    team.align()
                    taken.append(_plausible(loop.sample(steps)))
            peak = _peak_bytes(ready)
            if keep:
                kept.put(key, loop)
    finally:
        loop = None
        if not kept.has(key):
            # The next plan may need the whole memory; arrays hang in cycles of tracebacks and
            # closures.
            gc.collect()
    return Visit(
        samples_s=tuple(taken),
        losses=tuple(losses),
        setup_s=setup_s,
        state_s=state_s,
        # The device's mark is the highest since the process began: another plan's, unless it rose.
        peak_bytes=peak if peak > before else 0,
        updates=updates,
    )


def _disturbed_updates(ready: Ready) -> tuple[LeafUpdate, ...]:
    """What the first step changes if its arguments are a little others; frees them again."""
    loop = _Loop(ready)
    loop.disturb()
    return loop.first_step()[1]


class _Loop:
    """A training loop at some step, with its state."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._args, self._kwargs = state(ready)
        leaves = jax.tree.leaves((self._args, self._kwargs))
        self._masters = {position: duplicate(leaves[position]) for position in ready.lost}
        _block_until_ready(leaves)
        # XLA's CPU devices share one pool of threads, and a program that waits in a collective
        # keeps its thread: several steps in flight starve each other until XLA aborts after 40
        # seconds.
        self._one_at_a_time = jax.default_backend() == "cpu"

    def disturb(self) -> None:
        """Changes the float arguments by about a unit in the last place of the coarsest type."""
        leaves, structure = jax.tree.flatten(self._args)
        changed = [
            leaf if is_ref(leaf) else conform(disturbed(leaf, self._ready.loss_dtype), to)
            for leaf, to in zip(leaves, self._ready.shardings)
        ]
        self._args = structure.unflatten(changed)

    def first_step(self) -> tuple[list[float], tuple[LeafUpdate, ...]]:
        """Runs one step: its scalar floats, and what it changes in the arrays that go on."""
        devices = self._ready.mesh.devices.flat
        is_shared = len({one.process_index for one in devices}) > 1
        before = sampled(self._args, is_shared=is_shared)
        losses = self.losses_of_step()
        return losses, updates_of(before, sampled(self._args, is_shared=is_shared))

    def losses_of_step(self) -> list[float]:
        """Runs one step and reads its scalar floats."""
        outputs = self._ready.told(self._step())
        return [float(leaf) for leaf in jax.tree.leaves(outputs) if _is_loss(leaf)]

    def sample(self, steps: int) -> float:
        """Seconds per step over chained steps, synchronized once, at the end."""
        if self._masters:
            return self._sample_apart(steps)
        begin = perf_counter()
        for _ in range(steps):
            outputs = self._step()
            if self._one_at_a_time:
                wait(outputs, self._args)
        wait(outputs, self._args)  # pyright: ignore[reportPossiblyUnboundVariable]
        return (perf_counter() - begin) / steps

    def _sample_apart(self, steps: int) -> float:
        """Times each step alone: donated arguments that nothing replaces are made anew before
        it."""
        spent = 0.0
        for _ in range(steps):
            self._restore()
            begin = perf_counter()
            outputs = self._call()
            wait(outputs, self._args)
            spent += perf_counter() - begin
            self._advance(outputs)
        return spent / steps

    def _step(self) -> Any:
        self._restore()
        outputs = self._call()
        self._advance(outputs)
        return outputs

    def _call(self) -> Any:
        return self._ready.compiled(*self._args, **self._kwargs)

    def _advance(self, outputs: Any) -> None:
        ready = self._ready
        if ready.workload.advance is None:
            self._args = ready.carry.advance(outputs, self._args)
            if ready.settled:
                return
        else:
            like = ready.workload.args
            returned: Any = ready.workload.advance(outputs, ready.split.whole(self._args, like))
            self._args = _checked(returned, len(like), ready)
        leaves, structure = jax.tree.flatten(self._args)
        self._args = structure.unflatten(
            [
                leaf if is_ref(leaf) else conform(leaf, to)
                for leaf, to in zip(leaves, ready.shardings)
            ]
        )

    def _restore(self) -> None:
        if self._masters:
            leaves, structure = jax.tree.flatten((self._args, self._kwargs))
            for position, master in self._masters.items():
                leaves[position] = duplicate(master)
            self._args, self._kwargs = structure.unflatten(leaves)
            _block_until_ready(leaves)


def _plausible(seconds: float) -> float:
    """A time as a clock gives it: no step takes none at all."""
    if not 0.0 < seconds < float("inf"):
        raise UsageError(
            f"the clock says that a step took {seconds:g} s",
            hint="look for what replaces or stops `time.perf_counter` in this process",
        )
    return seconds


def _checked(returned: Any, count: int, ready: Ready) -> tuple[Any, ...]:
    if type(returned) not in (tuple, list) or len(returned) != count:
        raise UsageError(
            f"`advance` returned {kind_of(returned)}, not the {count} arguments of the step",
            hint="return all positional arguments, as a tuple",
        )
    dynamic, _ = ready.split.dynamic(returned, {})
    if found := difference(
        forms_of(dynamic), forms_of(ready.tree[0]), where="args", shardings=False
    ):
        raise UsageError(
            f"`advance` returned other arguments than the step takes: {found}",
            hint="return them as they are in `args`",
        )
    return repacked(dynamic, ready.tree[0])


def _is_loss(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf_shape(leaf) == ()
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _peak_bytes(ready: Ready) -> int:
    """The highest mark of any local device of the mesh since the process began; 0 if none is
    kept."""
    marks = [device.memory_stats() or {} for device in ready.mesh.local_devices]
    return max((int(mark.get("peak_bytes_in_use", 0)) for mark in marks), default=0)
