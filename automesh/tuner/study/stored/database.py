"""A database in which damaged trials and notes are left out, and named."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Any, Self

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

    Optuna reads all trials of a study at once, so that one unreadable row hides all others. In that
    case this class reads the rows one by one.

    Attributes:
      skipped: gets the damaged rows.
    """

    skipped: Skipped

    def get_all_studies(self) -> list[FrozenStudy]:
        """Lists all studies with those of their notes that can be read."""
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

    def noting(self, skipped: Skipped) -> Self:
        """Returns the same storage, over the same connections, which reports damage elsewhere."""
        other = type(self).__new__(type(self))
        # Its constructor, and copying it, would connect anew and look at all tables.
        vars(other).update(vars(self))
        other.skipped = skipped
        return other

    def study_names(self) -> list[str]:
        """Lists the names of all studies, without reading their notes and trials."""
        return [str(name) for (name,) in self._rows(sa.select(_STUDIES.c.study_name))]

    def has_one_of(self, names: Sequence[str]) -> bool:
        """Whether there is a study of one of these names."""
        query = sa.select(_STUDIES.c.study_id).where(_STUDIES.c.study_name.in_(names)).limit(1)
        return bool(self._rows(query))

    def changes(self) -> dict[str, tuple[tuple[object, ...], float]]:
        """Returns for every study a value that differs after each change of its trials and notes.

        The second value is the time when its last trial was finished, in seconds since 1970; 0 if
        none was. It takes two queries, however many studies there are.
        """
        found: dict[str, tuple[tuple[object, ...], float]] = {}
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
        # PostgreSQL knows the bytes of a long text, and would unpack it to count its characters.
        is_postgres = self.engine.dialect.name == "postgresql"
        length_of = sa.func.octet_length if is_postgres else sa.func.length
        notes = (
            sa.select(
                _STUDIES.c.study_name,
                sa.func.count(_NOTES.c.key),
                sa.func.sum(length_of(_NOTES.c.value_json)),
            )
            .join_from(
                _STUDIES, _NOTES, _STUDIES.c.study_id == _NOTES.c.study_id, isouter=True
            )  # also studies without any
            .group_by(_STUDIES.c.study_name)
        )
        for name, count, length in self._rows(notes):
            found[str(name)] = ((int(count), int(length or 0)), 0.0)
        for name, state, count, last in self._rows(trials):
            signs, changed_s = found.get(str(name), ((), 0.0))
            if last is not None:
                changed_s = max(changed_s, last.timestamp())
            found[str(name)] = ((*signs, str(state), int(count), str(last)), changed_s)
        return found

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Returns the notes of a study that can be read."""
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
        """Reads a trial.

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
        # A single statement needs no transaction, which a server would be asked for twice more.
        engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            return list(connection.execute(query))


def _check(trial: FrozenTrial) -> None:
    if type(trial.number) is not int:
        raise ValueError(f"its number is {trial.number!r}")
    for key in (*trial.user_attrs, *trial.system_attrs, *trial.params):
        if type(key) is not str:
            raise ValueError(f"the name of an attribute is {key!r}")
