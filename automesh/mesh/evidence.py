"""`Evidence`: what a rule rests on, and whether it still holds here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from automesh.package import installed_version

# Variables with these prefixes change what the compiler or the network does.
ENVIRONMENT_PREFIXES = ("XLA_", "LIBTPU_", "NCCL_")
_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count="
# Neither makes a step faster or slower.
_IGNORED_VERSIONS = ("automesh", "python")


class StaleEvidenceWarning(UserWarning):
    """A rule was found under other versions or another environment than the present ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The second best plan, and its step time over the winner's; no plan if `plan` is empty."""

    plan: str = ""
    slower: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What a compiled step does on one device in one step, for `automesh check` to compare with.

    Attributes:
      fingerprint: hash of the lowered program; empty if nothing is known of it.
      flops: of matrix products and convolutions.
      peak_bytes: what must fit on a device, by the compiler.
      step_s: predicted from the program, seconds.
      collectives: kind and mesh axes, executions, and bytes of the full arrays of one group, such
        as `("all-reduce dp+fsdp", 12, 4096)`; sorted.
      undonated_bytes: of outputs that take the place of no donated argument; -1: not known.
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
    """What is known of a rule's plan; a field that is not known keeps its default.

    Attributes:
      kind: what `step_s` comes from; `none` for a rule written by hand.
      step_s: seconds per step; 0 if unknown.
      interval_s: low and high end of the 95 % interval of `step_s`; empty unless measured.
      bracket_s: what the busiest part of the hardware needs alone, and what a step takes if nothing
        overlaps; empty unless compiled.
      exposed_s: of `step_s`, what the cores wait for communication; 0 unless compiled.
      hbm_bytes: peak on one device; 0 if unknown.
      reserve_bytes: of a device, what the search kept free beside that; 0 if nothing.
      stage_bytes: of each stage of a pipeline the peak on one device by its compiler; empty if
        there is no pipeline.
      mfu: model FLOPs utilization from 0 to 1; 0 if unknown.
      tried: number of plans by what became of them, such as `compiled` or `measured`.
      study: where the trials are.
      made: UTC time in ISO 8601.
      values: where the arguments came from.
      reference: whose losses the plan's were compared with.
      command: template of the command that was run, `python train.py --fsdp {fsdp}`; empty where a
        script's step was searched.
      split: axes of the script's mesh that are several in the rule's, `data=dp,fsdp`: what the
        script splits over data is split over both, and its state over fsdp, too. Empty where the
        rule's axes are the script's own.
      not_searched: what the script does besides its jitted step, and no figure here counts; empty
        where nothing is known of such work.
      program: what the compiled step does; unknown in rules of earlier versions.
      uncounted: what `step_s` leaves out that may take any time, in words; empty if it was
        measured, or if all is counted.
      findings: rules by which something was found in its program that is not as it should be:
        `state-changes-type`, `lost-donation`, `second-compile` and others.
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
    """The variables that change what a program does, without the number of virtual devices."""
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIXES):
            words = environ[name].split() if name == "XLA_FLAGS" else [environ[name]]
            value = " ".join(word for word in words if not word.startswith(_VIRTUAL_DEVICES))
            if value:
                found[name] = value
    return found


def differences(evidence: Evidence, environ: Mapping[str, str]) -> tuple[str, ...]:
    """How versions and environment differ from the evidence's, one phrase each.

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
