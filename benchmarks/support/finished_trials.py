"""The finished trials of a study as Optuna reads them, without automesh."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import optuna

Row = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished trial as Optuna gives it."""

    key: tuple[str, str, str]
    state: str
    values: tuple[float, ...]
    params: str
    attributes: str


def finished_trials(database: Path) -> dict[Row, Record]:
    """Every finished trial of the studies in a SQLite file, read with Optuna alone."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    found: dict[Row, Record] = {}
    for summary in optuna.get_all_study_summaries(storage):
        rung = summary.study_name.rpartition("/")[2]
        study = optuna.load_study(study_name=summary.study_name, storage=storage)
        for trial in study.trials:
            if trial.state.is_finished():
                found[rung, trial.number] = _record(trial)
    storage.engine.dispose()
    return found


def _record(trial: optuna.trial.FrozenTrial) -> Record:
    attributes = trial.user_attrs
    return Record(
        key=(
            attributes["plan_json"],
            attributes["source_hash"],
            json.dumps(attributes["versions"], sort_keys=True),
        ),
        state=trial.state.name,
        values=tuple(trial.values or ()),
        params=json.dumps(trial.params, sort_keys=True),
        attributes=json.dumps(attributes, sort_keys=True),
    )
