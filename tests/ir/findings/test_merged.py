"""One cause is one finding."""

from __future__ import annotations

from automesh.cost.terms import Cure, Finding, Monomial, value_of
from automesh.ir.findings.merged import merged

MIB = float(1 << 20)


def finding(rule: str, array: str, mib: float, *, line: int = 7, **more: object) -> Finding:
    given = {"axes": ("fsdp",), "source": f"a.py:{line}", **more}
    return Finding(rule=rule, array=array, bytes=(Monomial(coefficient=mib * MIB),), **given)  # type: ignore[arg-type]


def test_arrays_of_one_line_are_one_finding_with_one_cure() -> None:
    def stack(number: int, mib: float) -> Finding:
        split = ((), ("fsdp",))
        cure = Cure(kind="split-like", arguments=(number,), results=(number,), splits=(split,))
        name = f"args[0][{number}]"
        return finding("layer-split-stack", f"f32[8,{number}]", mib, detail=name, cure=cure)

    (one,) = merged([stack(1, 1), stack(2, 3)], {"fsdp": 8})
    assert one.array == "f32[8,2] and 1 more" and value_of(one.bytes, {}) == 4 * MIB
    assert one.detail == "args[0][2] and 1 more"
    assert one.cure is not None and one.cure.arguments == (2, 1) and len(one.cure.splits) == 2


def test_the_way_back_of_an_array_is_not_counted_twice() -> None:
    both = [finding("full-rematerialization", "f32[8]", 2)] * 2
    (one,) = merged(both, {"fsdp": 8})
    assert one.array == "f32[8]" and value_of(one.bytes, {}) == 2 * MIB


def test_other_lines_axes_and_rules_stay_apart() -> None:
    apart = [
        finding("full-rematerialization", "f32[8]", 2),
        finding("full-rematerialization", "f32[8]", 2, line=8),
        finding("full-rematerialization", "f32[8]", 2, axes=("tp",)),
        finding("undivided-operation", "f32[8]", 2),
        finding("lost-donation", "args[0]", 2),
        finding("lost-donation", "args[1]", 2),
    ]
    assert merged(apart, {}) == tuple(apart)
