"""[mapping] in a search space: what it may say, which mappings are legal on which mesh, and why
not the others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import NoFeasibleMesh, UsageError
from automesh.mesh.axes import MAPPING, Plan, parse_mesh
from automesh.space.legal import REPEATED, find_legal
from automesh.space.mapping import KnobArrays, SplitArray, SplitDimension, StepMapping
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, Knob, LogicalAxis, SearchSpace
from automesh.space.spec import read_space

NAMES = ("dp", "fsdp", "tp")


def read(tmp_path, mapping):
    path = tmp_path / "mine.toml"
    path.write_text(f"[axes]\ndp = {{}}\nfsdp = {{}}\ntp = {{}}\n{mapping}")
    return read_space(str(path))


def test_the_table_is_read_in_its_order(tmp_path):
    said = '[mapping]\nmlp = ["tp", ["tp", "fsdp"], "none"]\nembed = ["none"]\n'
    assert read(tmp_path, said).mapping == (
        LogicalAxis(name="mlp", choices=(("tp",), ("tp", "fsdp"), ())),
        LogicalAxis(name="embed", choices=((),)),
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ('mlp = ["model"]', "`model`, which is no mesh axis.*hint: the mesh axes are: dp, fsdp"),
        ('mlp = ["fsbp"]', "did you mean `fsdp`"),
        ("mlp = []", "`mapping.mlp` must not be empty"),
        ('mlp = "tp"', "`mapping.mlp` must be an array"),
        ("mlp = [3]", "`mapping.mlp\\[0\\]` must be a string"),
        ('mlp = ["tp", "none", "tp"]', "`mapping.mlp` lists `tp` twice"),
        ('mlp = [["tp", "tp"]]', "one of them twice"),
        ('mlp = [["tp", "none"]]', "which are no mesh axes"),
        ('"m lp" = ["tp"]', "`m lp` is not the name of a logical axis"),
        ('mlp = ["tp"]\n[knobs]\nmapping = ["a"]', "both mean the keyword `mapping`"),
    ],
)
def test_what_is_wrong_in_the_table_is_told(mapping, message, tmp_path):
    with pytest.raises(UsageError, match=f"(?s){message}") as error:
        read(tmp_path, f"[mapping]\n{mapping}")
    assert "mine.toml" in str(error.value)


def array(name, *split):
    return SplitArray(
        name=name,
        split=tuple(
            SplitDimension(
                place=place,
                size=size,
                names=tuple(one if one in NAMES else MAPPING + one for one in names),
            )
            for place, (size, names) in enumerate(split)
        ),
    )


WEIGHTS = (
    array("w['up']", (64, ("embed",)), (252, ("mlp",))),
    array("the batch", (64, ("dp", "rows"))),
)
DEFAULTS = (("embed", ("fsdp",)), ("mlp", ("tp",)))


def space_of(shipped=False, knobs=(), names=NAMES, **mapping):
    return SearchSpace(
        name="mine.toml",
        shipped=shipped,
        names=names,
        axes=tuple(AxisRange(name=name) for name in names),
        knobs=knobs,
        mapping=tuple(LogicalAxis(name=name, choices=said) for name, said in mapping.items()),
    )


def legal(space, num_devices=8, arrays=WEIGHTS, defaults=DEFAULTS, used=("dp",), **step):
    said = StepMapping(defaults=defaults, arrays=arrays, unseen=step.pop("unseen", ""))
    facts = StepFacts(used_axes=used, mapping=step.pop("mapping", said), **step)
    return find_legal(space, facts, num_devices=num_devices, platform="cpu")


def rejected(found):
    return {one.rule: (one.count, one.detail) for one in found.rejections}


def test_the_default_comes_first_and_axes_left_out_keep_what_build_says():
    found = legal(space_of(embed=((), ("fsdp",))))
    assert str(found.legal[0]) == "dp:8 embed:fsdp mlp:tp"
    assert found.mapping == DEFAULTS
    assert {dict(plan.mapping)["mlp"] for plan in found.legal} == {("tp",)}


def test_one_mesh_axis_twice_on_an_array_is_ruled_out_whatever_its_size():
    found = legal(space_of(mlp=(("tp",), ("fsdp",))))
    count, detail = rejected(found)["fsdp twice on an array"]
    # Of the ten meshes of 8 devices, those without tp: it is unused with that mapping.
    assert count == 4
    assert detail == "`w['up']` is split over fsdp twice, by embed:fsdp and mlp:fsdp"
    assert all(dict(plan.mapping)["mlp"] == ("tp",) for plan in found.legal)


def test_an_axis_that_the_step_splits_by_itself_counts_too():
    found = legal(space_of(rows=((), ("dp",))))
    assert rejected(found)["dp twice on an array"][1] == (
        "`the batch` is split over dp twice, by dp and rows:dp"
    )


def test_sizes_that_do_not_divide_a_dimension_are_ruled_out_with_the_numbers():
    found = legal(space_of(mlp=(("tp",), ("tp", "fsdp")), embed=((),)))
    assert rejected(found)["tp divides mlp of 252"][1] == (
        "tp is 8, does not divide mlp (dimension 1 of `w['up']`) = 252"
    )
    assert all(
        252 % math.prod(plan.sizes[axis] for axis in dict(plan.mapping)["mlp"]) == 0
        for plan in found.legal
    )
    # 0 stands for a dimension that the step rounds up.
    flexible = (array("w", (0, ("mlp",)), (64, ("embed",))),)
    assert "tp:8 embed:fsdp mlp:tp" in {
        str(plan) for plan in legal(space_of(mlp=(("tp",),)), arrays=flexible).legal
    }


def test_axes_that_a_mapping_leaves_unused_are_ruled_out_with_that_mapping_alone():
    found = legal(space_of(mlp=(("tp",), ())))
    assert rejected(found)["axis tp unused by the mapping"][1] == "tp is 2, must be 1"
    assert {dict(plan.mapping)["mlp"] for plan in found.legal if plan.sizes["tp"] > 1} == {("tp",)}


def test_arrays_are_those_at_the_knobs_of_a_plan():
    def weights(size):
        return (array("w", (size, ("mlp",))),)

    said = StepMapping(
        defaults=(("mlp", ("tp",)),),
        arrays=weights(8),
        by_knobs=(
            KnobArrays(knobs=(("hidden", 8), ("wide", False)), arrays=weights(8)),
            KnobArrays(knobs=(("hidden", 12), ("wide", False)), arrays=weights(12)),
            KnobArrays(knobs=(("hidden", 8), ("wide", True)), unseen="it raised"),
        ),
    )
    knobs = (Knob(name="hidden", values=(8, 12)), Knob(name="wide", values=(False, True)))
    space = space_of(names=("tp",), knobs=knobs, mlp=(("tp",),))
    defaults = (("hidden", 8), ("wide", False))
    found = legal(space, mapping=said, used=(), knobs=defaults)
    # What was not looked at is left to those who build it.
    assert {plan.knobs for plan in found.legal} == {
        (("hidden", 8), ("wide", False)),
        (("hidden", 8), ("wide", True)),
        (("hidden", 12), ("wide", True)),
    }
    assert rejected(found) == {
        "tp divides mlp of 12": (1, "tp is 8, does not divide mlp (dimension 0 of `w`) = 12")
    }
    (notice,) = found.notices
    assert "at 1 combinations of knobs" in notice and "hidden=8 wide=True: it raised" in notice
    (plan,) = legal(space_of(names=("tp",), mlp=(("tp",),)), mapping=said, used=()).legal
    wide = replace(plan, knobs=(("hidden", 12), ("wide", False)))
    assert [one.rule for one in found.reasons_against(wide)] == ["tp divides mlp of 12"]
    assert not found.reasons_against(replace(plan, knobs=(("wide", False),)))


def test_a_logical_axis_may_split_something_at_one_value_of_a_knob_alone():
    experts = KnobArrays(knobs=(("moe", 1),), arrays=(array("w", (8, ("mlp",))),))
    said = StepMapping(by_knobs=(KnobArrays(knobs=(("moe", 0),)), experts))
    space = space_of(knobs=(Knob(name="moe", values=(0, 1)),), mlp=(("tp",),))
    found = legal(space, mapping=said, used=("dp",), knobs=(("moe", 0),))
    assert {plan.knobs for plan in found.legal if plan.sizes["tp"] > 1} == {(("moe", 1),)}
    assert "axis tp unused by the mapping" in rejected(found)


def test_a_mapping_that_is_another_one_where_axes_are_1_is_tried_once():
    found = legal(space_of(mlp=(("tp",), ("tp", "fsdp"), ()), embed=((), ("fsdp",))))
    on_dp = [str(plan) for plan in found.legal if plan.mesh == "dp:8"]
    assert on_dp == ["dp:8 embed:fsdp mlp:tp"]
    assert found.num_plans == len(found.legal) + sum(one.count for one in found.rejections)
    assert REPEATED in rejected(found)


def test_the_first_legal_mapping_stands_for_those_that_are_the_same():
    # The default maps both to fsdp, which is never legal: another one must stand in for it.
    found = legal(
        space_of(mlp=(("fsdp",), ("tp",)), embed=(("fsdp",), ())),
        defaults=(("embed", ("fsdp",)), ("mlp", ("fsdp",))),
    )
    assert [str(plan) for plan in found.legal if plan.mesh == "dp:8"] == ["dp:8 embed:fsdp mlp:tp"]


def test_reasons_against_a_plan_know_its_mapping():
    found = legal(space_of(mlp=(("tp",), ("tp", "fsdp"))))
    plan = Plan(axes=parse_mesh("tp:8", NAMES), mapping=(("embed", ()), ("mlp", ("tp",))))
    assert [one.rule for one in found.reasons_against(plan)] == ["tp divides mlp of 252"]
    twice = Plan(axes=parse_mesh("dp:8", NAMES), mapping=(("embed", ("tp",)), ("mlp", ("tp",))))
    assert [one.rule for one in found.reasons_against(twice)] == ["tp twice on an array"]


@pytest.mark.parametrize("shipped", [False, True])
def test_what_the_step_does_not_have(shipped):
    space = space_of(shipped=shipped, embde=(("fsdp",), ()))
    if shipped:
        found = legal(space)
        assert found.notices == ("logical axis `embde` left out: the step splits nothing by it",)
    else:
        with pytest.raises(UsageError, match="splits nothing \\(did you mean `embed`"):
            legal(space)
    if shipped:
        assert "does not take" in legal(space, mapping=None, used=NAMES).notices[0]
        assert legal(space, mapping=None, used=NAMES).legal[0].mapping == ()
    else:
        with pytest.raises(UsageError, match="logical axes, which `build` does not take"):
            legal(space, mapping=None)


def test_a_default_of_build_must_be_about_the_axes_of_the_space():
    with pytest.raises(UsageError, match=r"(?s)`model`.*is the default of `build`.*hint: list"):
        legal(space_of(embed=((),)), defaults=(("mlp", ("model",)),))
    assert legal(space_of(embed=((),), mlp=(("tp",),)), defaults=(("mlp", ("model",)),)).legal


def test_arrays_that_could_not_be_seen_are_told_and_rule_out_nothing():
    found = legal(space_of(mlp=(("tp",), ("fsdp",))), arrays=(), unseen="ValueError: no")
    assert found.notices == (
        "combinations of [mapping] are not checked before they are built: ValueError: no",
    )
    assert {dict(plan.mapping)["mlp"] for plan in found.legal} == {("tp",), ("fsdp",)}
    assert any("unused" in rule for rule in rejected(found))


def test_nothing_legal_is_explained_with_the_mapping():
    with pytest.raises(NoFeasibleMesh, match="fsdp twice on an array"):
        legal(space_of(mlp=(("fsdp",),)), defaults=(("embed", ("fsdp",)),))


CHOICES = st.lists(
    st.lists(st.sampled_from(NAMES), unique=True, max_size=2).map(tuple), min_size=1, max_size=3
).map(lambda said: tuple(dict.fromkeys(said)))
DIMENSIONS = st.tuples(
    st.sampled_from((4, 6, 8, 12, 16)),
    st.lists(st.sampled_from(("embed", "mlp", "dp")), unique=True, max_size=2).map(tuple),
)


@given(
    embed=CHOICES,
    mlp=CHOICES,
    arrays=st.lists(st.lists(DIMENSIONS, min_size=1, max_size=2), max_size=3),
    num_devices=st.sampled_from((4, 6, 8)),
    knob=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_legal_plans_are_those_of_a_brute_force_check(embed, mlp, arrays, num_devices, knob):
    named = tuple(array(f"a{i}", *parts) for i, parts in enumerate(arrays))
    split = {name for parts in arrays for _, names in parts for name in names}
    if not {"embed", "mlp"} <= split:
        named += (array("all", (48, ("embed",)), (48, ("mlp",))),)
        arrays = [*arrays, [(48, ("embed",)), (48, ("mlp",))]]
    knobs = (Knob(name="k", values=(1, 2)),) if knob else ()
    meshes = [
        dict(zip(NAMES, sizes))
        for sizes in itertools.product(range(1, num_devices + 1), repeat=3)
        if math.prod(sizes) == num_devices
    ]

    def is_legal(sizes, mapping):
        used = {"dp", *mapping["embed"], *mapping["mlp"]}
        if any(sizes[axis] > 1 and axis not in used for axis in NAMES):
            return False
        for parts in arrays:
            seen = []
            for size, names in parts:
                axes = [axis for name in names for axis in mapping.get(name, (name,))]
                seen += axes
                mapped = any(mapping.get(name) for name in names)
                if mapped and size % math.prod({axis: sizes[axis] for axis in axes}.values()):
                    return False
            literal = [name for _, names in parts for name in names if name == "dp"]
            repeated = {axis for axis in seen if seen.count(axis) > 1}
            if len(literal) > 1 and seen.count("dp") == len(literal):
                repeated.discard("dp")  # The step does that itself.
            if repeated:
                return False
        return True

    def effect(sizes, mapping):
        return tuple(
            tuple(axis for axis in mapping[name] if sizes[axis] > 1) for name in ("embed", "mlp")
        )

    wanted = {
        (tuple(sizes.items()), effect(sizes, mapping), value)
        for sizes in meshes
        for choice in itertools.product(embed, mlp)
        for mapping in [dict(zip(("embed", "mlp"), choice))]
        if is_legal(sizes, mapping)
        for value in ((1, 2) if knob else (0,))
    }
    try:
        found = legal(
            space_of(embed=embed, mlp=mlp, knobs=knobs),
            num_devices,
            arrays=named,
            defaults=(),
            knobs=(("k", 1),) if knob else (),
        )
    except NoFeasibleMesh:
        assert not wanted
        return
    plans = [
        (
            tuple(plan.sizes.items()),
            effect(plan.sizes, dict(plan.mapping)),
            dict(plan.knobs).get("k", 0),
        )
        for plan in found.legal
    ]
    assert len(set(plans)) == len(plans)
    assert set(plans) == wanted
    assert found.num_plans == len(plans) + sum(one.count for one in found.rejections)
    assert not any(found.reasons_against(plan) for plan in found.legal)
    assert all(
        found.reasons_against(one.example) for one in found.rejections if one.rule != REPEATED
    )
