"""From classes of dimensions to the space: what is split over which axes, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.rules.shardings import spelled_shardings
from automesh.program.infer.nouns import (
    ArrayClasses,
    Caution,
    CautionKind,
    DimensionClass,
    Inner,
    Role,
    StepClasses,
)
from automesh.program.infer.search.layout import Layout, lay_out, shardings_of
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, SearchSpace


def dimension(
    name: str, size: int, *, parts: int = 0, whole: str = "", cure: str = ""
) -> DimensionClass:
    parts = parts or (1 if whole else size)
    return DimensionClass(
        name=name, size=size, parts=parts, stored=size, whole=whole, cure=cure,
        is_batch=name in ("batch", "graphs"),
    )  # fmt: skip


SIZES = {"batch": 16, "embed": 512, "mlp": 2048, "heads": 512, "vocab": 50257, "sequence": 128}
CLASSES = (
    dimension("batch", 16),
    dimension("embed", 512),
    dimension("mlp", 2048),
    dimension("heads", 512, parts=8),
    dimension("vocab", 50257, whole="50257 = 29 * 1733", cure="pad it to 50304"),
    dimension("sequence", 128),
)


def array(name: str, role: Role, *dims: str, of: int | None = None) -> ArrayClasses:
    shape = tuple(SIZES.get(dim, 8) for dim in dims)
    return ArrayClasses(name=name, role=role, shape=shape, dtype="float32", dims=dims, of=of)


ARGUMENTS = (
    array("params['embed']", Role.PARAMETER, "vocab", "embed"),
    array("params['layers'][0]['q']", Role.PARAMETER, "embed", "heads"),
    array("params['layers'][0]['up']", Role.PARAMETER, "embed", "mlp"),
    array("params['layers'][0]['norm']", Role.PARAMETER, "embed"),
    array("opt[0].mu['embed']", Role.MOMENT, "vocab", "embed", of=0),
    array("opt[0].mu['layers'][0]['q']", Role.MOMENT, "embed", "heads", of=1),
    array("opt[0].mu['layers'][0]['up']", Role.MOMENT, "embed", "mlp", of=2),
    array("opt[0].mu['layers'][0]['norm']", Role.MOMENT, "embed", of=3),
    array("opt[0].count", Role.COUNTER),
    array("tokens", Role.DATA, "batch", "sequence"),
)
LOOKUP = Inner(
    path=(0,),
    bodies=(),
    output=-1,
    shape=(50257, 512),
    dims=("vocab", "embed"),
    why="a table is looked up in",
    is_gathered=True,
)
STEP = StepClasses(classes=CLASSES, arguments=ARGUMENTS, activations=(LOOKUP,))


def laid_out(step: StepClasses = STEP, *, devices: int = 8) -> Layout:
    return lay_out(step, num_devices=devices, script="train.py")


def choices(layout: Layout) -> dict[str, list[str]]:
    return {axis.name: ["+".join(one) or "none" for one in axis.choices] for axis in layout.logical}


def test_what_a_specialist_would_try_for_a_language_model() -> None:
    layout = laid_out()
    assert layout.axes == ("dp", "fsdp", "tp", "sp")
    assert choices(layout) == {
        "batch": ["dp+fsdp"],
        "params": ["fsdp", "none"],
        "moments": ["fsdp"],
        "embed": ["none", "tp"],
        "mlp": ["none", "tp"],
        "heads": ["none", "tp"],
        "sequence": ["none", "sp", "tp"],
    }
    assert layout.mappings == 48
    splits = {one.name: one.split for one in layout.arguments}
    # What has `embed` is split over fsdp there, with its moments; small arrays stay whole.
    assert splits["params['layers'][0]['up']"] == (("embed", "params"), ("mlp",))
    assert splits["opt[0].mu['layers'][0]['up']"] == (("embed", "moments"), ("mlp",))
    assert splits["params['embed']"] == ((), ("embed", "params"))
    assert splits["params['layers'][0]['norm']"] == (("embed",),)
    assert splits["tokens"] == (("batch",), ("sequence",))
    assert splits["opt[0].count"] == ()
    assert any("`vocab` (50257) stays whole: 50257 = 29 * 1733; pad it to 50304" in one
               for one in layout.notices)  # fmt: skip


def legal(layout: Layout, devices: int = 8) -> tuple[list[str], dict[str, int]]:
    found = find_legal(
        SearchSpace(
            name="inferred",
            shipped=True,
            names=layout.axes,
            axes=tuple(AxisRange(name=axis) for axis in layout.axes),
            mapping=layout.logical,
        ),
        StepFacts(mapping=layout.step_mapping),
        num_devices=devices,
        platform="cpu",
    )
    return [str(plan) for plan in found.legal], {one.rule: one.count for one in found.rejections}


def test_mappings_that_cannot_be_are_ruled_out_by_parts_and_by_axes_twice() -> None:
    plans, rules = legal(laid_out())
    assert not [plan for plan in plans if "embed:tp" in plan and "mlp:tp" in plan]
    # 8 heads of 64 are split among up to 8 devices, although 16 divides their 512 columns.
    more, of_sixteen = legal(laid_out(devices=16), 16)
    assert not [plan for plan in more if "tp:16" in plan and "heads:tp" in plan]
    assert "tp twice on an array" in rules and "tp divides heads of 8" in of_sixteen


def test_a_mapping_that_splits_little_of_what_is_multiplied_is_not_searched() -> None:
    plans, rules = legal(laid_out())
    # `q` has a fifth of the elements, `up` the others; both are split without the other's help.
    assert not [plan for plan in plans if "heads:tp" in plan and "mlp:tp" not in plan]
    assert [plan for plan in plans if "heads:none" in plan and "mlp:tp" in plan]
    assert [plan for plan in plans if "heads:tp" in plan and "mlp:tp" in plan]
    assert rules["tp splits little of the step"]
    # Without that, each of them alone would be.
    layout = replace(laid_out(), shares=())
    assert [plan for plan in legal(layout)[0] if "heads:tp" in plan and "mlp:tp" not in plan]


def test_a_batch_of_two_leaves_the_other_axes_to_eight_devices() -> None:
    small = (replace(CLASSES[0], size=2, parts=2, stored=2), *CLASSES[1:])
    plans, rules = legal(laid_out(replace(STEP, classes=small)))
    assert plans and not [plan for plan in plans if "dp:4" in plan or "dp:8" in plan]
    assert rules["dp*fsdp divides batch of 2"]


def test_zero_one_keeps_the_parameters_whole() -> None:
    layout = laid_out()
    mesh = (MeshAxis(name="dp", ici=2), MeshAxis(name="fsdp", ici=4))
    rest = (MeshAxis(name="tp"), MeshAxis(name="sp"))
    usual = {axis.name: axis.choices[0] for axis in layout.logical}
    full = Plan(axes=(*mesh, *rest), mapping=tuple(usual.items()))
    assert spelled_shardings(shardings_of(layout.arguments, full)) == {
        "**/embed": ["vocab", ["embed", "fsdp"]],
        "**/layers/0/q": [["embed", "fsdp"], "heads"],
        "**/layers/0/up": [["embed", "fsdp"], "mlp"],
        "**/layers/0/norm": ["embed"],
        "opt/0/count": [],
        "tokens": ["batch", "sequence"],
    }
    first = replace(full, mapping=tuple((usual | {"params": (), "mlp": ("tp",)}).items()))
    said = spelled_shardings(shardings_of(layout.arguments, first))
    assert said["params/layers/0/up"] == ["embed", "mlp"]
    assert said["opt/0/mu/layers/0/up"] == [["embed", "fsdp"], "mlp"]


def test_what_lies_end_to_end_and_what_few_parameters_have_is_not_split_over_tp() -> None:
    packed = replace(
        STEP,
        cautions=(Caution(kind=CautionKind.PACKED, text="gates", about="mlp"),),
        classes=(*CLASSES, dimension("tiny", 8)),
        arguments=(*ARGUMENTS, array("bias", Role.PARAMETER, "tiny")),
    )
    assert {"mlp", "tiny"} & choices(laid_out(packed)).keys() == set()


def test_experts_are_split_over_an_axis_of_their_own_with_the_batch() -> None:
    step = replace(
        STEP,
        classes=(*CLASSES, dimension("expert", 8)),
        arguments=(*ARGUMENTS, array("w", Role.PARAMETER, "expert", "embed", "mlp")),
    )
    found = choices(laid_out(step))
    assert found["expert"] == ["none", "ep"]
    assert found["batch"] == ["dp+fsdp", "dp+fsdp+ep"]


def test_data_of_one_model_of_several_lie_with_its_parameters() -> None:
    step = replace(
        STEP,
        classes=(*CLASSES, dimension("expert", 8)),
        arguments=(
            *ARGUMENTS,
            array("w", Role.PARAMETER, "expert", "embed", "mlp"),
            array("rows", Role.DATA, "expert", "batch", "embed"),
            array("keys", Role.KEY, "expert"),
        ),
    )
    rows, keys = laid_out(step).arguments[-2:]
    assert rows.split == (("expert",), ("batch",), ())
    assert keys.split == (("expert",),)


def test_without_a_batch_only_classes_of_parameters_are_split() -> None:
    none = replace(STEP, classes=CLASSES[1:])
    layout = laid_out(none)
    assert layout.axes == ("tp", "sp")
    assert any("nothing is split over dp" in one for one in layout.notices)


def test_a_batch_that_the_devices_do_not_divide_is_named_with_sizes_that_would_do() -> None:
    odd = replace(STEP, classes=(dimension("batch", 1347), *CLASSES[1:]))
    said = "8 devices do not divide the batch `batch` (1347), 1344 or 1352 would do: nothing is"
    assert any(said in one for one in laid_out(odd).notices)


def test_what_is_no_batch_may_not_span_slices() -> None:
    none = replace(STEP, classes=CLASSES[1:])
    with pytest.raises(UsageError, match="may be split over 2 slices or nodes, and it has none"):
        lay_out(none, num_devices=8, num_granules=2, script="train.py")
    with pytest.raises(UsageError, match="which no argument of it has: `batch` 8") as raised:
        lay_out(
            replace(STEP, classes=(dimension("batch", 8), *CLASSES[1:]), arguments=ARGUMENTS[:1]),
            num_devices=8,
            num_granules=2,
            script="train.py",
        )
    assert raised.value.hint == "give the batch to the step as an argument"
    odd = dimension("batch", 9, whole="9 = 3 * 3 divides by no mesh axis of an even size")
    with pytest.raises(UsageError, match="which cannot be split: `batch` 9"):
        lay_out(
            replace(STEP, classes=(odd, *CLASSES[1:])),
            num_devices=8,
            num_granules=2,
            script="train.py",
        )


def test_keys_of_examples_are_split_with_the_batch() -> None:
    step = replace(STEP, arguments=(*ARGUMENTS, array("keys", Role.KEY, "batch")))
    assert laid_out(step).arguments[-1].split == (("batch",),)


def test_devices_that_no_mesh_has_are_refused_with_those_that_one_has() -> None:
    # Two rows and four columns: 8 devices at most, although each divides 16 in part.
    few = StepClasses(
        classes=(dimension("batch", 2), dimension("d0", 4)),
        arguments=(
            array("w", Role.PARAMETER, "d0"),
            array("x", Role.DATA, "batch"),
        ),
    )
    assert laid_out(few, devices=8).axes == ("dp", "tp")
    with pytest.raises(UsageError, match="can be split over 8 devices, not over 16") as raised:
        laid_out(few, devices=16)
    assert raised.value.hint == "search it for 8 devices, or give it a batch that 16 divide"
    without = replace(few, classes=(few.classes[1],), arguments=few.arguments[:1])
    with pytest.raises(UsageError, match="can be split over 4 devices, not over 16") as raised:
        laid_out(without, devices=16)
    assert raised.value.hint.startswith("it has no batch, and one device may be right")


@pytest.mark.parametrize("devices", [1, 8])
def test_nothing_that_can_be_split_is_one_sentence(devices: int) -> None:
    odd = StepClasses(
        classes=(dimension("batch", 7, whole="7 divides by no even number", cure="pad it to 8"),),
        arguments=(array("x", Role.DATA, "batch"),),
    )
    with pytest.raises(UsageError) as caught:
        laid_out(odd, devices=devices)
    said = "there is one device" if devices == 1 else "`batch` 7 (7 divides by no even number)"
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert devices == 1 or caught.value.hint == "`batch`: pad it to 8"


def test_a_batch_that_nothing_has_is_not_split_and_so_fsdp_is_not_searched() -> None:
    state = tuple(one for one in ARGUMENTS if one.role is not Role.DATA)
    layout = lay_out(StepClasses(classes=CLASSES, arguments=state), num_devices=8, script="t.py")
    assert "batch" not in [one.name for one in layout.logical]
    assert not {"dp", "fsdp"} & set(layout.axes)
