"""The words of a rule about axes that cross the network between granules."""

from __future__ import annotations

from automesh.cost.breakdown import AXIS_OVER_DCN
from automesh.cost.terms import Finding, value_of
from automesh.ir.findings.rule import PricedCheck, Rule, Sizes, advice, array_of, axes_of, bytes_of
from automesh.texts.terminal import clean


def _axis_over_dcn_words(finding: Finding, sizes: Sizes) -> str:
    granules, _, seconds = clean(finding.detail).partition(" ")
    return (
        f"{axes_of(finding)} goes over {granules} granules (slices or nodes), and does not split "
        f"the batch: its collectives of {array_of(finding)}, "
        f"{round(value_of(finding.count, sizes))} a step of "
        f"{bytes_of(finding, sizes)} on average, take {seconds} on the network between them"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name=AXIS_OVER_DCN,
        check=PricedCheck(),
        title="axis over DCN",
        what=_axis_over_dcn_words,
        why="an axis that splits weights or a sequence sends activations in every layer, forward "
        "and backward, and the network between granules is many times slower than the links inside",
        cure=advice(
            "let this axis fit inside of a granule, and a data-parallel axis cross: "
            "`dcn.dp:2,tp:8` instead of `tp:16`"
        ),
    ),
)
