"""`--infer` for a script that splits its arrays itself: other shardings of its state are tried."""

from __future__ import annotations

import pytest

from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.mapping import LogicalAxes
from automesh.program.infer.nouns import ArrayClasses, DimensionClass, Role, StepClasses
from automesh.program.infer.search.around import lay_around
from automesh.program.infer.search.layout import Layout, Split, shardings_of
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, SearchSpace

SIZES = {"batch": 16, "embed": 512, "mlp": 2048, "vocab": 50304}
CLASSES = tuple(
    DimensionClass(name=name, size=size, parts=size, stored=size, is_batch=name == "batch")
    for name, size in SIZES.items()
)


def array(name: str, role: Role, *dims: str, of: int | None = None) -> ArrayClasses:
    shape = tuple(SIZES.get(dim, 8) for dim in dims)
    return ArrayClasses(name=name, role=role, shape=shape, dtype="float32", dims=dims, of=of)


ARGUMENTS = (
    array("params['embed']", Role.PARAMETER, "vocab", "embed"),
    array("params['up']", Role.PARAMETER, "embed", "mlp"),
    array("mu['embed']", Role.MOMENT, "vocab", "embed", of=0),
    array("mu['up']", Role.MOMENT, "embed", "mlp", of=1),
    array("count", Role.COUNTER),
    array("tokens", Role.DATA, "batch"),
)
STEP = StepClasses(classes=CLASSES, arguments=ARGUMENTS)
# The script splits the table by its columns, and leaves all of the state whole over `data`.
BY_COLUMNS: Split = ((), ("model",))
WRITTEN = (BY_COLUMNS, BY_COLUMNS, BY_COLUMNS, BY_COLUMNS, (), (("data",),))


def laid_out(written: tuple[Split | None, ...] = WRITTEN, *batch_axes: str) -> Layout:
    return lay_around(
        STEP, written, axes=("data", "model"), batch_axes=batch_axes or ("data",), num_devices=8
    )


def choices(layout: Layout) -> dict[str, list[str]]:
    return {axis.name: ["+".join(one) or "none" for one in axis.choices] for axis in layout.logical}


def test_what_the_script_writes_comes_first_and_other_ways_to_split_its_state_follow() -> None:
    layout = laid_out()
    assert layout.keeps_written
    assert choices(layout) == {
        "params": ["none", "data"],
        "moments": ["none", "data"],
        # `mlp` is split over `model` already, and so is `embed` in the table.
        "vocab_weights": ["none", "model"],
        "embed_weights": ["none", "model"],
    }


def test_an_axis_that_is_given_to_a_dimension_is_taken_from_the_one_for_which_it_was_written() -> (
    None
):
    table = laid_out().arguments[0]
    assert table.over({}) == ((), ("model",))
    assert table.over({"vocab_weights": ("model",)}) == (("model",), ())
    assert table.over({"vocab_weights": ("model",), "params": ("data",)}) in (
        (("model", "data"), ()),
        (("model",), ("data",)),
    )


def test_the_batch_and_what_lies_elsewhere_stay_as_they_are() -> None:
    elsewhere = (None, *WRITTEN[1:])
    layout = laid_out(elsewhere)
    assert not any(layout.arguments[0].split)
    assert layout.arguments[-1].over({"params": ("data",)}) == (("data",),)


def test_state_that_is_split_over_a_batch_axis_already_has_no_other_one() -> None:
    fsdp: Split = (("data",), ("model",))
    layout = laid_out((fsdp, fsdp, fsdp, fsdp, (), (("data",),)))
    assert not {"params", "moments"} & choices(layout).keys()


def test_a_mesh_of_batch_axes_alone_has_the_state_split_over_them() -> None:
    whole: Split = ((), ())
    layout = lay_around(
        STEP,
        (whole, whole, whole, whole, (), (("data",),)),
        axes=("data",),
        batch_axes=("data",),
        num_devices=8,
    )
    assert choices(layout) == {"params": ["none", "data"], "moments": ["none", "data"]}


def test_without_another_way_the_layout_says_so() -> None:
    small = StepClasses(classes=CLASSES, arguments=(ARGUMENTS[4], ARGUMENTS[5]))
    layout = lay_around(
        small, ((), (("data",),)), axes=("data",), batch_axes=("data",), num_devices=8
    )
    assert not layout.logical
    assert "searched as it is written" in layout.notices[0]


def test_two_classes_of_one_array_are_never_split_over_one_axis() -> None:
    layout = laid_out()
    found = find_legal(
        SearchSpace(
            name="auto",
            shipped=True,
            names=layout.axes,
            axes=tuple(AxisRange(name=axis) for axis in layout.axes),
            mapping=layout.logical,
        ),
        StepFacts(mapping=layout.step_mapping),
        num_devices=8,
        platform="cpu",
    )
    mappings: set[LogicalAxes] = {plan.mapping for plan in found.legal}
    assert len(mappings) > 4
    for plan in found.legal:
        split = dict(plan.mapping)
        assert not (split.get("vocab_weights") and split.get("embed_weights"))


@pytest.mark.parametrize(
    ("mapping", "table"),
    [({}, ("", "model")), ({"vocab_weights": "model"}, ("model", ""))],
)
def test_a_rule_says_mesh_axes_for_each_array(
    mapping: dict[str, str], table: tuple[str, ...]
) -> None:
    plan = Plan(
        axes=(MeshAxis(name="data", ici=4), MeshAxis(name="model", ici=2)),
        mapping=tuple((name, (axis,)) for name, axis in mapping.items()),
    )
    found = shardings_of(laid_out().arguments, plan)
    assert found[found.first("params/embed")] == tuple((axis,) if axis else () for axis in table)


def test_a_batch_that_a_shard_map_hides_leaves_the_state_to_be_split() -> None:
    """Inside of a `shard_map` no dimension is known: its arrays are whole there, and split
    between steps."""
    opaque = tuple(
        DimensionClass(name=name, size=size, parts=1, stored=size, whole="not known")
        for name, size in SIZES.items()
    )
    layout = lay_around(
        StepClasses(classes=opaque, arguments=ARGUMENTS),
        (((), ()), ((), ()), ((), ()), ((), ()), (), (("data",),)),
        axes=("data",),
        batch_axes=("data",),
        num_devices=8,
    )
    assert choices(layout) == {"params": ["none", "data"], "moments": ["none", "data"]}
