"""One rung of a study: plans queued, claimed, measured in rounds and finished."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from automesh.errors import AutomeshError, UsageError
from automesh.jsonio import from_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated, Outcome
from automesh.skipped import name_of_note
from automesh.tuner.study.backend import Backend
from automesh.tuner.study.lease import Owner, StudyLease, release, take
from automesh.tuner.study.optuna_records import (
    Choices,
    extended,
    final_state,
    is_ours,
    new_trial,
    outcome_attributes,
    owner_attributes,
    read_outcome,
    read_trial,
    round_attribute,
)
from automesh.tuner.study.scope import EVERYTHING, Scope
from automesh.tuner.study.trials import Round, RungName, Trial

SCHEMA = 1
Finish = Literal["stored", "already_finished", "lost"]
Versions = tuple[tuple[str, str], ...]


class Rung:
    """The trials of one kind, in one Optuna study.

    The process that has the hold of a trial runs it: a claim takes the hold before it touches the
    trial, so two processes never run the same one, and a running trial always has an owner. Optuna
    alone does not guarantee that: on SQLite it changes a trial's state by a read and a later write.
    Everything raises `UsageError` if the storage fails.
    """

    def __init__(
        self,
        backend: Backend,
        search: str,
        name: RungName,
        *,
        owner: Owner,
        lease: StudyLease,
        source_hash: str,
        versions: Versions,
        scope: Scope = EVERYTHING,
        is_new: bool = True,
    ) -> None:
        self.name: RungName = name
        self._backend = backend
        self._storage = backend.optuna
        self._owner = owner
        self._lease = lease
        self.source_hash = source_hash
        self._versions = versions
        self._scope = scope
        self._prefix = f"{search}/{name}/"
        self._queue: deque[FrozenTrial] = deque()
        self._claimed: dict[int, Trial] = {}
        self._read: dict[int, Trial] = {}
        self.optuna_study = _opened(backend, f"{search}/{name}", is_new=is_new)
        self._study_id = self._storage.get_study_id_from_name(f"{search}/{name}")
        self._is_frozen = False
        self._frozen: list[Trial] | None = None
        self._check_schema()

    def trials(self) -> list[Trial]:
        """Returns all trials, stale ones too, in the order of their numbers; without damaged
        ones."""
        if self._frozen is not None:
            return list(self._frozen)
        with self._backend.explained():
            frozen = self.optuna_study.get_trials(deepcopy=False)
            found = [trial for trial in map(self._readable, frozen) if trial is not None]
        if self._is_frozen:
            self._frozen = list(found)
        return found

    def freeze(self) -> None:
        """Reads trials once from now on; see `Study.freeze`."""
        self._is_frozen, self._frozen = True, None

    def enqueue(
        self,
        plans: Iterable[Plan],
        estimates: Mapping[Plan, Estimated] | None = None,
        *,
        run: str = "",
    ) -> list[Trial]:
        """Adds a waiting trial for every plan that has none for this script and these versions yet.

        A trial that failed for lack of time or memory does not count if there is enough of it now:
        the plan is tried again.

        Args:
          estimates: to be kept with the trials of their plans.
          run: which of several runs, see `Trial`.

        Returns:
          The new trials; fewer or none if this process does not have the lease.
        """
        known = {trial.plan for trial in self.trials() if trial.run == run and self._matches(trial)}
        new = [plan for plan in dict.fromkeys(plans) if plan not in known]
        added: list[Trial] = []
        with self._backend.explained():
            choices = self._grown_choices(new) if new and self._lease.renew() else {}
            for plan in new:
                # Asked for each plan: who was paused here must not go on beside its successor.
                if not self._lease.renew():
                    break
                template = new_trial(
                    plan,
                    choices,
                    source_hash=self.source_hash,
                    versions=self._versions,
                    estimated=(estimates or {}).get(plan),
                    run=run,
                )
                storage_id = self._storage.create_new_trial(self._study_id, template)
                added.append(self._trial(self._storage.get_trial(storage_id)))
        return added

    def claim(self, first: Callable[[Plan], float] | None = None) -> Trial | None:
        """Takes the first waiting trial for this script, these versions and a plan in scope.

        It is this process's until `finish`, `give_back`, or `LEASE_S` without `Study.heartbeat`.

        Args:
          first: a figure by which they are taken, the least first; None: in order of their numbers.
        """
        with self._backend.explained():
            if first is not None:
                self._refill(first)
            for _ in range(2):
                while self._queue:
                    trial = self._claim(self._queue.popleft())
                    if trial is not None:
                        return trial
                self._refill()
            return None

    def begin(self, plan: Plan, *, run: str = "") -> Trial | None:
        """Claims the trial of `plan`: a waiting or abandoned one with its rounds, or a new one.

        Args:
          run: which of several runs, see `Trial`.

        Returns:
          None if the plan's trial is finished, another process runs it, or this one lost the lease.
        """
        mine = [trial for trial in self.trials() if trial.plan == plan and trial.run == run]
        mine = [one for one in mine if self._matches(one)]
        if not mine:
            mine = self.enqueue([plan], run=run)
        elif mine[0].state == "running":
            mine = [one for one in self.adopt_expired() if one.number == mine[0].number]
        with self._backend.explained():
            return self._claim(self._storage.get_trial(mine[0].storage_id)) if mine else None

    def adopt_expired(self) -> list[Trial]:
        """Puts running trials whose process is gone back into the queue, their rounds kept.

        One whose outcome was stored, and only its state was not, is finished instead.

        Returns:
          The trials that wait again.
        """
        with self._backend.explained():
            running = self._storage.get_all_trials(
                self._study_id, deepcopy=False, states=(TrialState.RUNNING,)
            )
            waiting = [self._requeue(one) for one in running if self._readable(one) is not None]
        return [one for one in waiting if one is not None]

    def report(self, trial: Trial, number: int, samples_s: Sequence[float]) -> bool:
        """Stores one round of a race; its median becomes Optuna's intermediate value.

        Returns:
          False, and stores nothing, if the trial is not this process's any more.
        """
        with self._backend.explained():
            if not self._is_mine(trial):
                return False
            measured = Round(number=number, samples_s=tuple(samples_s), machine=self._owner.machine)
            try:
                self._storage.set_trial_user_attr(trial.storage_id, *round_attribute(measured))
                self._storage.set_trial_intermediate_value(
                    trial.storage_id, number, statistics.median(samples_s)
                )
            except UpdateFinishedTrialError:
                return False
            return True

    def finish(self, trial: Trial, outcome: Outcome, *, fingerprint: str = "") -> Finish:
        """Stores the outcome of a claimed trial; after that nothing can change it.

        Compiled and measured plans complete with their step time as value, raced-out ones are
        pruned, all others fail.

        Returns:
          `stored`. Or, with nothing stored, `already_finished` or `lost`: this process was silent
          for so long that another took the trial over, and has or has not finished it.

        Raises:
          ValueError: the outcome's step time is not a positive number.
        """
        state, value = final_state(outcome)
        with self._backend.explained():
            self._claimed.pop(trial.storage_id, None)
            if not self._is_mine(trial):
                finished = self._storage.get_trial(trial.storage_id).state.is_finished()
                return "already_finished" if finished else "lost"
            attributes = outcome_attributes(outcome)
            if fingerprint:
                attributes = {"fingerprint": fingerprint} | attributes
            try:
                self._store(trial.storage_id, attributes, state, value)
            except UpdateFinishedTrialError:
                return "already_finished"
            finally:
                release(self._backend.leases, self._key(trial.number), self._owner)
            return "stored"

    def give_back(self, trial: Trial) -> None:
        """Puts a claimed trial back into the queue."""
        with self._backend.explained():
            self._claimed.pop(trial.storage_id, None)
            if self._is_mine(trial):
                self._storage.set_trial_state_values(trial.storage_id, TrialState.WAITING)
                release(self._backend.leases, self._key(trial.number), self._owner)

    def give_all_back(self) -> None:
        """Puts everything that this process claimed and did not finish back into the queue."""
        for trial in list(self._claimed.values()):
            self.give_back(trial)

    def _claim(self, frozen: FrozenTrial) -> Trial | None:
        key, leases = self._key(frozen.number), self._backend.leases
        if not take(leases, key, self._owner):
            return None
        storage_id = _id(frozen)
        # Read again under the hold: whoever had it before may have finished the trial.
        frozen = self._storage.get_trial(storage_id)
        read = self._readable(frozen)
        if read is None or frozen.state != TrialState.WAITING:
            if storage_id not in self._claimed:
                release(leases, key, self._owner)
            return None
        attributes = owner_attributes(frozen, self._owner)
        self._store(storage_id, attributes, TrialState.RUNNING, None)
        trial = replace(
            read,
            state="running",
            owner=self._owner,
            attempts=attributes["attempts"],
        )
        self._claimed[storage_id] = trial
        return trial

    def _requeue(self, frozen: FrozenTrial) -> Trial | None:
        key, leases = self._key(frozen.number), self._backend.leases
        row = leases.get(key)
        if row is not None and (
            row.owner == self._owner or not leases.seen.expired(row, leases.now())
        ):
            return None
        if not leases.swap(key, row, self._owner):
            return None
        storage_id = _id(frozen)
        frozen = self._storage.get_trial(storage_id)
        stored = frozen.user_attrs.get("outcome")
        try:
            outcome = None if stored is None else read_outcome(stored)
        except AutomeshError as error:
            # It is run again: what it came to is overwritten then.
            self._backend.skipped.note(f"the outcome of {self._name_of(frozen)}", error)
            outcome = None
        if frozen.state == TrialState.RUNNING and outcome is not None:
            self._store(storage_id, {}, *final_state(outcome))
        elif frozen.state == TrialState.RUNNING:
            self._storage.set_trial_state_values(storage_id, TrialState.WAITING)
        release(leases, key, self._owner)
        trial = self._readable(self._storage.get_trial(storage_id))
        return trial if trial is not None and trial.is_waiting else None

    def _store(
        self,
        storage_id: int,
        attributes: dict[str, Any],
        state: TrialState,
        value: list[float] | None,
    ) -> None:
        # The state last: until it is stored the trial is still open.
        for name, attribute in attributes.items():
            self._storage.set_trial_user_attr(storage_id, name, attribute)
        self._storage.set_trial_state_values(storage_id, state, value)

    def _refill(self, first: Callable[[Plan], float] | None = None) -> None:
        waiting = self._storage.get_all_trials(
            self._study_id, deepcopy=False, states=(TrialState.WAITING,)
        )
        leases, seen = self._backend.leases, self._backend.leases.seen
        held, now_s = leases.under(self._prefix), leases.now()
        taken = {key for key, row in held.items() if not seen.expired(row, now_s)}
        found = [
            (one, trial)
            for one in waiting
            if (trial := self._readable(one)) is not None
            and self._matches(trial)
            and self._scope.covers(trial.plan)
            and self._key(one.number) not in taken
        ]
        if first is not None:
            found.sort(key=lambda pair: first(pair[1].plan))
        self._queue = deque(one for one, _ in found)

    def _grown_choices(self, plans: Sequence[Plan]) -> Choices:
        known = self._known_choices()
        grown = extended(known, plans)
        if grown != known:
            self.optuna_study.set_user_attr("choices", grown)
        return grown

    def _known_choices(self) -> Choices:
        stored = self.optuna_study.user_attrs.get("choices", {})
        try:
            return from_json(stored, Choices)
        except AutomeshError as error:
            # Nobody reads a trial's plan from them: they are for Optuna's own tools.
            self._backend.skipped.note(name_of_note("choices"), error)
            return {}

    def _check_schema(self) -> None:
        schema = self.optuna_study.user_attrs.get("automesh_schema")
        if schema is None and self._backend.copy is None:
            self.optuna_study.set_user_attr("automesh_schema", SCHEMA)
        elif schema is None:
            return  # A copy: nothing is written, and who has made the study had not come this far.
        elif type(schema) is not int:
            raise UsageError(
                f"the study in {self._backend.storage.text} is damaged: its schema is {schema!r}",
                hint="start another study with --new",
            )
        elif schema > SCHEMA:
            raise UsageError(
                f"the study in {self._backend.storage.text} was made by a newer automesh",
                hint="install that version, or start another study with --new",
            )

    def _readable(self, frozen: FrozenTrial) -> Trial | None:
        """Reads a trial; None if it is not ours, or damaged: then its plan is tried again."""
        if not is_ours(frozen):
            return None
        try:
            return self._trial(frozen)
        except AutomeshError as error:
            self._backend.skipped.note(self._name_of(frozen), error)
            return None

    def _name_of(self, frozen: FrozenTrial) -> str:
        return f"trial {frozen.number} of `{self.name}`"

    def _trial(self, frozen: FrozenTrial) -> Trial:
        known = self._read.get(_id(frozen))
        if known is None:
            known = read_trial(self.name, frozen)
            if frozen.state.is_finished():  # and so never changes again
                self._read[_id(frozen)] = known
        return known

    def _matches(self, trial: Trial) -> bool:
        """Whether a trial counts for the script, the versions and the limits as they are now."""
        mine = trial.matches(self.source_hash, self._versions)
        return mine and not self._scope.overcomes(trial.outcome)

    def _is_mine(self, trial: Trial) -> bool:
        row = self._backend.leases.get(self._key(trial.number))
        return row is not None and row.owner == self._owner

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"


def _opened(backend: Backend, name: str, *, is_new: bool) -> optuna.Study:
    """Opens one of Optuna's studies, and makes it if there is none.

    Args:
      is_new: it may have to be made: then Optuna tries that first, which takes the lock of a file.
    """
    if not is_new:
        with contextlib.suppress(KeyError):
            return optuna.load_study(study_name=name, storage=backend.optuna)
    return optuna.create_study(
        storage=backend.optuna, study_name=name, direction="minimize", load_if_exists=True
    )


def _id(frozen: FrozenTrial) -> int:
    return frozen._trial_id  # pyright: ignore[reportPrivateUsage]  # Optuna's storages have no other key
