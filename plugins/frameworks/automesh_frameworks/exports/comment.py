"""The evidence of a rule as comment lines, for the head of an exported text."""

from __future__ import annotations

from collections.abc import Sequence

from automesh.mesh.axes import spelled
from automesh.mesh.evidence import Evidence
from automesh.report.export.nouns import Setting
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds


def evidence_lines(evidence: Evidence) -> list[str]:
    """Describes the evidence of a rule in a few phrases; empty if there is none.

    >>> evidence_lines(Evidence(kind="compiled", step_s=2.0, hbm_bytes=2**30))
    ['compiled: 2.00 s for a step, predicted; 1.00 GiB on a device']
    """
    if evidence.kind == "none":
        return ["written by hand: nothing was measured"]
    said: list[str] = []
    if evidence.step_s:
        how = "measured" if evidence.kind == "measured" else "predicted"
        text = f"{format_seconds(evidence.step_s)} for a step, {how}"
        if len(evidence.interval_s) == 2:
            low, high = map(format_seconds, evidence.interval_s)
            text += f" (95 % interval {low} to {high})"
        said.append(text)
    if evidence.hbm_bytes:
        said.append(f"{format_bytes(evidence.hbm_bytes)} on a device")
    lines = [f"{evidence.kind}: {'; '.join(said)}" if said else evidence.kind]
    if evidence.runner_up.plan:
        slower = (evidence.runner_up.slower - 1) * 100
        lines.append(f"second best: {evidence.runner_up.plan}, {slower:+.1f} % step time")
    made = [evidence.made, *(f"{name} {version}" for name, version in evidence.versions)]
    if any(made):
        lines.append(", ".join(part for part in made if part))
    if evidence.study:
        lines.append(f"study {evidence.study}")
    return lines


def head(settings: Sequence[Setting], title: str, seen_in: str, notes: Sequence[str] = ()) -> str:
    """Returns the comment at the top of an exported text, with a line break at its end."""
    lines = [f"Written by `automesh export` for {title} (keys as in {seen_in})."]
    for setting in settings:
        found = evidence_lines(setting.evidence)
        lines.append(f"{setting.match or 'any devices'}: {found[0]}")
        lines += [f"  {line}" for line in found[1:]]
        if setting.compiler_options:
            flags = xla_flags(setting)
            lines.append(f"  compiled with {flags}")
    # A rules file may contain any text, so nothing from it may end the comment.
    return "".join(f"# {clean(line)}\n" for line in [*lines, *notes])


def xla_flags(setting: Setting) -> str:
    """Returns the compiler options as flags of XLA.

    >>> xla_flags(Setting(axes=(), compiler_options=(("xla_a", True), ("xla_b", 2))))
    '--xla_a=true --xla_b=2'
    """
    return " ".join(f"--{name}={spelled(value)}" for name, value in setting.compiler_options)
