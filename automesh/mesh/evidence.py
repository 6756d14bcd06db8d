"""`Evidence`: the measurements or predictions behind a rule, and whether they still hold here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from automesh.package import installed_version

# Variables with these prefixes change the compiler or the network.
ENVIRONMENT_PREFIXES = ("XLA_", "LIBTPU_", "NCCL_")
_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count="
# These two do not change the time of a step.
_IGNORED_VERSIONS = ("automesh", "python")


class StaleEvidenceWarning(UserWarning):
    """Warns that a rule was found with other versions or in another environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The second best plan, and its step time over the winner's; no plan if `plan` is empty."""

    plan: str = ""
    slower: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """The work of a compiled step on one device, with which `automesh check` compares.

    Attributes:
      fingerprint: hash of the lowered program; empty if unknown.
      flops: of matrix products and convolutions.
      peak_bytes: memory on a device, by the compiler.
      step_s: predicted from the program, seconds.
      collectives: kind and mesh axes, executions, and bytes of the full arrays of one group, such
        as `("all-reduce dp+fsdp", 12, 4096)`; sorted.
      undonated_bytes: of outputs that reuse no donated argument; -1 if unknown.
    """

    fingerprint: str = ""
    flops: int = 0
    peak_bytes: int = 0
    undonated_bytes: int = -1
    step_s: float = 0.0
    collectives: tuple[tuple[str, int, int], ...] = ()


NO_FACTS = ProgramFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts that are known about a rule's plan; unknown fields have their defaults.

    Attributes:
      kind: source of `step_s`; `none` for a rule written by hand.
      step_s: seconds per step; 0 if unknown.
      interval_s: low and high end of the 95 % interval of `step_s`; empty unless measured.
      bracket_s: the time of the busiest part of the hardware alone, and the time if nothing
        overlaps; empty unless compiled.
      exposed_s: the part of `step_s` in which the cores wait for communication; 0 unless compiled.
      hbm_bytes: peak on one device; 0 if unknown.
      reserve_bytes: memory of a device that the search kept free in addition; 0 if none.
      stage_bytes: peak on one device of each stage of a pipeline, by its compiler; empty without a
        pipeline.
      mfu: model FLOPs utilization from 0 to 1; 0 if unknown.
      tried: number of plans by outcome, such as `compiled` or `measured`.
      study: where the trials are.
      made: UTC time in ISO 8601.
      values: where the arguments came from.
      reference: the run whose losses the plan's were compared with.
      command: template of the command that was run, `python train.py --fsdp {fsdp}`; empty if a
        script's step was searched.
      split: axes of the script's mesh that the rule splits into several, `data=dp,fsdp`: arrays
        that the script splits over data are split over both, and its state over fsdp, too. Empty if
        the rule has the script's own axes.
      not_searched: work of the script outside its jitted step, which no figure here counts; empty
        if none is known.
      program: what the compiled step does; unknown in rules of earlier versions.
      uncounted: work of unknown length that `step_s` leaves out, in words; empty if it was
        measured, or if all is counted.
      findings: rules that found something in its program: `state-changes-type`, `lost-donation`,
        `second-compile` and others.
      versions: of the packages that made the program.
      environment: XLA, LIBTPU and NCCL variables that were set.
    """

    kind: Literal["measured", "compiled", "estimated", "none"]
    step_s: float = 0.0
    interval_s: tuple[float, ...] = ()
    bracket_s: tuple[float, ...] = ()
    exposed_s: float = 0.0
    hbm_bytes: int = 0
    reserve_bytes: int = 0
    stage_bytes: tuple[int, ...] = ()
    mfu: float = 0.0
    runner_up: RunnerUp = RunnerUp()
    tried: tuple[tuple[str, int], ...] = ()
    study: str = ""
    made: str = ""
    values: Literal["synthetic", "user", ""] = ""
    reference: str = ""
    command: str = ""
    split: str = ""
    not_searched: str = ""
    program: ProgramFacts = NO_FACTS
    uncounted: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


NO_EVIDENCE = Evidence(kind="none")


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Selects the variables that change a program, without the number of virtual devices."""
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIXES):
            words = environ[name].split() if name == "XLA_FLAGS" else [environ[name]]
            value = " ".join(word for word in words if not word.startswith(_VIRTUAL_DEVICES))
            if value:
                found[name] = value
    return found


def differences(evidence: Evidence, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Lists how versions and environment differ from the evidence's, one phrase each.

    Versions are those of the installed packages: nothing is imported.
    """
    if evidence.kind == "none":
        return ()
    names = [(name, was) for name, was in evidence.versions if name not in _IGNORED_VERSIONS]
    found = [
        f"{name} {was} then, {now or 'not installed'} now"
        for name, was in names
        if (now := installed_version(name)) != was
    ]
    then, now = relevant_environment(dict(evidence.environment)), relevant_environment(environ)
    found += [
        f"{name}={then.get(name, '')!r} then, {now.get(name, '')!r} now"
        for name in _sorted_union(then, now)
        if then.get(name) != now.get(name)
    ]
    return tuple(found)


def _sorted_union(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return sorted({*first, *second})
