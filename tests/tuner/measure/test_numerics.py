"""Losses compared with a reference's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import ArgumentDigest, LeafUpdate, LossVector, VisitAnswer
from automesh.tuner.measure.numerics import (
    Agreement,
    Reference,
    check,
    compare_losses,
    compare_updates,
    compare_vectors,
    loss_tolerance,
    other_arguments,
    other_shapes,
)

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn")
REFERENCE = (5.545, 5.541, 5.538)


@pytest.mark.parametrize("dtype", DTYPES)
def test_within_the_tolerance_agrees_and_beyond_differs(dtype: str) -> None:
    tolerance = loss_tolerance(dtype)
    near = [loss * (1 + 0.9 * tolerance) for loss in REFERENCE]
    far = [*REFERENCE[:2], REFERENCE[2] * (1 + 1.2 * tolerance)]
    assert compare_losses(REFERENCE, near, dtype) == Agreement(verdict="agree")
    assert compare_losses(REFERENCE, far, dtype).verdict == "differ"


def test_the_narrower_the_type_the_wider_the_tolerance() -> None:
    tolerances = [loss_tolerance(dtype) for dtype in ("float64", "float32", "float16", "bfloat16")]
    assert tolerances == sorted(tolerances)
    assert loss_tolerance("bfloat16") < loss_tolerance("float8_e5m2")
    # A loss rounded to the type may land on the neighbouring value.
    assert loss_tolerance("bfloat16") >= 2**-7
    assert loss_tolerance("float16") >= 2**-10


def test_the_sentence_names_the_worst_scalar_and_the_figures() -> None:
    found = compare_losses(REFERENCE, (5.545, 5.9, 5.6), "float32")
    assert found.detail == (
        "scalar 2 of 3 is 5.9 here and 5.541 on the reference: 6.1e-02 apart, "
        "1e-04 allowed for float32"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_verifies_nothing(bad: float) -> None:
    here = compare_losses(REFERENCE, (5.545, bad, 5.538), "float32")
    assert here == Agreement(verdict="unverified", detail=f"scalar 2 is {bad} here")
    there = compare_losses((bad, 1.0), (1.0, 1.0), "float32")
    assert there == Agreement(verdict="unverified", detail=f"scalar 1 is {bad} on the reference")
    both = compare_losses((1.0, bad), (1.0, bad), "float32")
    assert both.verdict == "unverified"
    assert both.detail.startswith(
        f"scalar 2 of the step is {bad} on the reference, too, so nothing"
    )


def test_another_number_of_scalars_differs_and_none_verifies_nothing() -> None:
    fewer = compare_losses(REFERENCE, REFERENCE[:2], "float32")
    assert fewer.verdict == "differ"
    assert fewer.detail == "the step returns 2 scalars here, 3 on the reference"
    assert compare_losses((), (), "float32").verdict == "unverified"


def test_a_scalar_near_zero_is_compared_at_the_scale_of_the_others() -> None:
    assert compare_losses((5.0, 0.0), (5.0, 1e-7), "float32").verdict == "agree"
    assert compare_losses((5.0, 0.0), (5.0, 1e-3), "float32").verdict == "differ"
    assert compare_losses((0.0, 0.0), (0.0, 0.0), "float32").verdict == "agree"
    assert compare_losses((0.0,), (1e-9,), "float32").verdict == "differ"
    assert compare_losses((1e-6,), (1.1e-6,), "float32").verdict == "differ"


def test_what_is_no_float_type_is_refused() -> None:
    with pytest.raises(ValueError, match="`int8` is not a float type"):
        compare_losses(REFERENCE, REFERENCE, "int8")


losses = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)


@given(losses, st.sampled_from(DTYPES), st.floats(1e-3, 1e3))
def test_equal_losses_agree_and_the_unit_does_not_matter(
    reference: list[float], dtype: str, scale: float
) -> None:
    assert compare_losses(reference, reference, dtype) == Agreement(verdict="agree")
    moved = [value + 0.5 for value in reference]
    plain = compare_losses(reference, moved, dtype).verdict
    scaled = compare_losses([v * scale for v in reference], [v * scale for v in moved], dtype)
    assert scaled.verdict == plain


@given(losses, losses, st.sampled_from(DTYPES))
def test_two_plans_agree_or_differ_as_finite_numbers_do(
    one: list[float], other: list[float], dtype: str
) -> None:
    found = compare_losses(one, other, dtype)
    assert found.verdict in ("agree", "differ")
    assert bool(found.detail) == (found.verdict == "differ")


@pytest.mark.parametrize("sensitivity", [0.35, 0.56, 1.4])
def test_of_an_update_that_is_rounding_alone_any_direction_will_do(sensitivity: float) -> None:
    """Adam makes a unit step of it, whose signs another order of summation may turn round."""

    def update(sign: float, sensitivity: float = 0.0) -> LeafUpdate:
        return LeafUpdate(
            path="key_bias",
            dtype="float32",
            norm=1.0,
            old_norm=0.0,
            spread=0.0,
            apart=0.0,
            count=8,
            is_finite=True,
            projections=(sign,) * 8,
            sensitivity=sensitivity,
        )

    there, here = [update(1.0, sensitivity)], [update(-1.0)]
    assert compare_updates(there, here, "float32").verdict == "agree"
    assert compare_updates([update(1.0, 0.05)], here, "float32").verdict == "differ"


def _vector(*values: float, path: str = "[1]") -> LossVector:
    return LossVector(path=path, size=len(values), values=values)


def test_of_an_array_of_losses_the_worst_element_is_named() -> None:
    there = [_vector(1.0, 2.0, 0.0, 3.0)]
    assert compare_vectors(there, [_vector(1.0001, 2.0, 1e-4, 3.0)], "float32").verdict == "agree"
    found = compare_vectors(there, [_vector(1.001, 2.0, 0.0, 3.3)], "float32")
    assert found.verdict == "differ"
    assert found.detail.startswith(
        "element 4 of 4 of the losses `[1]` is 3.3 here and 3 on the reference: 9.1e-02 apart"
    )
    assert compare_vectors([_vector(1.0)], [_vector(2.0, path="[2]")], "float32").verdict == "agree"


def _digest(*projections: float, dtype: str = "float32") -> ArgumentDigest:
    return ArgumentDigest(
        path="args[1]", dtype=dtype, count=9, norm=1.0, projections=projections or (0.5, -0.5)
    )


def test_arguments_that_were_rounded_are_the_same_and_other_numbers_are_not() -> None:
    there = [_digest()]
    assert other_arguments(there, [_digest(0.50001, -0.5)]) == ()
    assert other_arguments(there, [_digest(0.6, -0.4)]) == ("args[1]",)
    assert other_arguments(there, [_digest(0.6, -0.4, dtype="int32")]) == ()  # another program
    tokens = [_digest(7.0, 1.0, dtype="int32")]
    assert other_arguments(tokens, [_digest(7.0, 1.0, dtype="int32")]) == ()
    assert other_arguments(tokens, [_digest(7.0, 2.0, dtype="int32")]) == ("args[1]",)


def test_arguments_of_other_shapes_are_no_data_that_are_not_seeded() -> None:
    there, here = (
        replace(_digest(), shape=(1000, 64)),
        replace(_digest(0.6, -0.4), shape=(1008, 64)),
    )
    assert other_arguments([there], [here]) == ()
    assert other_shapes([there], [here]) == (
        "`args[1]` is float32[1008, 64] here, and [1000, 64] on the reference",
    )
    older = replace(there, shape=None)
    assert other_arguments([older], [here]) == ("args[1]",)
    assert other_shapes([older], [here]) == ()


def test_other_arguments_are_no_fault_where_the_losses_agree() -> None:
    plan = Plan(axes=(MeshAxis(name="dp"),))
    first = VisitAnswer(
        samples_s=(),
        losses=(1.0,),
        loss_dtype="float32",
        values="user",
        setup_s=0.0,
        peak_bytes=0,
        fingerprint="f",
        arguments=(_digest(),),
    )
    reference = Reference.of("the baseline", Plan(axes=(MeshAxis(name="dp", ici=2),)), first)
    other = replace(first, arguments=(_digest(0.6, -0.4),))
    assert check(reference, plan, other) == ("agree", "")
    assert check(reference, plan, replace(other, losses=(2.0,)))[0] == "other_arguments"
