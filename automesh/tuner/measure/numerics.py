"""Checks whether two meshes compute the same function: compares their losses and the updates of
their state.

A step without a scalar loss is judged by the arrays of losses that it returns, if there are any,
and by how its first step changes the arrays of its state. If something differs, the arguments of
the two runs are compared, too: the mesh is not the cause of different data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from automesh.mesh.axes import Plan
from automesh.outcomes import Numerics
from automesh.program.nouns import RESULT, ArgumentDigest, LeafUpdate, LossVector, VisitAnswer
from automesh.tuner.measure.schedule import (
    Calibration,
    Subject,
    VisitPool,
    VisitRules,
    record_losses,
)

# The relative change that reordered sums may cause, by the coarsest type in the step. A loss that
# is itself rounded to 16 bits may be rounded to the neighbouring value: at least one unit in the
# last place, 2^-7 for bfloat16, 2^-10 for float16. Otherwise losses are means, in which the
# roundings of activations average out. For 32 and 64 bits the tolerance is a thousand, respectively
# half a million units: it covers sums of millions of terms, approximations of exp and a few
# optimizer steps. A forgotten collective changes the loss, a gradient's norm or a later step by per
# cents.
_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
_NARROW_TOLERANCE = 5e-2  # float8 and narrower: half a unit in the last place of e4m3 is 6e-2
_SMALL = (
    # a scalar below this share of the largest is compared at that size, since zero has no scale
    1e-3
)
# The distance that an update of an array may have from the reference's, relative to its norm, by
# the coarsest type in the step. Rounding of activations affects gradients element by element and
# does not average out: it is a hundredth to a tenth of the norm for bfloat16. A forgotten sum over
# devices leaves the gradient of an eighth of the batch: the distance is then half of the norm or
# several times the norm.
_UPDATE_TOLERANCE = {"float64": 1e-6, "float32": 2e-2, "bfloat16": 0.3, "float16": 0.1}
_NARROW_UPDATE_TOLERANCE = 0.5
# If all elements move by the same amount, as in Adam's first step, only signs are compared.
# Elements whose gradient is rounding may change sign, and if a share s does, the distance is 2
# sqrt(s).
_EVEN_SPREAD = 0.5
_EVEN_TOLERANCE = {"float64": 1e-2, "float32": 0.2, "bfloat16": 0.6, "float16": 0.5}
# If a change of the arguments by one unit in the last place changes an update of the reference,
# another order of summation may change it by this many times as much. Gradients that cancel, such
# as those of the biases of keys in attention, are only rounding: then any direction is as good as
# another, two updates of one norm are up to twice the norm apart, and eight projections may show
# half as much again.
_SENSITIVITIES = 2.0
_ROUNDING_ALONE = 0.3
_ANY_DIRECTION = 3.0
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_NARROW_UNIT = 0.25
# Roundings do not average out in the loss of a single example, which may differ this many times as
# much as the mean of all.
_SINGLE_LOSS = 4.0
_NOTHING_TO_COMPARE = (
    "the step returns no number and changes no array that it carries on, so nothing shows whether "
    "meshes compute the same: let it return its loss"
)

_NO_NUMBERS = (
    "the step returns no loss, and {what} is not a number, so nothing shows whether meshes compute "
    "the same: look at its data, and whether its learning rate is too large"
)

_NO_LOSS = (
    "scalar {number} of the step is {value} on the reference, too, so nothing shows whether meshes "
    "compute the same: look at its data, such as indices that a table does not have, and whether "
    "its learning rate is too large"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of comparing losses with the reference's; `detail` is a sentence, empty if they
    agree."""

    verdict: Literal["agree", "differ", "unverified"]
    detail: str = ""


def loss_tolerance(dtype: str) -> float:
    """Returns the relative difference of losses that reordering alone may cause.

    Args:
      dtype: the coarsest float type that takes part in the step, as numpy or ml_dtypes name it.

    Raises:
      ValueError: `dtype` is not a float type.
    """
    if dtype in _TOLERANCE:
        return _TOLERANCE[dtype]
    if dtype.startswith(("float8", "float6", "float4")):
        return _NARROW_TOLERANCE
    raise ValueError(f"`{dtype}` is not a float type whose tolerance is known")


def compare_losses(reference: Sequence[float], losses: Sequence[float], dtype: str) -> Agreement:
    """Compares the scalar outputs of a plan's first steps with those of the reference.

    Args:
      reference: scalars of the reference: all of step 1, then of step 2, ...
      losses: scalars of the plan, in the same order.
      dtype: the coarsest float type that takes part in either step.

    Raises:
      ValueError: as for `loss_tolerance`.
    """
    tolerance = loss_tolerance(dtype)
    if len(reference) != len(losses):
        counts = f"{len(losses)} scalars here, {len(reference)} on the reference"
        return Agreement(verdict="differ", detail=f"the step returns {counts}")
    if not losses:
        return Agreement(verdict="unverified", detail=_NOTHING_TO_COMPARE)
    for number, (expected, got) in enumerate(zip(reference, losses), start=1):
        if not math.isfinite(expected) and not math.isfinite(got):
            detail = _NO_LOSS.format(number=number, value=expected)
            return Agreement(verdict="unverified", detail=detail)
        for whose, value in (("here", got), ("on the reference", expected)):
            if not math.isfinite(value):
                return Agreement(verdict="unverified", detail=f"scalar {number} is {value} {whose}")
    floor = _SMALL * max(abs(value) for value in reference)
    worst, distance = 0, 0.0
    for index, (expected, got) in enumerate(zip(reference, losses)):
        scale = max(abs(expected), abs(got), floor)
        apart = abs(got - expected) / scale if scale else 0.0
        if apart > distance:
            worst, distance = index, apart
    if distance <= tolerance:
        return Agreement(verdict="agree")
    return Agreement(
        verdict="differ",
        detail=(
            f"scalar {worst + 1} of {len(losses)} is {losses[worst]:.6g} here and "
            f"{reference[worst]:.6g} on the reference: {distance:.1e} apart, "
            f"{tolerance:.0e} allowed for {dtype}"
        ),
    )


def compare_updates(
    reference: Sequence[LeafUpdate], updates: Sequence[LeafUpdate], dtype: str
) -> Agreement:
    """Compares how the first step of a plan changes the state with how the reference changes it.

    The distance of two updates is estimated by their projections on the same random signs (Johnson
    and Lindenstrauss, Contemporary Mathematics 26, 1984): eight projections estimate it to about a
    quarter. The tolerance includes rounding in the type of the array itself.

    Args:
      reference: one for each array of the state; it is compared with the one of `updates` that has
        the same path.
      dtype: the coarsest float type that takes part in either step.

    Returns:
      The result. `agree` is also True if there is nothing to compare: then only losses count.
    """
    known = {one.path: one for one in reference}
    worst: tuple[float, str] = (0.0, "")
    for here in updates:
        there = known.get(here.path)
        if there is None or there.count != here.count:
            continue
        share, sentence = _distance(there, here, dtype)
        if share > worst[0]:
            worst = share, sentence
    if worst[0] <= 1.0:
        return Agreement(verdict="agree")
    return Agreement(verdict="differ", detail=worst[1])


def compared_updates(reference: Sequence[LeafUpdate], updates: Sequence[LeafUpdate]) -> int:
    """Returns how many arrays that both steps change can be compared."""
    known = {one.path: one for one in reference}
    pairs = [(known[here.path], here) for here in updates if here.path in known]
    return sum(
        there.count == here.count and (there.norm > 0.0 or here.norm > 0.0) for there, here in pairs
    )


def compare_vectors(
    reference: Sequence[LossVector], vectors: Sequence[LossVector], dtype: str
) -> Agreement:
    """Compares arrays of losses: every element must be within the effects of rounding.

    The scale of an element is at least that of the whole array, since zero has no scale.

    Args:
      reference: the arrays of the reference; arrays with the same path and size are compared.
      dtype: the coarsest float type that takes part in either step.
    """
    known = {one.path: one for one in reference}
    tolerance = _SINGLE_LOSS * loss_tolerance(dtype)
    worst: tuple[float, str] = (0.0, "")
    for here in vectors:
        there = known.get(here.path)
        if there is None or there.size != here.size:
            continue
        middle = math.sqrt(sum(one * one for one in there.values) / len(there.values))
        for place, (expected, got) in enumerate(zip(there.values, here.values, strict=True)):
            scale = max(abs(expected), abs(got), middle)
            apart = abs(got - expected) / scale if scale else 0.0
            if apart > worst[0]:
                worst = (
                    apart,
                    f"element {place + 1} of {len(here.values)} of the losses `{here.path}` is "
                    f"{got:.6g} here and {expected:.6g} on the reference: {apart:.1e} apart, "
                    f"{tolerance:.0e} allowed for {dtype}",
                )
    if worst[0] <= tolerance:
        return Agreement(verdict="agree")
    return Agreement(verdict="differ", detail=worst[1])


def other_arguments(
    reference: Sequence[ArgumentDigest], arguments: Sequence[ArgumentDigest]
) -> tuple[str, ...]:
    """Returns the names of the arguments whose values differ from those of the reference.

    Floats that were computed on another mesh may differ by rounding. Arguments of different sizes
    are ignored: then the programs differ, not the data.
    """
    known = {one.path: one for one in reference}
    return tuple(
        here.path
        for here in arguments
        if (there := known.get(here.path)) is not None
        and (there.count, there.dtype) == (here.count, here.dtype)
        and (None in (there.shape, here.shape) or there.shape == here.shape)
        and _has_other_values(there, here)
    )


def other_shapes(
    reference: Sequence[ArgumentDigest], arguments: Sequence[ArgumentDigest]
) -> tuple[str, ...]:
    """Says which arguments have another shape than those of the reference, as a vocabulary that is
    padded to a multiple of an axis."""
    known = {one.path: one for one in reference}
    return tuple(
        f"`{here.path}` is {here.dtype}{list(here.shape)} here, and {list(there.shape)} on the "
        "reference"
        for here in arguments
        if (there := known.get(here.path)) is not None
        and here.shape is not None
        and there.shape is not None
        and here.shape != there.shape
    )


def _has_other_values(there: ArgumentDigest, here: ArgumentDigest) -> bool:
    if "float" not in here.dtype:
        return (there.norm, there.projections) != (here.norm, here.projections)
    gaps = [a - b for a, b in zip(there.projections, here.projections, strict=True)]
    apart = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
    scale = max(there.norm, here.norm)
    return apart > _TOLERANCE.get(here.dtype, _NARROW_TOLERANCE) * scale


def _distance(there: LeafUpdate, here: LeafUpdate, dtype: str) -> tuple[float, str]:
    """Returns the distance of two updates, as a share of the tolerance, and a sentence about it."""
    name = _named(here)
    if there.is_finite != here.is_finite:
        where = "the reference" if here.is_finite else "this mesh"
        return math.inf, f"{name} is not a number on {where} alone"
    scale = max(there.norm, here.norm)
    rounding = _unit(here.dtype) * max(there.old_norm, here.old_norm)
    if scale == 0.0:
        return 0.0, ""
    each = rounding / math.sqrt(here.count)
    if here.apart > 8 * each + _tolerance(dtype) * scale / math.sqrt(here.count):
        return math.inf, f"after one step, copies of `{here.path}` on several devices differ"
    gaps = [a - b for a, b in zip(there.projections, here.projections, strict=True)]
    apart = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
    is_even = max(there.spread, here.spread) < _EVEN_SPREAD
    tolerance = _EVEN_TOLERANCE.get(dtype, 1.0) if is_even else _tolerance(dtype)
    tolerance += _SENSITIVITIES * there.sensitivity
    if there.sensitivity > _ROUNDING_ALONE:
        tolerance = max(tolerance, _ANY_DIRECTION)
    allowed = tolerance * scale + rounding
    ratio = here.norm / there.norm if there.norm else math.inf
    return apart / allowed, (
        f"{name} differs: its norm is {ratio:.3g} times the reference's, and the two are "
        f"{apart / scale:.2g} of it apart, {allowed / scale:.2g} allowed for {dtype}"
    )


def _named(one: LeafUpdate) -> str:
    is_result = one.path.startswith(RESULT)
    return f"{'what the first step returns,' if is_result else 'the first update of'} `{one.path}`"


def _tolerance(dtype: str) -> float:
    return _UPDATE_TOLERANCE.get(dtype, _NARROW_UPDATE_TOLERANCE)


def _unit(dtype: str) -> float:
    """Returns the relative distance of neighbouring numbers."""
    return _UNITS.get(dtype, _NARROW_UNIT)


# The plan whose losses and updates the finalists must reproduce, and whether they do.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The losses that others are compared with.

    Attributes:
      name: a name for their source.
      plan: the plan itself; empty if there is no reference.
      losses: scalar outputs of the first steps, in order.
      updates: how the first step changes the arrays of the state.
      vectors: the arrays of losses that a step without scalars returns.
      arguments: the arguments of the first step.
    """

    name: str
    plan: tuple[Plan, ...]
    losses: tuple[float, ...]
    updates: tuple[LeafUpdate, ...] = ()
    vectors: tuple[LossVector, ...] = ()
    arguments: tuple[ArgumentDigest, ...] = ()

    @classmethod
    def of(cls, name: str, plan: Plan, answer: VisitAnswer) -> Reference:
        """Makes a reference from the answer of a visit to a plan."""
        return cls(
            name=name,
            plan=(plan,),
            losses=answer.losses,
            updates=answer.updates,
            vectors=answer.vectors,
            arguments=answer.arguments,
        )


@dataclass(slots=True)
class Checks:
    """The comparisons of each plan's losses with the reference's."""

    _found: dict[Plan, tuple[Numerics, str]] = field(
        default_factory=dict[Plan, tuple[Numerics, str]]
    )

    def note(self, plan: Plan, numerics: Numerics, detail: str) -> None:
        self._found[plan] = (numerics, detail)

    def of(self, plan: Plan) -> tuple[Numerics, str]:
        return self._found[plan]

    def agrees(self, plan: Plan) -> bool:
        return self._found[plan][0] in ("agree", "reference")


def find_reference(
    pool: VisitPool,
    subject: Subject,
    *,
    baseline: Sequence[Calibration],
    plans: Sequence[Plan],
    rules: VisitRules,
) -> Reference:
    """Returns the losses of the baseline; else those of the step on one device; else those of a
    data-parallel plan.

    Args:
      baseline: the baseline's first visit, if there is a baseline and it ran.
      plans: all legal plans; the first has the default knobs.
    """
    for calibration in baseline:
        name = f"the baseline {calibration.plan}"
        return Reference.of(name, calibration.plan, calibration.first)
    single = on_one_device(plans[0])
    candidates = [("the step on one device", single)]
    # A model that needs sharding fits neither on one device nor with dp alone; fsdp splits the
    # batch, too.
    first = "dp" if "dp" in single.sizes else single.axes[0].name
    usual = [plan for plan in plans if plan.settings == single.settings]
    for axes in ((first,), (first, "fsdp")):
        parallel = [plan for plan in usual if _splits_only(plan, axes)]
        parallel.sort(key=lambda plan: -plan.sizes.get("fsdp", 1))
        candidates += [(f"the data-parallel plan {plan}", plan) for plan in parallel[:1]]
    for name, plan in candidates:
        answer = record_losses(pool, subject, plan, rules=rules)
        if isinstance(answer, VisitAnswer):
            return Reference.of(name, plan, answer)
    return Reference(
        name="none: neither one device nor data parallelism could run the step", plan=(), losses=()
    )


def on_one_device(plan: Plan) -> Plan:
    """Returns the plan with all axes of size 1."""
    return replace(plan, axes=tuple(replace(axis, ici=1, dcn=1) for axis in plan.axes))


def check(reference: Reference, plan: Plan, answer: VisitAnswer) -> tuple[Numerics, str]:
    """Compares losses and updates with the reference's; returns a sentence if they do not agree."""
    found = _compare(reference, answer)
    if found.verdict == "agree" and plan in reference.plan:
        return "reference", ""
    if not reference.plan:
        return "unverified", f"there is no reference ({reference.name})"
    if found.verdict != "agree":
        others = other_arguments(reference.arguments, answer.arguments)
        if others:
            return "other_arguments", _said_of(others)
        if shapes := other_shapes(reference.arguments, answer.arguments):
            return found.verdict, f"{shapes[0]}; {found.detail}"
    return found.verdict, found.detail


def _compare(reference: Reference, answer: VisitAnswer) -> Agreement:
    dtype = answer.loss_dtype
    is_silent = not (reference.losses or answer.losses)
    if is_silent and not compared_updates(reference.updates, answer.updates):
        overflown = next((one for one in answer.updates if not one.is_finite), None)
        nothing = _NO_NUMBERS.format(what=_named(overflown)) if overflown else _NOTHING_TO_COMPARE
        return Agreement(verdict="unverified", detail=nothing)
    found = Agreement(verdict="agree")
    if not is_silent:
        found = compare_losses(reference.losses, answer.losses, dtype)
    if found.verdict == "agree":
        found = compare_vectors(reference.vectors, answer.vectors, dtype)
    if found.verdict == "agree":
        found = compare_updates(reference.updates, answer.updates, dtype)
    return found


def _said_of(paths: Sequence[str], most: int = 2) -> str:
    """Returns the sentence about arguments whose values differ between two runs."""
    shown = ", ".join(f"`{path}`" for path in paths[:most])
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return (
        "the arguments of the step differ between two runs of the script: its data are not seeded "
        f"({shown}{more}); seed numpy, random and the data loader"
    )


def _splits_only(plan: Plan, axes: Sequence[str]) -> bool:
    return all(axis.size == 1 or axis.name in axes for axis in plan.axes)
