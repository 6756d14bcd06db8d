"""A database in which damaged trials and notes are left out, and named."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from automesh.skipped import DAMAGE, Skipped, name_of_note

_STUDIES = sa.table("studies", sa.column("study_id"), sa.column("study_name"))
_NOTES = sa.table(
    "study_user_attributes", sa.column("study_id"), sa.column("key"), sa.column("value_json")
)
_TRIALS = sa.table(
    "trials",
    sa.column("trial_id"),
    sa.column("study_id"),
    sa.column("state"),
    sa.column("datetime_complete", sa.DateTime),
)


class TolerantDatabase(RDBStorage):
    """Optuna's storage in a database.

    Optuna reads all trials of a study at once, so that one row which it cannot read hides all
    others; then this reads them one by one.

    Attributes:
      skipped: takes the rows that are damaged.
    """

    skipped: Skipped

    def get_all_studies(self) -> list[FrozenStudy]:
        """All studies with the notes of theirs that can be read."""
        return [
            FrozenStudy(
                study_name=str(name),
                direction=StudyDirection.MINIMIZE,  # As all of ours.
                user_attrs=self.get_study_user_attrs(number),
                system_attrs={},
                study_id=number,
            )
            for number, name in self._rows(sa.select(_STUDIES).order_by(_STUDIES.c.study_id))
        ]

    def study_names(self) -> list[str]:
        """Of all studies, whose notes and trials are not looked at."""
        return [str(name) for (name,) in self._rows(sa.select(_STUDIES.c.study_name))]

    def changes(self) -> dict[str, tuple[tuple[object, ...], float]]:
        """Of every study something that changes with its trials and notes, and when a trial of it
        was finished last, in seconds since 1970; 0 if none was. Two queries, however many studies
        there are."""
        found: dict[str, tuple[list[object], float]] = {
            name: ([], 0.0) for name in self.study_names()
        }
        trials = (
            sa.select(
                _STUDIES.c.study_name,
                _TRIALS.c.state,
                sa.func.count(),
                sa.func.max(_TRIALS.c.datetime_complete),
            )
            .join_from(_STUDIES, _TRIALS, _STUDIES.c.study_id == _TRIALS.c.study_id)
            .group_by(_STUDIES.c.study_name, _TRIALS.c.state)
            .order_by(_STUDIES.c.study_name, _TRIALS.c.state)
        )
        notes = (
            sa.select(
                _STUDIES.c.study_name,
                sa.func.count(),
                sa.func.sum(sa.func.length(_NOTES.c.value_json)),
            )
            .join_from(_STUDIES, _NOTES, _STUDIES.c.study_id == _NOTES.c.study_id)
            .group_by(_STUDIES.c.study_name)
        )
        for name, state, count, last in self._rows(trials):
            signs, changed_s = found.get(str(name), ([], 0.0))
            signs += [str(state), int(count), str(last)]
            changed_s = max(changed_s, last.timestamp() if last is not None else 0.0)
            found[str(name)] = (signs, changed_s)
        for name, count, length in self._rows(notes):
            signs, _ = found.setdefault(str(name), ([], 0.0))
            signs += [int(count), int(length or 0)]
        return {name: (tuple(signs), changed_s) for name, (signs, changed_s) in found.items()}

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """The notes of a study that can be read."""
        query = sa.select(_NOTES.c.key, _NOTES.c.value_json).where(_NOTES.c.study_id == study_id)
        found: dict[str, Any] = {}
        for key, text in self._rows(query):
            if type(key) is not str:
                self.skipped.note(f"the note of the name {key!r}", ValueError("it is no text"))
                continue
            try:
                found[key] = json.loads(text)
            except DAMAGE as error:
                self.skipped.note(name_of_note(key), error)
        return found

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """A trial.

        Raises:
          ValueError: its number is none.
        """
        found = super().get_trial(trial_id)
        _check(found)
        return found

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        try:
            found = super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
            for one in found:
                _check(one)
            return found
        except DAMAGE:
            return self._one_by_one(study_id, states, included_trial_ids, trial_id_greater_than)

    def _one_by_one(
        self, study_id: int, states: Container[TrialState] | None, included: set[int], above: int
    ) -> list[FrozenTrial]:
        query = sa.select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id == study_id)
        found: list[FrozenTrial] = []
        for (number,) in self._rows(query.order_by(_TRIALS.c.trial_id)):
            if number <= above and number not in included:
                continue
            try:
                trial = self.get_trial(number)
            except DAMAGE as error:
                self.skipped.note(f"row {number} of `trials`", error)
                continue
            if states is None or trial.state in states:
                found.append(trial)
        return found

    def _rows(self, query: sa.Executable) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(query))


def _check(trial: FrozenTrial) -> None:
    if type(trial.number) is not int:
        raise ValueError(f"its number is {trial.number!r}")
    for key in (*trial.user_attrs, *trial.system_attrs, *trial.params):
        if type(key) is not str:
            raise ValueError(f"the name of an attribute is {key!r}")
