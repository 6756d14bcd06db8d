"""What the golden files in tests/golden/explain hold, by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from automesh.cost.terms import Terms, Uncounted
from automesh.report.blocks.terminal import render
from automesh.report.explain.nouns import Explanation
from automesh.report.explain.table import report_of
from tests.support.paths import GOLDEN
from tests.support.samples import explain_samples as samples
from tests.support.samples.explain_samples import monomial, total
from tests.support.samples.results_samples import compiled, measured

FOLDER = GOLDEN / "explain"
WIDTHS = (60, 80, 120)


def decoder(*active: str) -> Terms:
    """Layers with weights split over fsdp and hidden units over tp, and a loss at the end."""
    rows = {axis: -1 for axis in active if axis in ("dp", "fsdp")}
    units = {axis: -1 for axis in active if axis == "tp"}
    tokens, hidden = monomial(65536.0, **rows), monomial(16384.0, **units)
    activations = total(2 * 65536 * 4096.0, **rows)
    weights = total(2 * 4096 * 16384.0, **units)
    up = samples.matmul(tokens, hidden, monomial(4096.0))
    down = samples.matmul(tokens, monomial(4096.0), hidden)
    collectives = [
        samples.collective(
            "all-gather", "fsdp", payload=weights, source="model.py:31", operand="bf16[4096,16384]"
        ),
        samples.collective(
            "all-reduce",
            "tp",
            payload=activations,
            source="model.py:32",
            operand="bf16[65536,4096]",
        ),
        samples.collective(
            "all-reduce",
            *active,
            payload=total(4.0),
            source="",
            region=samples.STEP,
            operand="f32[]",
        ),
    ]
    return samples.terms(
        *active,
        kernels=(
            samples.product(up, activations, source="model.py:31"),
            samples.product(down, activations, source="model.py:32"),
            samples.streaming(activations, operation="fusion", source="model.py:40"),
        ),
        collectives=tuple(one for one in collectives if set(one.axes) <= set(active)),
        uncounted=(
            Uncounted(
                what="custom call flash_attention",
                why="it does not say what it costs",
                source="model.py:36",
            ),
        ),
        argument_bytes=total(2.0**34, **rows, **units),
        temporaries=activations,
    )


def estimated() -> Explanation:
    return samples.explanation(
        samples.explained("fsdp:4,tp:4", decoder("fsdp", "tp"), remat="full")
    )


def evidence() -> Explanation:
    """One mesh that was compiled and measured too."""
    explanation = estimated()
    one = replace(explanation.one, compiled=compiled(0.281), measured=measured(0.301))
    return replace(explanation, one=one, study="results/train-gpu-h100-16-3fa9c1d2/study.db")


def against() -> Explanation:
    across = samples.explained("dcn.tp:4,fsdp:4", decoder("fsdp", "tp"), granules=4, remat="full")
    inside = samples.explained("fsdp:16", decoder("fsdp"), remat="full")
    return samples.explanation(across, replace(inside, measured=measured(0.23)))


def single() -> Explanation:
    """A mesh of one device: no collectives."""
    return samples.explanation(samples.explained("dp:1", decoder()))


def many() -> Explanation:
    """More collectives than are shown, more uncounted pieces too, and terms of other sizes."""
    chatter = tuple(
        samples.collective("all-reduce", "dp", payload=total(1e6 * (1 + n)), source=f"model.py:{n}")
        for n in range(14)
    )
    missing = tuple(
        Uncounted(what=f"custom call kernel_{n}", why="it does not say what it costs")
        for n in range(7)
    )
    one = samples.explained("dp:16", samples.terms("dp", collectives=chatter, uncounted=missing))
    return samples.explanation(replace(one, is_borrowed=True, failure="out of memory: needs 1 TiB"))


SAMPLES: dict[str, Callable[[], Explanation]] = {
    "estimated": estimated,
    "evidence": evidence,
    "against": against,
    "single": single,
    "many": many,
}
CASES: dict[str, Callable[[], str]] = {
    f"{name}_{width}": partial(
        lambda sample, width: render(report_of(sample()), width=width, colour=False), sample, width
    )
    for name, sample in SAMPLES.items()
    for width in WIDTHS
}
