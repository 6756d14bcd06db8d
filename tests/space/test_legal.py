"""Rules, knobs, compiler options and notices: what is legal and how the rest is explained."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import NoFeasibleMesh, UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.space.conditions import SpaceRule
from automesh.space.knob_types import as_type_of
from automesh.space.legal import Rejection, _unused_notice, _why_nothing, find_legal
from automesh.space.settings import StepFacts, default_first
from automesh.space.space import AxisRange, Constraint, Knob, Relation, SearchSpace

NAMES = ("dp", "tp")


def space_of(*, shipped=False, names=NAMES, **parts):
    axes = parts.pop("axes", tuple(AxisRange(name=name) for name in names))
    return SearchSpace(name="mine.toml", shipped=shipped, names=names, axes=axes, **parts)


def constraint(product, relation, bound):
    return Constraint(factors=tuple(product.split("*")), relation=relation, bound=bound)


def legal(space, num_devices=8, platform="cpu", **step):
    return find_legal(
        space, StepFacts(**{"used_axes": NAMES, **step}), num_devices=num_devices, platform=platform
    )


def texts(found):
    return [str(plan) for plan in found.legal]


def test_the_first_axis_is_largest_first():
    assert texts(legal(space_of())) == ["dp:8", "dp:4,tp:2", "dp:2,tp:4", "tp:8"]


def test_axes_without_a_range_have_size_one():
    space = space_of(names=("dp", "fsdp", "tp"), axes=(AxisRange(name="dp"), AxisRange(name="tp")))
    found = legal(space, num_devices=2)
    assert [plan.sizes for plan in found.legal] == [
        {"dp": 2, "fsdp": 1, "tp": 1},
        {"dp": 1, "fsdp": 1, "tp": 2},
    ]


def test_default_knobs_come_first_then_single_changes():
    space = space_of(
        axes=(AxisRange(name="dp"),),
        knobs=(
            Knob(name="remat", values=("none", "dots", "full")),
            Knob(name="microbatches", values=(1, 2)),
        ),
    )
    found = legal(space, knobs=(("remat", "full"), ("microbatches", 2)))
    order = [dict(plan.knobs) for plan in found.legal]
    changed = [(knobs["remat"] != "full") + (knobs["microbatches"] != 2) for knobs in order]
    assert order[0] == {"remat": "full", "microbatches": 2}
    assert changed == sorted(changed)
    assert len(order) == 6
    assert all(list(knobs) == ["remat", "microbatches"] for knobs in order)


def test_true_is_not_taken_for_one():
    assert default_first(Knob(name="k", values=(1, True)), True)[0] is True


def test_compiler_options_are_knobs_of_one_platform():
    option = Knob(name="xla_windowed_einsum", values=("default", 1000))
    space = space_of(axes=(AxisRange(name="dp"),), compiler_options=(("tpu", (option,)),))
    assert texts(legal(space)) == ["dp:8"]
    on_tpu = legal(space, platform="tpu")
    assert [plan.compiler_options for plan in on_tpu.legal] == [
        (),
        (("xla_windowed_einsum", 1000),),
    ]


def test_each_rejected_plan_is_counted_under_the_first_rule_it_breaks():
    space = space_of(
        names=("dp", "ep", "tp"),
        axes=(AxisRange(name="dp"), AxisRange(name="ep"), AxisRange(name="tp", maximum=2)),
        constraints=(constraint("dp", "divides", "batch"),),
    )
    found = legal(space, num_devices=8, facts=(("batch", 4),))
    assert texts(found) == ["dp:4,tp:2"]
    assert {(one.rule, one.count) for one in found.rejections} == {
        # 10 ways to write 8 over three axes, 4 of them with ep:1.
        ("axis ep unused by the step", 6),
        ("tp max 2", 2),
        ("dp divides batch", 1),
    }
    assert found.num_plans == 10
    details = {one.rule: (str(one.example), one.detail) for one in found.rejections}
    assert details["dp divides batch"] == ("dp:8", "dp is 8, does not divide batch = 4")
    assert details["tp max 2"] == ("dp:2,tp:4", "tp is 4, at most 2 is allowed")


def test_constraints_may_hold_integer_knobs():
    space = space_of(
        axes=(AxisRange(name="dp"),),
        constraints=(constraint("dp*microbatches", "divides", "batch"),),
        knobs=(Knob(name="microbatches", values=(1, 2, 4)),),
    )
    found = legal(space, facts=(("batch", 16),), knobs=(("microbatches", 1),))
    assert texts(found) == ["dp:8 microbatches=1", "dp:8 microbatches=2"]
    assert [(one.rule, one.count) for one in found.rejections] == [
        ("dp*microbatches divides batch", 1)
    ]


def test_a_knob_left_alone_counts_with_its_default():
    space = space_of(constraints=(constraint("dp*microbatches", "divides", 8),))
    found = legal(space, knobs=(("microbatches", 2),))
    assert texts(found) == ["dp:4,tp:2", "dp:2,tp:4", "tp:8"]
    plan = Plan(axes=parse_mesh("dp:8", NAMES))
    assert [one.detail for one in found.reasons_against(plan)] == [
        "dp*microbatches is 16, does not divide 8"
    ]


@pytest.mark.parametrize(
    ("relation", "bound", "expected"),
    [
        ("max", 2, {1, 2}),
        ("min", 4, {4, 8}),
        ("max", "layers", {1, 2, 4}),
        ("divides", 12, {1, 2, 4}),
    ],
)
def test_relations(relation, bound, expected):
    space = space_of(constraints=(constraint("tp", relation, bound),))
    found = legal(space, facts=(("layers", 4),))
    assert {plan.sizes["tp"] for plan in found.legal} == expected


def test_a_shipped_space_leaves_out_what_does_not_apply_and_says_so():
    space = space_of(
        shipped=True,
        constraints=(constraint("tp", "divides", "num_kv_heads"),),
        knobs=(Knob(name="remat", values=("none", "full")),),
    )
    found = legal(space, facts=(("num_heads", 8),), knobs=(("rematt", "x"),))
    assert len(found.legal) == 4
    assert found.notices == (
        "knob `remat` left out: `build` does not take it",
        "constraint `tp divides num_kv_heads` left out: it refers to the fact `num_kv_heads`, "
        "which the workload does not state (did you mean `num_heads`?)",
    )


KNOBS = {"remat": ("none", "dots", "full"), "microbatches": (1, 2), "rate": (1, 0.5)}


@pytest.mark.parametrize(
    ("default", "tried", "notice"),
    [
        (("remat", False), (False, True), "knob `remat` is tried with false and true: `build` "),
        (("remat", True), (True, False), "takes a bool (its default is true)"),
        (("remat", "dots"), ("dots", "none", "full"), ""),
        (("remat", 1), (), 'left out: `build` takes an int (its default is 1), not "none", "dots"'),
        (("remat", 0.5), (), "takes a float (its default is 0.5), not"),
        (("microbatches", 2), (2, 1), ""),
        (("microbatches", 2.0), (2.0, 1.0), ""),
        (("microbatches", False), (False, True), "knob `microbatches` is tried with false and "),
        (("microbatches", "auto"), (), 'takes a str (its default is "auto"), not 1, 2'),
        (("rate", 1.0), (1.0, 0.5), ""),
        (("rate", 1), (), "takes an int (its default is 1), not 1, 0.5"),
    ],
)
def test_a_shipped_space_tries_values_of_the_type_that_build_takes(default, tried, notice):
    knob = Knob(name=default[0], values=KNOBS[default[0]])
    found = legal(space_of(shipped=True, knobs=(knob,)), knobs=(default,))
    values = list(dict.fromkeys(value for plan in found.legal for _, value in plan.knobs))
    assert [(type(value), value) for value in values] == [(type(one), one) for one in tried]
    assert len(found.legal) == 4 * max(len(tried), 1)
    assert [notice in text for text in found.notices] == ([True] if notice else [])


@pytest.mark.parametrize(
    ("default", "values", "said"),
    [
        (False, ("none",), 'the knob `k` the value "none", but `build` takes a bool (its default'),
        (False, (True, 0), "the knob `k` the value 0, but `build` takes a bool"),
        (1, (1, True), "the knob `k` the value true, but `build` takes an int (its default is 1)"),
        (1, (2.0,), "the knob `k` the value 2.0, but `build` takes an int"),
        (0.5, ("high",), 'the knob `k` the value "high", but `build` takes a float'),
        ("full", (1,), 'the knob `k` the value 1, but `build` takes a str (its default is "full")'),
    ],
)
def test_a_value_of_another_type_in_a_space_of_ones_own_is_an_error(default, values, said):
    with pytest.raises(UsageError) as caught:
        legal(space_of(knobs=(Knob(name="k", values=values),)), knobs=(("k", default),))
    assert said in caught.value.message
    assert "list values of that type, as in `k = [" in caught.value.hint


scalars = st.one_of(st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, 0.5]), st.text())


@given(default=scalars, value=scalars)
def test_a_knob_keeps_its_type_whatever_it_is_given(default, value):
    found = as_type_of(default, value)
    if type(default) is type(value):
        assert found == value
    if found is None:
        assert type(default) is not type(value)
    else:
        assert type(found) is type(default)
        assert found == value


def test_a_build_with_any_keyword_takes_every_knob():
    space = space_of(knobs=(Knob(name="remat", values=("none", "full")),))
    assert len(legal(space, takes_any_knob=True).legal) == 8


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"knobs": (Knob(name="remta", values=("none",)),)},
            "the search space `mine.toml` has the knob `remta`, which `build` does not take "
            "(did you mean `remat`?)",
        ),
        (
            {"constraints": (constraint("tp", "divides", "num_heds"),)},
            "the constraint `tp divides num_heds` of the search space `mine.toml` refers to the "
            "fact `num_heds`, which the workload does not state (did you mean `num_heads`?)",
        ),
        (
            {"constraints": (constraint("tpp", "max", 4),)},
            "names `tpp`, which is neither an axis nor a knob of `build` (did you mean `tp`?)",
        ),
        (
            {"constraints": (constraint("tp*remat", "max", 4),)},
            "needs positive integers, but the knob `remat` takes ['full']",
        ),
        (
            {"constraints": (constraint("tp", "divides", "zero"),)},
            "the constraint `tp divides zero` needs a positive number, but zero is 0",
        ),
    ],
)
def test_in_a_space_of_ones_own_the_same_is_an_error(parts, said):
    with pytest.raises(UsageError) as caught:
        legal(space_of(**parts), facts=(("num_heads", 8), ("zero", 0)), knobs=(("remat", "full"),))
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("used", "said"),
    [
        (("dp", "tp"), ""),
        (("dp",), "axis tp of size 1: it is in the space `mine.toml`, and the step never uses it"),
        (
            (),
            "axes dp, tp of size 1: they are in the space `mine.toml`, "
            "and the step never uses them",
        ),
    ],
)
def test_axes_of_a_shipped_space_that_the_step_does_not_use_are_told(used, said):
    notices = _unused_notice(space_of(shipped=True), StepFacts(used_axes=used), ())
    assert notices == ([f"the mesh that `build` gets also has the {said}"] if said else [])
    assert _unused_notice(space_of(), StepFacts(used_axes=used), ()) == []


def test_axes_of_a_scripts_own_mesh_that_its_step_does_not_use_are_told():
    step = StepFacts(used_axes=("dp",), is_captured=True)
    assert _unused_notice(space_of(shipped=True), step, ()) == [
        "the step splits no array over the axis tp of the script's mesh, so that devices along it "
        "do the same work: other meshes have it at size 1"
    ]


def test_nothing_legal_says_which_rules_did_it():
    space = space_of(
        axes=(AxisRange(name="dp", maximum=2), AxisRange(name="tp", maximum=2)),
    )
    with pytest.raises(NoFeasibleMesh) as caught:
        legal(space, num_devices=8)
    assert caught.value.message == (
        "of 4 meshes on 8 devices none is legal; ruled out: "
        "2 by `dp max 2` (dp is 8, at most 2 is allowed), "
        "2 by `tp max 2` (tp is 4, at most 2 is allowed)"
    )


@pytest.mark.parametrize(("more", "said"), [(1, "another rule"), (2, "2 other rules")])
def test_of_many_rules_that_leave_nothing_eight_are_named(more, said):
    example = Plan(axes=parse_mesh("dp:8", NAMES))
    rejections = [
        Rejection(rule=f"r{one}", detail="d", count=10 + one, example=example)
        for one in range(8 + more)
    ]
    why = _why_nothing(rejections, 8, 1)
    assert why.startswith("of 1 mesh on 8 devices none is legal; ruled out: 10 by `r0` (d), ")
    assert why.endswith(f"17 by `r7` (d), {sum(range(18, 18 + more))} by {said}")


def test_a_step_that_shards_nothing_fits_one_device_only():
    with pytest.raises(NoFeasibleMesh, match="axis dp unused by the step"):
        legal(space_of(), used_axes=())
    assert texts(legal(space_of(), num_devices=1, used_axes=())) == ["dp:1"]


def test_bounds_that_no_size_meets_are_refused_at_once():
    with pytest.raises(UsageError, match="at least 4 and at most 2, which no size is"):
        AxisRange(name="dp", minimum=4, maximum=2)


def test_a_combination_of_too_many_knobs_is_refused():
    knobs = tuple(Knob(name=f"k{i}", values=tuple(range(10))) for i in range(6))
    with pytest.raises(UsageError, match="combine in 1000000 ways"):
        legal(space_of(knobs=knobs), takes_any_knob=True)


@pytest.mark.parametrize("num_devices", [24, 96, 384])
def test_device_counts_that_are_no_powers_of_two(num_devices):
    names = ("dp", "fsdp", "tp")
    space = space_of(
        names=names,
        constraints=(constraint("tp", "divides", 8), constraint("dp*fsdp", "divides", 96)),
    )
    found = legal(space, num_devices=num_devices, used_axes=names)
    sizes = range(1, num_devices + 1)
    by_hand = [
        (dp, fsdp, num_devices // (dp * fsdp))
        for dp, fsdp in itertools.product(sizes, sizes)
        if num_devices % (dp * fsdp) == 0
        and 8 % (num_devices // (dp * fsdp)) == 0
        and 96 % (dp * fsdp) == 0
    ]
    assert sorted(tuple(plan.sizes.values()) for plan in found.legal) == sorted(by_hand)


@pytest.mark.parametrize(
    ("relation", "bound", "expected"),
    [
        ("max", 2**40, [True, False, False]),
        ("min", 2**40, [False, True, True]),
        ("divides", 2**62, [True, True, False]),
        ("divides", 2**70, [True, True, True]),
    ],
)
def test_products_beyond_64_bits_do_not_wrap_around(
    relation: Relation, bound: int, expected: list[bool]
) -> None:
    """Of 2**62 and 8, 64 bits hold nothing but zeros."""
    rule = SpaceRule(name="", factors=("dp", "width"), relation=relation, bound=bound)
    values = {"dp": np.array([1, 1, 8]), "width": np.array([8, 2**62, 2**62])}
    assert rule.holds(values).tolist() == expected
    assert rule.detail({"dp": 8, "width": 2**62}).startswith(f"dp*width is {2**65}, ")


def test_zero_divides_nothing() -> None:
    rule = SpaceRule(name="", factors=("width",), relation="divides", bound=8)
    assert rule.holds({"width": np.array([0, 8])}).tolist() == [False, True]
