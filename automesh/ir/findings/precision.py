"""Rules about wide types in a step whose products are mostly narrow: bf16, f16, f8."""

from __future__ import annotations

from collections.abc import Iterator

from automesh.cost.terms import Finding, Sum, value_of
from automesh.ir.findings.nouns import (
    LEAST_BYTES,
    OperationSite,
    PartitionedProgram,
    words,
    work_of,
)
from automesh.ir.findings.rule import (
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    axes_of,
    bytes_of,
    times_of,
)
from automesh.ir.graph import Operation, Value, total_bytes
from automesh.ir.op_kinds import PRODUCTS, VIEWS
from automesh.ir.passes.narrowed import IS_OF_COMPILER, IS_STATED_WIDE
from automesh.ir.terms.collectives import nearby_source, sent_bytes_of_one
from automesh.platforms import scheduling_of
from automesh.texts.terminal import clean

WIDE_PRODUCT = "wide-product"
WIDE_REDUCTION = "wide-reduction"
WIDE_GATHER = "wide-gather"
_WIDE = frozenset(("f32", "f64"))
_NARROW = ("bf16", "f16", "f8", "f6", "f4")
_REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))
# A step is narrow if at least this part of the work of its products is done in narrow types. Wide
# products are reported if one source line has that part of all work, and a wide reduction if it has
# that part of all reduced bytes. Smaller parts are usually wide on purpose: scores, and the last
# layer. In other steps with narrow products, those are reported whose operands were both widened.
_NARROW_SHARE, _WIDE_SHARE = 0.25, 0.25
_FARTHEST = 32
# What is done to each element before it becomes narrow.
_SCALING = frozenset(("abs", "clamp", "divide", "maximum", "minimum", "multiply", "negate"))
_SAME = VIEWS | {"transpose", "all_slice", "slice"}
# A search of scales leaves at most this part of an array.
_LEAST_REDUCED = 1 / 16


def wide_products(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds wide products in a step that computes in narrow types; each source line once."""
    works = [
        (seen, work_of(program, seen))
        for seen in program.operations()
        if seen.operation.name in PRODUCTS
    ]
    total = sum(work for _, work in works)
    narrow = sum(work for seen, work in works if _is_narrow(seen.operation))
    if not narrow:
        return
    is_narrow = narrow >= _NARROW_SHARE * total
    lines: dict[str, list[tuple[OperationSite, float]]] = {}
    for seen, work in works:
        if _is_wide(seen.operation):
            source = seen.operation.source or nearby_source(seen.operation)
            lines.setdefault(source, []).append((seen, work))
    for source, found in lines.items():
        share = sum(work for _, work in found) / total
        if share < _WIDE_SHARE:
            continue
        if not is_narrow and not any(_is_widened(one.operation) for one, _ in found):
            continue
        seen, _ = max(found, key=lambda one: one[1])
        both = seen.operation.operands[:2]
        operands = [one for one in both if one.dtype in _WIDE] or both
        yield Finding(
            rule=WIDE_PRODUCT,
            array=words(max(operands, key=lambda one: one.global_bytes)),
            bytes=total_bytes(operands),
            count=seen.count,
            source=source,
            detail=f"{share:.0%}",
        )


def _wide_products_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{clean(finding.detail)} of the step's multiplications are in {_dtype(finding)} at this "
        f"line, as of {array_of(finding)}{times_of(finding, sizes)}, where the others are "
        f"narrower: {bytes_of(finding, sizes)} of operands on a device"
    )


def wide_reductions(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds reductions between devices in a wide type whose result becomes narrow."""
    reductions = [
        seen
        for seen in program.operations()
        if seen.operation.name in _REDUCTIONS and seen.operation.attributes.get("axes")
    ]
    total = sum(_reduced_bytes(program, seen) for seen in reductions)
    for seen in reductions:
        operation, reduced = seen.operation, seen.operation.results[0]
        if reduced.dtype not in _WIDE or reduced.global_bytes < LEAST_BYTES:
            continue
        kept = _narrowed_to(reduced)
        if not kept or _reduced_bytes(program, seen) < _WIDE_SHARE * total:
            continue
        yield Finding(
            rule=WIDE_REDUCTION,
            array=words(reduced),
            bytes=(reduced.bytes,),
            axes=operation.attributes["axes"],
            count=seen.count,
            source=nearby_source(operation),
            detail=kept,
        )


def _wide_reductions_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} is reduced over {axes_of(finding)} in {_dtype(finding)}, "
        f"{bytes_of(finding, sizes)}{times_of(finding, sizes)}, and turned into "
        f"{clean(finding.detail)} right behind it"
    )


def wide_gathers(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds arrays that are gathered in a wide type and narrowed behind that, if the platform sends
    fewer bytes for the narrow type; each line once for each number of times."""
    widens = scheduling_of(program.platform).widens
    found: dict[tuple[str, str, Sum], list[OperationSite]] = {}
    for seen in program.operations():
        operation = seen.operation
        if operation.name != "all_gather" or not operation.attributes.get("axes"):
            continue
        whole = operation.results[0]
        if whole.global_bytes < LEAST_BYTES or not whole.dtype.startswith(("f64", "f32", "bf16")):
            continue
        kept = _quantized_to(whole)
        wide_bytes = sent_bytes_of_one(whole.dtype, widens=widens)
        if kept and sent_bytes_of_one(kept, widens=widens) < wide_bytes:
            found.setdefault((nearby_source(operation), kept, seen.count), []).append(seen)
    for (source, kept, count), sites in found.items():
        seen = max(sites, key=lambda one: one.operation.results[0].global_bytes)
        yield Finding(
            rule=WIDE_GATHER,
            array=words(seen.operation.results[0]),
            bytes=total_bytes(one.operation.results[0] for one in sites),
            axes=seen.operation.attributes["axes"],
            count=count,
            source=source,
            detail=kept,
        )


def _wide_gathers_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} is gathered over {axes_of(finding)} in {_dtype(finding)}, "
        f"{bytes_of(finding, sizes)}{times_of(finding, sizes)}, and turned into "
        f"{clean(finding.detail)} behind it, which has fewer bytes"
    )


def _reduced_bytes(program: PartitionedProgram, seen: OperationSite) -> float:
    """Counts the bytes of the whole array that are reduced in a step."""
    times = value_of(seen.count, program.sizes)
    return times * seen.operation.results[0].global_bytes


def _is_wide(product: Operation) -> bool:
    """Whether an operand is wide; a wide result alone is only the type of the sums."""
    return bool(product.attributes.get(IS_STATED_WIDE)) or any(
        one.dtype in _WIDE for one in product.operands[:2]
    )


def _is_widened(product: Operation) -> bool:
    """Whether both operands were converted from a narrow type for this product."""
    return all(map(_was_narrow, product.operands[:2]))


def _was_narrow(value: Value) -> bool:
    made = value.producer
    for _ in range(_FARTHEST):
        if made is None or made.name not in (*VIEWS, "transpose"):
            break
        made = made.operands[0].producer
    return (
        made is not None
        and made.name == "convert"
        and value.dtype in _WIDE
        and made.operands[0].dtype.startswith(_NARROW)
    )


def _is_narrow(product: Operation) -> bool:
    return not product.attributes.get(IS_STATED_WIDE) and all(
        one.dtype.startswith(_NARROW) for one in product.operands[:2]
    )


def _scales(user: Operation) -> bool:
    """Whether an operation multiplies by a constant, as a mean over devices does."""
    return user.name in ("multiply", "divide") and any(one.is_constant for one in user.operands)


def _narrowed_to(value: Value) -> str:
    """Returns the narrow type to which all readers at once convert a value; else empty."""
    found: set[str] = set()
    waiting = [value]
    for _ in range(_FARTHEST):
        if not waiting:
            break
        one = waiting.pop()
        if not one.users:
            return ""
        for user in set(one.users):
            if user.name == "convert" and user.attributes.get(IS_OF_COMPILER):
                return ""
            if user.name == "convert":
                found.add(user.results[0].dtype)
            elif user.name in VIEWS or user.name in ("transpose", "all_slice") or _scales(user):
                waiting.append(user.results[0])
            else:
                return ""
    if waiting or len(found) != 1:
        return ""
    (kept,) = found
    return kept if kept.startswith(_NARROW) else ""


def _quantized_to(value: Value) -> str:
    """Returns the narrow type to which a value is converted, perhaps scaled and clipped first;
    empty if something else than the search of its scale reads it as it is."""
    found: set[str] = set()
    waiting, seen = [value], set[Value]()
    while waiting and len(seen) < _FARTHEST:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if not one.users:
            return ""
        for user in set(one.users):
            if user.name == "convert" and user.attributes.get(IS_OF_COMPILER):
                return ""
            made = user.results[0] if user.results else one
            if user.name == "convert":
                found.add(made.dtype)
            elif user.name in _SAME or (
                user.name in _SCALING
                and all(each is one or _is_repeated(each) for each in user.operands)
            ):
                waiting.append(made)
            elif user.name != "reduce" or made.global_bytes > one.global_bytes * _LEAST_REDUCED:
                return ""
    if waiting or len(found) != 1:
        return ""
    (kept,) = found
    return kept if kept.startswith(_NARROW) else ""


def _is_repeated(value: Value) -> bool:
    """Whether a value is a constant, or has few elements that are repeated."""
    made = value.producer
    return (
        value.is_constant
        or not value.shape
        or (made is not None and made.name == "broadcast_in_dim")
    )


def _dtype(finding: Finding) -> str:
    return clean(finding.array.partition("[")[0])


RULES: tuple[Rule, ...] = (
    Rule(
        name=WIDE_PRODUCT,
        check=WholeProgramCheck(wide_products),
        title="wide product",
        what=_wide_products_words,
        why="an operand was converted to the wide type before the product, or the gradient comes "
        "back in it, and matrix units multiply narrow types several times as fast",
        cure=advice(
            "multiply in the narrow type and keep sums wide: `preferred_element_type=jnp.float32` "
            "with narrow operands, and convert what comes behind it, not before"
        ),
    ),
    Rule(
        name=WIDE_REDUCTION,
        check=WholeProgramCheck(wide_reductions),
        title="wide reduction",
        what=_wide_reductions_words,
        why="devices send what they reduce in the type that it has at that place",
        cure=advice(
            "convert to the narrow type first, if its precision is enough for the sum: the product "
            "in front with a narrow `preferred_element_type`, or `astype` in the loss"
        ),
    ),
    Rule(
        name=WIDE_GATHER,
        check=WholeProgramCheck(wide_gathers),
        title="wide gather",
        what=_wide_gathers_words,
        why="the result of the conversion is wanted whole, and XLA brings an operand of "
        "elementwise operations to the split of their result",
        cure=advice(
            "convert the parts: constrain what the conversion gives to the split of the weight "
            "first, and only then to the other one, with `with_sharding_constraint` twice"
        ),
    ),
)
