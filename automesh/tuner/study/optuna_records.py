"""Our trials as Optuna's: sizes and choices as integer parameters, the rest as attributes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import Field

from automesh.errors import AutomeshError
from automesh.jsonio import from_json, read_json, to_json
from automesh.mesh.axes import MAPPING, Plan, Scalar
from automesh.mesh.mapping import format_axes
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Measured,
    Outcome,
    OutOfMemory,
    RuledOut,
    TimedOut,
)
from automesh.tuner.study.lease import Owner
from automesh.tuner.study.trials import Round, RungName, State, Trial

Choices = dict[str, list[Scalar | None]]
"""Parameter -> its values in the order in which they were first seen; trials store the index."""

ROUND = "round."
_NUMBER = re.compile("[0-9]{1,9}")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LOG_TAIL_CHARS = 20_000  # MySQL keeps at most 64 kB in one attribute
_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "raced_out",
    TrialState.FAIL: "failed",
}


def extended(choices: Choices, plans: Sequence[Plan]) -> Choices:
    """Returns `choices` with the settings of `plans` that it lacks, at the ends of its lists.

    Index 0 of a compiler option is null: a plan that leaves the option at the compiler's default.
    """
    grown = {name: list(values) for name, values in choices.items()}
    for plan in plans:
        for name, value in _settings(plan).items():
            values = grown.setdefault(name, [None] if name.startswith("option.") else [])
            if _index(values, value) is None:
                values.append(value)
    return grown


def new_trial(
    plan: Plan,
    choices: Choices,
    *,
    source_hash: str,
    versions: Sequence[tuple[str, str]],
    estimated: Estimated | None = None,
    run: str = "",
) -> FrozenTrial:
    """Makes a waiting Optuna trial for `plan`; every setting of the plan must be in `choices`."""
    params: dict[str, int] = {}
    distributions: dict[str, BaseDistribution] = {}
    for axis in plan.axes:
        sizes = {axis.name: axis.ici}
        if plan.num_granules > 1:
            sizes[f"dcn.{axis.name}"] = axis.dcn
        for name, size in sizes.items():
            params[name] = size
            distributions[name] = IntDistribution(1, max(plan.num_devices, 1), log=True)
    settings = _settings(plan)
    for name, values in choices.items():
        index = _index(values, settings.get(name))
        if index is not None:
            params[name] = index
            distributions[name] = IntDistribution(0, len(values) - 1)
    attributes = {
        "plan": str(plan),
        "plan_json": json.dumps(to_json(plan, Plan)),
        "source_hash": source_hash,
        "versions": dict(versions),
    }
    if run:
        attributes["run"] = run
    if estimated is not None:
        attributes["estimated"] = json.dumps(to_json(estimated, Estimated))
    return create_trial(
        state=TrialState.WAITING,
        params=dict(params),
        distributions=distributions,
        user_attrs=attributes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attributes:
    """The attributes of a trial that are read; those that are JSON within JSON as text."""

    plan_json: str
    source_hash: str
    versions: dict[str, str]
    outcome: str | None = None
    owner: Owner | None = None
    attempts: int = 0
    fingerprint: str = ""
    estimated: str | None = None
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    samples_s: Annotated[tuple[_Seconds, ...], Field(min_length=1)]
    machine: str


_NAMES = frozenset(field.name for field in fields(_Attributes))


def read_trial(rung: RungName, frozen: FrozenTrial) -> Trial:
    """Reads a trial as `new_trial` and the rung have stored it.

    Raises:
      AutomeshError: the trial is damaged: somebody else has written it, or a disk lost a part.
    """
    stored: dict[str, Any] = frozen.user_attrs
    named = {name: value for name, value in stored.items() if name in _NAMES}
    found: _Attributes = from_json(named, _Attributes)
    outcome: Outcome | None = None
    # An outcome is stored just before the state: until then the trial is not finished.
    if frozen.state.is_finished() and found.outcome is not None:
        outcome = read_outcome(found.outcome)
    return Trial(
        rung=rung,
        number=frozen.number,
        storage_id=frozen._trial_id,  # pyright: ignore[reportPrivateUsage]
        plan=read_json(found.plan_json, Plan),
        state=_STATES[frozen.state],
        outcome=outcome,
        owner=found.owner,
        attempts=found.attempts,
        fingerprint=found.fingerprint,
        source_hash=found.source_hash,
        versions=tuple(found.versions.items()),
        rounds=_rounds(stored),
        estimated=None if found.estimated is None else read_json(found.estimated, Estimated),
        run=found.run,
    )


def read_outcome(text: str) -> Outcome:
    """Reads the attribute `outcome`.

    Raises:
      AutomeshError: it is damaged.
    """
    outcome: Outcome = read_json(text, Outcome)
    try:
        final_state(outcome)
    except ValueError as error:
        raise AutomeshError(str(error)) from None
    return outcome


def is_ours(frozen: FrozenTrial) -> bool:
    """Whether automesh made a trial; others may have added some with Optuna's own tools."""
    # A damaged journal may hold anything here.
    stored: Any = frozen.user_attrs
    return isinstance(stored, dict) and "plan_json" in stored and "versions" in stored


def outcome_attributes(outcome: Outcome) -> dict[str, Any]:
    """Returns the attributes of an outcome: its kind, the JSON, and a failure's reason."""
    if isinstance(outcome, Failed | TimedOut) and len(outcome.log_tail) > LOG_TAIL_CHARS:
        outcome = replace(outcome, log_tail=outcome.log_tail[-LOG_TAIL_CHARS:])
    attributes = {"kind": outcome.kind, "outcome": json.dumps(to_json(outcome, Outcome))}
    match outcome:
        case Compiled():
            attributes["fingerprint"] = outcome.fingerprint
        case Measured() | Estimated():
            pass
        case Failed():
            attributes["reason"] = outcome.reason
        case OutOfMemory() | RuledOut():
            attributes["reason"] = outcome.detail
        case TimedOut():
            attributes["reason"] = f"no end after {outcome.limit_s:g} s"
    return attributes


def final_state(outcome: Outcome) -> tuple[TrialState, list[float] | None]:
    """Returns Optuna's state for an outcome, and its value in seconds.

    Raises:
      ValueError: the step time is not a positive number.
    """
    if isinstance(outcome, Compiled | Measured) and not 0 < outcome.step_s < math.inf:
        raise ValueError(f"a step cannot take {outcome.step_s} s")
    match outcome:
        case Compiled():
            return TrialState.COMPLETE, [outcome.step_s]
        case Measured():
            state = TrialState.PRUNED if outcome.raced_out else TrialState.COMPLETE
            return state, [outcome.step_s]
        case _:
            return TrialState.FAIL, None


def owner_attributes(frozen: FrozenTrial, owner: Owner) -> dict[str, Any]:
    """Returns the attributes that a claim changes."""
    attempts = frozen.user_attrs.get("attempts", 0) + 1
    return {"owner": to_json(owner, Owner), "attempts": attempts}


def round_attribute(measured: Round) -> tuple[str, Any]:
    """Returns the name and the value of the attribute that has a round's samples."""
    value = {"machine": measured.machine, "samples_s": list(measured.samples_s)}
    return f"{ROUND}{measured.number:04d}", value


def _rounds(attributes: Mapping[str, Any]) -> tuple[Round, ...]:
    stored = sorted((key, value) for key, value in attributes.items() if key.startswith(ROUND))
    rounds: list[Round] = []
    for key, value in stored:
        number = key.removeprefix(ROUND)
        if not _NUMBER.fullmatch(number):
            raise AutomeshError(f"`{key}` is no round")
        one: _Round = from_json(value, _Round)
        rounds.append(Round(number=int(number), samples_s=one.samples_s, machine=one.machine))
    return tuple(rounds)


def _settings(plan: Plan) -> dict[str, Scalar]:
    settings: dict[str, Scalar] = {
        f"{MAPPING}{name}": format_axes(axes) for name, axes in plan.mapping
    }
    settings |= {f"knob.{name}": value for name, value in plan.knobs}
    return settings | {f"option.{name}": value for name, value in plan.compiler_options}


def _index(values: Sequence[Scalar | None], value: Scalar | None) -> int | None:
    # By JSON text: True, 1 and 1.0 are equal in Python, but different knobs.
    texts = [json.dumps(known) for known in values]
    text = json.dumps(value)
    return texts.index(text) if text in texts else None
