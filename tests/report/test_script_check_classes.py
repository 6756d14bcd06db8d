"""Classes and roles in `automesh check-script`, bounded however many arrays there are."""

from __future__ import annotations

from automesh.program.infer.nouns import (
    ArrayClasses,
    Caution,
    CautionKind,
    DimensionClass,
    Inner,
    Role,
    StepClasses,
)
from automesh.report.script_check.classes import class_lines
from automesh.report.script_check.names import common_name


def array(name: str, role: Role, dims: tuple[str, ...], of: int | None = None) -> ArrayClasses:
    return ArrayClasses(
        name=name, role=role, shape=(8,) * len(dims), dtype="float32", dims=dims, of=of
    )


def step(layers: int) -> StepClasses:
    weights = [
        array(f"params['layers'][{layer}]['up']", Role.PARAMETER, ("embed", "mlp"))
        for layer in range(layers)
    ]
    moments = [
        array(f"opt['layers'][{layer}]['up']", Role.MOMENT, ("embed", "mlp"), of=layer)
        for layer in range(layers)
    ]
    return StepClasses(
        classes=(
            DimensionClass(name="batch", size=8, parts=8, is_batch=True),
            DimensionClass(name="embed", size=64, parts=64, stored=64),
            DimensionClass(
                name="packed", size=96, parts=32, pieces=(("mlp", 32), ("mlp", 32), ("", 32))
            ),
            DimensionClass(
                name="vocab", size=65, parts=1, whole="65 = 5 * 13", cure="pad it to 128"
            ),
        ),
        arguments=(*weights, *moments, array("x", Role.DATA, ("batch", ""))),
        held=(array("held[0]", Role.DATA, ("vocab",)),),
        inner=(
            Inner(path=(3,), bodies=(), output=0, shape=(8, 4), dims=("batch", ""), why="drawn"),
        ),
        cautions=(Caution(kind=CautionKind.NO_LOSS, text="no loss comes out"),),
    )


def test_layers_share_a_line_and_moments_follow_their_parameters() -> None:
    assert class_lines(step(1000), show_all=False) == [
        ("classes", "batch 8: x.0"),
        ("", "embed 64: params['layers'][0..999]['up'].0"),
        ("", "packed 96 (mlp 32 + mlp 32 + 32 end to end): in no argument"),
        ("", "vocab 65: held[0].0; whole: 65 = 5 * 13 (pad it to 128)"),
        ("roles", "parameter: params['layers'][0..999]['up']"),
        ("", "moment: opt['layers'][0..999]['up']"),
        ("", "data: x, held[0]"),
        ("inside", "(batch, 4) needs a constraint: drawn"),
        ("mind", "no loss comes out"),
    ]


def test_many_classes_are_bounded_unless_all_are_asked_for() -> None:
    names = [f"d{number}" for number in range(40)]
    many = StepClasses(
        classes=tuple(DimensionClass(name=name, size=8, parts=8) for name in names),
        arguments=tuple(array(f"{name}x", Role.DATA, (name,)) for name in "abcdefgh"),
    )
    short = class_lines(many, show_all=False)
    assert short[16] == ("", "24 smaller ones, not shown: --all shows each")
    assert ("roles", "data: ax, bx, cx, dx and 4 more") in short
    assert len([line for line in class_lines(many, show_all=True) if "d39 8" in line[1]]) == 1


def test_names_are_joined_only_if_none_is_added() -> None:
    assert common_name(["p[10].w", "p[11].w", "p[9].w"]) == "p[9..11].w"
    assert common_name(["p[0].w", "p[2].w", "p[5].w"]) == "p[0,2,5].w"
    # The width of a hidden layer: columns of one weight, rows of the next.
    assert common_name(["p[0][1].0", "p[1][0].0"]) == "p[0][1].0, p[1][0].0"
    assert common_name(["p[0][0]", "p[0][1]", "p[1][0]", "p[1][1]"]) == "p[0..1][0..1]"
