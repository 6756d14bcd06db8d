"""Visits a plan: makes its state, records the first losses, and times samples of chained steps
(jax)."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from automesh.errors import UsageError, kind_of
from automesh.program.execute.prepare import Ready, conform, duplicate, state
from automesh.program.execute.team import Team
from automesh.program.execute.updates import (
    digests_of,
    disturbed,
    loss_vectors,
    results_of,
    sampled,
    updates_of,
    with_sensitivities,
)
from automesh.program.lower.static_args import is_ref, leaf_dtype, leaf_shape
from automesh.program.nouns import ArgumentDigest, LeafUpdate, LossVector
from automesh.program.script.contexts import entered
from automesh.program.script.leaf_forms import difference, forms_of, repacked

# `perf_counter` and this are bound before any user code runs: functions with which a script
# replaces them must not time its step.
_block_until_ready = jax.block_until_ready
# The most arrays that count as losses of single examples or tokens, if a step returns no loss. A
# step with more of them returns something else, such as gradients.
_MOST_VECTORS = 4
_LARGEST_VECTOR = 2**20


# Waiting for the devices, references included (jax).


def wait(outputs: Any, args: Any) -> None:
    """Waits until the step has finished that returned `outputs`, or wrote to references among
    `args`.

    `jax.block_until_ready` passes over a reference without waiting (jax 0.10.1 to 0.12.0.1).
    """
    written = [_buffer(leaf) for leaf in jax.tree.leaves(args) if is_ref(leaf)]
    _block_until_ready((outputs, written))


def _buffer(reference: Any) -> Any:
    """Returns the array in a mutable reference, or a copy of its content if this jax does not give
    access to it."""
    buffer = getattr(getattr(reference, "_refs", None), "_buf", None)
    return reference[...] if buffer is None else buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The result of a visit.

    Attributes:
      samples_s: seconds per step.
      losses: scalar floats of the first steps, in order.
      setup_s: seconds before the first sample.
      state_s: the part of `setup_s` that made the state and warmed up.
      peak_bytes: the most bytes in use on one device; 0 where the device does not report them.
      first: the outputs of the first step, if losses are recorded.
    """

    samples_s: tuple[float, ...]
    losses: tuple[float, ...]
    setup_s: float
    state_s: float
    peak_bytes: int
    first: First


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The results of the first step of a visit.

    Attributes:
      losses: its scalar floats; for a step without any, the means of `vectors`.
      updates: the changes of the carried arrays; for a step without losses and carried arrays, the
        arrays that it returns.
      vectors: the losses that it returns as arrays, if it returns no scalar.
      arguments: digests of its arguments.
    """

    losses: tuple[float, ...] = ()
    updates: tuple[LeafUpdate, ...] = ()
    vectors: tuple[LossVector, ...] = ()
    arguments: tuple[ArgumentDigest, ...] = ()


class KeptLoops:
    """Training loops whose states wait for the next visit to their plans."""

    def __init__(self) -> None:
        self._loops: dict[Any, _Loop] = {}

    def has(self, key: Any) -> bool:
        """Whether the state of this plan is kept."""
        return key in self._loops

    def clear(self) -> None:
        """Frees all kept states."""
        if self._loops:
            self._loops.clear()
            gc.collect()

    def take(self, key: Any) -> _Loop | None:
        """Removes and returns the loop of a plan, if it is kept."""
        return self._loops.pop(key, None)

    def put(self, key: Any, loop: _Loop) -> None:
        """Keeps a loop."""
        self._loops[key] = loop


def visit(
    ready: Ready,
    *,
    kept: KeptLoops,
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
    """Runs the step from its initial state, or from the state at the end of the last visit.

    All of its arrays are freed before the return, unless `keep` is set.

    Args:
      kept: states of earlier visits.
      key: key of this plan in `kept`.
      keep: whether to keep the state for the next visit.
      steps: chained steps per sample; 0 takes no samples.
      samples: samples to take.
      loss_steps: number of first steps whose scalar floats are recorded.
      warmup_s: least time in seconds for which steps run before the first sample.
      since_s: when the visit began, by `time.perf_counter`.
      started: is called without arguments once the state is made.
      team: the processes that run the step.
      sensitivity: whether to run the first step also from disturbed arguments; see `LeafUpdate`.

    Raises:
      UsageError: `advance` returns something else than the step's arguments, or the clock stood
        still while the step ran.
    """
    before = _peak_bytes(ready)
    loop = kept.take(key)
    try:
        with entered(ready.ambient, ready.workload.context):
            is_new = loop is None
            moved = _disturbed_updates(ready) if sensitivity and loss_steps else ()
            state_s = 0.0
            if loop is None:
                begun_s = perf_counter()
                loop = _Loop(ready)
                state_s = perf_counter() - begun_s
                # Without this, early processes would wait for the others in a collective of the
                # step.
                team.gather("state")
            started()
            first = First()
            if loss_steps:
                first = loop.first_step()
                first = replace(first, updates=with_sensitivities(first.updates, moved))
            losses = list(first.losses)
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
            # The next plan may need all memory, and cycles of tracebacks and closures still hold
            # arrays.
            gc.collect()
    return Visit(
        samples_s=tuple(taken),
        losses=tuple(losses),
        setup_s=setup_s,
        state_s=state_s,
        # The device reports its peak since the process began; it belongs to this plan only if it
        # rose.
        peak_bytes=peak if peak > before else 0,
        first=first,
    )


def _disturbed_updates(ready: Ready) -> tuple[LeafUpdate, ...]:
    """Returns the updates of the first step from slightly different arguments, which are freed
    again."""
    loop = _Loop(ready)
    loop.disturb()
    return loop.first_step().updates


class _Loop:
    """A training loop at some step, with its state."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._args, self._kwargs = state(ready)
        leaves = jax.tree.leaves((self._args, self._kwargs))
        self._masters = {position: duplicate(leaves[position]) for position in ready.lost}
        _block_until_ready(leaves)
        # XLA's CPU devices share one pool of threads, and a program that waits in a collective
        # keeps its thread: several running steps would block each other until XLA aborts after 40
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

    def first_step(self) -> First:
        """Runs one step; returns digests of its arguments and results, and its updates."""
        devices = self._ready.mesh.devices.flat
        is_shared = len({one.process_index for one in devices}) > 1
        before = sampled(self._args, is_shared=is_shared)
        arguments = digests_of(self._args, self._kwargs, before, is_shared=is_shared)
        outputs = self._step()
        arrays = self._loss_arrays(outputs)
        losses = tuple(self._losses(outputs))
        updates = updates_of(before, sampled(self._args, is_shared=is_shared))
        if not (losses or updates):  # Gradients that the script applies itself.
            returned = self._ready.carry.returned_beside(outputs)
            updates = results_of(returned, is_shared=is_shared)
        return First(
            losses=losses,
            updates=updates,
            vectors=loss_vectors(arrays, is_shared=is_shared),
            arguments=arguments,
        )

    def losses_of_step(self) -> list[float]:
        """Runs one step and reads its scalar floats, or the means of its arrays of losses."""
        return self._losses(self._step())

    def _losses(self, outputs: Any) -> list[float]:
        scalars = [
            float(leaf)
            for leaf in jax.tree.leaves(self._ready.compared_outputs(outputs))
            if _is_loss(leaf)
        ]
        return scalars or [float(_mean(one)) for one in self._loss_arrays(outputs).values()]

    def _loss_arrays(self, outputs: Any) -> dict[str, jax.Array]:
        """Returns, for a step that returns no scalar float, the arrays that may be losses of single
        examples, by their paths in the return value."""
        ready = self._ready
        if any(map(_is_loss, jax.tree.leaves(ready.compared_outputs(outputs)))):
            return {}
        found = ready.carry.returned_beside(outputs)
        if ready.workload.advance is not None:
            # Arrays that the user's `advance` carries are only known by their shapes and types.
            looks = {(leaf_shape(one), leaf_dtype(one)) for one in jax.tree.leaves(ready.tree)}
            found = {
                path: leaf
                for path, leaf in found.items()
                if (leaf_shape(leaf), leaf_dtype(leaf)) not in looks
            }
        floats = {path: leaf for path, leaf in found.items() if _is_float_array(leaf)}
        is_small = all(
            leaf.ndim <= 2 and 0 < leaf.size <= _LARGEST_VECTOR for leaf in floats.values()
        )
        return floats if is_small and len(floats) <= _MOST_VECTORS else {}

    def sample(self, steps: int) -> float:
        """Times chained steps with one synchronization at the end; returns the seconds per step."""
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
        """Times each step alone, after making the donated arguments again that no output
        replaces."""
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
    """Checks a measured time: no step takes zero seconds or less."""
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
    return _is_float_array(leaf) and leaf_shape(leaf) == ()


def _is_float_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


@jax.jit
def _mean(array: Any) -> Any:
    return jnp.mean(array, dtype=jnp.promote_types(array.dtype, jnp.float32))


def _peak_bytes(ready: Ready) -> int:
    """Returns the highest memory peak of the mesh's local devices since the process began; 0 if
    unknown."""
    marks = [device.memory_stats() or {} for device in ready.mesh.local_devices]
    return max((int(mark.get("peak_bytes_in_use", 0)) for mark in marks), default=0)
