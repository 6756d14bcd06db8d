"""Rules about the arguments and results of a step, applied to its first program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from automesh.cost.terms import Cure, Finding, value_of
from automesh.ir.findings.nouns import LEAST_BYTES, PartitionedProgram, several
from automesh.ir.findings.rule import (
    Rule,
    Sizes,
    StateCheck,
    advice,
    array_of,
    axes_of,
    bytes_of,
    parts,
)
from automesh.ir.graph import Value, total_bytes
from automesh.ir.op_kinds import VIEWS
from automesh.ir.read_whole import is_factor_read_twice, results_of_loops
from automesh.texts.terminal import clean
from automesh.units import format_bytes

SECOND_COMPILE = "second-compile"
STATE_CHANGES_TYPE = "state-changes-type"
LOST_DONATION = "lost-donation"
UNDONATED_STATE = "undonated-state"
REPLICATED_STATE = "replicated-state"
STATE_ON_ONE_DEVICE = "state-on-one-device"
STATE_SPLIT_OTHERWISE = "state-split-otherwise"
_UPDATES = frozenset(("dynamic_update_slice", "scatter"))
_FARTHEST = 64
_STEP = re.compile(r"\[[^\]]*\]|\.?\w+")
# A whole array is reported if it takes at least this part of a device's bytes of the state.
_SHARE = 0.1
# Several are, or those that other axes split, if they take this part together, and each at least
# the second one.
_SHARE_TOGETHER, _SHARE_OF_ONE = 0.5, 0.02
# The argument that an array is in: `args[0]` of `args[0]['w']`, `model` of `model.up.kernel`.
_ARGUMENT = re.compile(r"^(?:args\[\d+\]|\w*)")
# `Finding.detail` of state that is small and was made on one device.
_ONE_DEVICE = "one device"
# An axis of this name is meant to split the state.
_NAMED = "fsdp"


def second_compile(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds state that comes back with another sharding."""
    if not _is_state(program):
        return
    yield from _counters_on_one_device(program)
    places = [argument for argument, _ in program.state.moved]
    donated = set(program.graph.donated)
    if places and not set(places) <= set(program.state.on_one_device):
        yield _finding(
            program,
            SECOND_COMPILE,
            places,
            counted=[place for place in places if place in donated],
            axes=_axes_that_differ(program),
            cure=Cure(
                kind="return-as-given",
                arguments=tuple(places),
                results=tuple(result for _, result in program.state.moved),
                splits=tuple(program.graph.top.returned[r].axes for _, r in program.state.moved),
            ),
        )


def _counters_on_one_device(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds small state that was made on one device, such as the count of an optimizer.

    It comes back on all devices, so that jax compiles the step again for it.
    """
    carried = {argument for argument, _ in program.state.pairs}
    places = [one for one in program.state.on_one_device if one in carried]
    values = [program.graph.top.arguments[place] for place in places]
    if places and sum(value.global_bytes for value in values) < LEAST_BYTES:
        yield _finding(program, SECOND_COMPILE, places, counted=[], detail=_ONE_DEVICE)


def _second_compile_cure(finding: Finding) -> str:
    if finding.detail == _ONE_DEVICE:
        return (
            "make it on all devices, as by `jax.device_put(it, NamedSharding(mesh, P()))`, or make "
            "the state under `jax.jit` with `out_shardings`"
        )
    return "state `out_shardings` for it, or split the argument like the result"


def _second_compile_words(finding: Finding, sizes: Sizes) -> str:
    if finding.detail == _ONE_DEVICE:
        return (
            f"{array_of(finding)} was made on one device and comes back on all of the mesh, so "
            "that the second call compiles the whole step again"
        )
    lost = bytes_of(finding, sizes)
    donation = f", and its first call cannot reuse {lost} that are donated" if finding.bytes else ""
    return (
        f"{array_of(finding)} comes back split over {axes_of(finding)} otherwise than it went in, "
        f"so that the second call compiles another program{donation}"
    )


def state_changes_type(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds donated state whose result has another type."""
    places = list(program.state.changed)
    if places:
        yield _finding(
            program,
            STATE_CHANGES_TYPE,
            places,
            cure=Cure(kind="convert-back", arguments=tuple(places)),
        )


def _state_changes_type_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} comes back in another type than it went in: "
        f"{bytes_of(finding, sizes)} on a device are donated and not reused, and the next call "
        "compiles another program or fails"
    )


def lost_donation(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds donated arguments that no result replaces."""
    if program.state.lost:
        yield _finding(program, LOST_DONATION, list(program.state.lost))


def _lost_donation_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} is donated and no output replaces it: {bytes_of(finding, sizes)} on "
        "a device are not reused, and it is made anew for every step"
    )


def undonated_state(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds state that is kept in addition to its successor, because it is not donated."""
    known = dict(program.state.pairs) if _is_state(program) else {}
    donated = {*program.graph.donated, *program.graph.host}
    # A result that is an argument with some rows replaced is its successor, whatever its place.
    written = {a: r for a, r in _written_into(program) if r not in known.values()}
    pairs = [(a, r) for a, r in {**written, **known}.items() if a not in donated]
    places = [argument for argument, _ in pairs if _is_there(program, argument)]
    if places and _device_bytes(program, places) >= LEAST_BYTES:
        yield _finding(
            program,
            UNDONATED_STATE,
            places,
            detail=", ".join(
                dict.fromkeys(_ARGUMENT.findall(program.state.name(one))[0] for one in places)
            ),
            cure=Cure(kind="donate", arguments=tuple(argument for argument, _ in pairs)),
        )


def _written_into(program: PartitionedProgram) -> Iterator[tuple[int, int]]:
    """Lists (argument, result) where the result is the argument with some of its rows replaced,
    as the keys and values of earlier tokens are."""
    arguments = program.graph.top.arguments
    for result, value in enumerate(program.graph.top.returned):
        place = program.argument_of(_before_updates(value))
        if place is None or value.producer is None:
            continue
        given = arguments[place]
        if (given.shape, given.dtype, given.axes) == (value.shape, value.dtype, value.axes):
            yield place, result


def _before_updates(value: Value) -> Value:
    """Traces a value through the operations that replace some of its rows, also in loops."""
    for _ in range(_FARTHEST):
        made = value.producer
        if made is None:
            break
        if made.name == "while":
            number = made.results.index(value)
            body = made.bodies[0]
            inside = _before_updates(body.returned[number])
            if inside is not body.arguments[number]:
                break
            value = made.operands[number]
        elif made.name in _UPDATES or made.name in VIEWS:
            value = made.operands[0]
        else:
            break
    return value


def _undonated_state_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} is replaced by what the step returns and not donated: old and new, "
        f"{bytes_of(finding, sizes)} on a device, are kept at the same time"
    )


def replicated_state(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds state that is whole along axes which split an equal array, or most of the state."""
    top, after = program.graph.top, dict(program.state.pairs)
    kept = {top.returned[result] for result in after.values()}
    of_loops = results_of_loops(program.graph)
    moved = {argument for argument, _ in program.state.moved}
    alone = set(program.state.on_one_device)
    carried = [(a, v) for a, v in program.carried() if a not in moved | alone]
    large = [(a, v) for a, v in carried if v.global_bytes >= LEAST_BYTES]
    found: dict[tuple[tuple[str, ...], bool], list[tuple[int, Split, str]]] = {}
    told: set[int] = set()
    # Of arrays with the same shape and the same axes, the first one.
    distinct: dict[tuple[tuple[int, ...], Split], tuple[int, Value]] = {}
    for argument, value in carried:
        distinct.setdefault((value.shape, value.axes), (argument, value))
    alike: dict[tuple[int, ...], list[tuple[int, Value]]] = {}
    for (shape, _), one in distinct.items():
        alike.setdefault(shape, []).append(one)
    for argument, value in large:
        split = _split_of_equal_array(value, alike[value.shape], program)
        if split is not None:
            axes, wanted, twin = split
            found.setdefault((axes, True), []).append((argument, wanted, twin))
            told.add(argument)
    for axis in _axes_of_state(program, carried):
        whole = [
            (argument, value, parts_of_it)
            for argument, value in large
            if argument not in told
            and (parts_of_it := _split_by(axis, value, program.sizes)) is not None
        ]
        factors = {
            argument
            for argument, value, _ in whole
            if is_factor_read_twice(value, top.returned[after[argument]], kept, of_loops)
        }
        places = _large_enough(axis, whole, carried, program.sizes, factors)
        if places:
            found.setdefault(((axis,), False), []).extend((a, wanted, "") for a, wanted in places)
            told |= {argument for argument, _ in places}
    for (axes, _), places in found.items():
        arguments = [argument for argument, _, _ in places]
        yield _finding(
            program,
            REPLICATED_STATE,
            arguments,
            axes=axes,
            detail=places[0][2],
            cure=Cure(
                kind="split-like",
                arguments=tuple(arguments),
                results=tuple(after[argument] for argument in arguments),
                splits=tuple(wanted for _, wanted, _ in places),
            ),
        )


def _replicated_state_words(finding: Finding, sizes: Sizes) -> str:
    share = parts(finding.axes, sizes)
    whole = value_of(finding.bytes, sizes)
    like = f", as they split {clean(finding.detail)}" if finding.detail else ""
    return (
        f"{array_of(finding)} is the same on all devices along {axes_of(finding)}: "
        f"{format_bytes(whole)} on each, and {format_bytes(whole / share)} if these axes split it"
        f"{like}"
    )


def state_on_one_device(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds state that was made on one device, although the mesh has several."""
    carried = {argument for argument, _ in program.state.pairs}
    places = [one for one in program.state.on_one_device if one in carried]
    if not places:
        return
    values = [program.graph.top.arguments[place] for place in places]
    if sum(value.global_bytes for value in values) >= LEAST_BYTES:
        yield Finding(
            rule=STATE_ON_ONE_DEVICE,
            array=several([program.state.name(place) for place in places]),
            # All of it lies on the first device.
            bytes=total_bytes(
                Value(shape=one.shape, dtype=one.dtype, axes=((),) * len(one.shape))
                for one in values
            ),
            axes=tuple(axis for axis, size in program.graph.mesh if size > 1),
            source=program.state.source,
        )


def _state_on_one_device_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} was made on one device, which holds all {bytes_of(finding, sizes)} "
        "of it when the first step starts, though the mesh has several"
    )


def state_split_otherwise(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds state that the same axes split along another dimension than the parameter that it
    belongs to, so that the gradient moves from one to the other in every step."""
    moved = [
        seen.operation.results[0]
        for seen in program.operations()
        if seen.operation.name == "all_to_all" and not seen.operation.attributes.get("manual")
    ]
    shapes = {value.shape for value in moved}
    changed = {argument for argument, _ in program.state.moved}
    large = [
        (argument, value)
        for argument, value in program.carried()
        if argument not in changed and value.global_bytes >= LEAST_BYTES and value.shape in shapes
    ]
    # A parameter's name is the shorter one.
    large.sort(key=lambda one: len(_steps_of(program.state.name(one[0]))))
    found: dict[tuple[str, ...], list[tuple[int, int, Split]]] = {}
    for number, (argument, value) in enumerate(large):
        twin = _parameter_of(argument, value, large[:number], program)
        if twin is None:
            continue
        other, like = twin
        if like.axes != value.axes and _every(like.axes) == _every(value.axes):
            axes = tuple(axis for axis, _ in program.graph.mesh if axis in _every(value.axes))
            found.setdefault(axes, []).append((argument, other, like.axes))
    results = dict(program.state.pairs)
    for axes, places in found.items():
        arguments = [argument for argument, _, _ in places]
        alike = {program.graph.top.arguments[argument].shape for argument in arguments}
        yield Finding(
            rule=STATE_SPLIT_OTHERWISE,
            array=several([program.state.name(argument) for argument in arguments]),
            bytes=total_bytes(value for value in moved if value.shape in alike),
            axes=axes,
            source=program.state.source,
            detail=program.state.name(places[0][1]),
            cure=Cure(
                kind="split-like",
                arguments=tuple(arguments),
                results=tuple(results[argument] for argument in arguments),
                splits=tuple(split for _, _, split in places),
            ),
        )


def _parameter_of(
    argument: int,
    value: Value,
    before: Sequence[tuple[int, Value]],
    program: PartitionedProgram,
) -> tuple[int, Value] | None:
    """Returns the array of the state with the same shape whose name ends most alike."""
    name = _steps_of(program.state.name(argument))
    ends = {
        other: _common_end(name, _steps_of(program.state.name(other)))
        for other, like in before
        if like.shape == value.shape
    }
    most = max(ends.values(), default=0)
    best = [(other, like) for other, like in before if most and ends.get(other) == most]
    return best[0] if best else None


def _steps_of(name: str) -> list[str]:
    """Returns the steps of a path: `args`, `[0]`, `.mu` and `['w']` of `args[0].mu['w']`."""
    return _STEP.findall(name)


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _state_split_otherwise_words(finding: Finding, sizes: Sizes) -> str:
    split = "split" if len(finding.axes) > 1 else "splits"
    return (
        f"{axes_of(finding)} {split} {array_of(finding)} along another dimension than "
        f"{clean(finding.detail)}, to which it belongs: {bytes_of(finding, sizes)} on a device "
        "move from one split to the other in every step"
    )


Split = tuple[tuple[str, ...], ...]
_Found = tuple[tuple[str, ...], Split, str]


def _finding(
    program: PartitionedProgram,
    rule: str,
    places: list[int],
    *,
    counted: list[int] | None = None,
    axes: tuple[str, ...] = (),
    detail: str = "",
    cure: Cure | None = None,
) -> Finding:
    arguments = program.graph.top.arguments
    return Finding(
        rule=rule,
        array=several([program.state.name(place) for place in places]),
        bytes=total_bytes(arguments[place] for place in (places if counted is None else counted)),
        axes=axes,
        source=program.state.source,
        detail=detail,
        cure=cure,
    )


def _is_state(program: PartitionedProgram) -> bool:
    """Whether the result is surely the next step's argument.

    A single array with the shape of an argument may be anything.
    """
    pairs = program.state.pairs
    return (
        len(pairs) > 1
        or len(program.graph.top.returned) > len(pairs)
        or any(argument in program.graph.donated for argument, _ in pairs)
    )


def _is_there(program: PartitionedProgram, argument: int) -> bool:
    value = program.graph.top.arguments[argument]
    return bool(value.shape) and value.global_bytes > 0


def _device_bytes(program: PartitionedProgram, places: list[int]) -> float:
    arguments = program.graph.top.arguments
    return value_of(total_bytes(arguments[place] for place in places), program.sizes)


def _axes_that_differ(program: PartitionedProgram) -> tuple[str, ...]:
    """Returns mesh axes that split moved arrays before and after in different ways."""
    named: set[str] = set()
    top = program.graph.top
    for argument, result in program.state.moved:
        for one, other in zip(top.arguments[argument].axes, top.returned[result].axes, strict=True):
            named |= set(one) ^ set(other)
    return tuple(axis for axis, _ in program.graph.mesh if axis in named)


def _split_of_equal_array(
    value: Value, alike: Sequence[tuple[int, Value]], program: PartitionedProgram
) -> _Found | None:
    """Returns the sharding of another array of the state with more axes.

    Args:
      alike: the arrays of the state with the same shape, those with the same axes once.
    """
    mine = _every(value.axes)
    for argument, other in alike:
        if mine < _every(other.axes):
            missing = _every(other.axes) - mine
            axes = tuple(axis for axis, _ in program.graph.mesh if axis in missing)
            return axes, other.axes, program.state.name(argument)
    return None


def _axes_of_state(
    program: PartitionedProgram, carried: Sequence[tuple[int, Value]]
) -> Iterator[str]:
    """Lists the axes that are meant to split the state.

    They split most of it; or some of it and the batch; or have a name that says so.
    """
    if sum(value.global_bytes for _, value in carried) < LEAST_BYTES:
        return
    # A cache is split like the batch, which says nothing about how parameters are meant to be.
    parameters = [value for _, value in carried if not program.holds_rows(value)]
    total = sum(value.global_bytes for value in parameters)
    of_batch = program.batch_axes()
    for axis, size in program.sizes.items():
        split = sum(value.global_bytes for value in parameters if axis in _every(value.axes))
        is_meant = _NAMED in axis or (axis in of_batch and split >= LEAST_BYTES)
        if size > 1 and (split >= max(total, LEAST_BYTES) / 2 or is_meant):
            yield axis


def _large_enough(
    axis: str,
    whole: Sequence[tuple[int, Value, Split]],
    carried: Sequence[tuple[int, Value]],
    sizes: dict[str, int],
    factors: Collection[int],
) -> list[tuple[int, Split]]:
    """Chooses the arrays that an axis leaves whole and that are large enough to be reported.

    An array counts by its share of the bytes of the state on one device. If the axis splits most of
    the state, a single array that no axis splits is enough. Otherwise the arrays must be large
    enough together, since some are left whole on purpose.

    Args:
      factors: thin ones that products read, and read again when they are replaced to make other
        state, as the factors of a compressed gradient are. To split a few of them would only add to
        what is sent.
    """
    total = sum(value.bytes.at(sizes) for _, value in carried)
    split = sum(value.global_bytes for _, value in carried if axis in _every(value.axes))
    is_majority = split >= sum(value.global_bytes for _, value in carried) / 2
    kept = sum(value.bytes.at(sizes) for argument, value, _ in whole if argument in factors)
    if kept < _SHARE_TOGETHER * total:
        whole = [one for one in whole if one[0] not in factors]
    together = sum(value.bytes.at(sizes) for _, value, _ in whole)
    if together >= _SHARE_TOGETHER * total:
        return [
            (argument, after)
            for argument, value, after in whole
            if value.bytes.at(sizes) >= _SHARE_OF_ONE * total
        ]
    return [
        (argument, after)
        for argument, value, after in whole
        if is_majority and not _every(value.axes) and value.bytes.at(sizes) >= _SHARE * total
    ]


def _split_by(axis: str, value: Value, sizes: dict[str, int]) -> Split | None:
    """Returns the sharding of an array with one more axis, on the largest possible dimension.

    None: the axis splits it already, or divides no dimension.
    """
    if axis in _every(value.axes):
        return None
    held = [
        length // parts(axes, sizes) for length, axes in zip(value.shape, value.axes, strict=True)
    ]
    place = max(
        (d for d, length in enumerate(held) if length >= sizes[axis] and length % sizes[axis] == 0),
        key=lambda d: held[d],
        default=None,
    )
    if place is None:
        return None
    return tuple((*axes, axis) if d == place else axes for d, axes in enumerate(value.axes))


def _every(axes: Iterable[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(axis for one in axes for axis in one)


def _like_equal_array(finding: Finding) -> str:
    like = f" like {clean(finding.detail)}" if finding.detail else f" over {axes_of(finding)}"
    return (
        f"split it{like}: give its `jax.ShapeDtypeStruct`, its `jax.device_put` or the "
        "`out_shardings` of what makes it that NamedSharding"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name=SECOND_COMPILE,
        check=StateCheck(second_compile),
        title="second compile",
        what=_second_compile_words,
        why="jax compiles a step once for each way in which its arguments are split, and what a "
        "step returns is split as the compiler likes unless `out_shardings` says it",
        cure=_second_compile_cure,
        is_always_shown=True,
    ),
    Rule(
        name=STATE_CHANGES_TYPE,
        check=StateCheck(state_changes_type),
        title="the state changes its type",
        what=_state_changes_type_words,
        why="a buffer is reused only by an output of the same shape and type",
        cure=advice("convert it back before the step returns it"),
        is_broken=True,
        is_always_shown=True,
    ),
    Rule(
        name=LOST_DONATION,
        check=StateCheck(lost_donation),
        title="lost donation",
        what=_lost_donation_words,
        why="a donated buffer is reused by an output of the same shape and type, and there is none",
        cure=advice("return what replaces it, or do not donate it"),
        is_broken=True,
        is_always_shown=True,
    ),
    Rule(
        name=UNDONATED_STATE,
        check=StateCheck(undonated_state),
        title="undonated state",
        what=_undonated_state_words,
        why="jax may not write over an argument that the caller could still use",
        cure=advice("name its argument in `donate_argnums` of `jax.jit`"),
    ),
    Rule(
        name=REPLICATED_STATE,
        check=StateCheck(replicated_state),
        title="replicated state",
        what=_replicated_state_words,
        why="an array without a sharding, or with a PartitionSpec that leaves these axes out, is "
        "kept whole on every device along them",
        cure=_like_equal_array,
    ),
    Rule(
        name=STATE_SPLIT_OTHERWISE,
        check=StateCheck(state_split_otherwise),
        title="state split otherwise",
        what=_state_split_otherwise_words,
        why="the update of an array is computed with one split of it, so that what is split "
        "otherwise, the gradient or the state, moves between devices first",
        cure=_like_equal_array,
    ),
    Rule(
        name=STATE_ON_ONE_DEVICE,
        check=StateCheck(state_on_one_device),
        title="state on one device",
        what=_state_on_one_device_words,
        why="an array that is made or loaded without a sharding lies on the first device",
        cure=advice("make it under `jax.jit` with `out_shardings`, or load it with its shardings"),
    ),
)
