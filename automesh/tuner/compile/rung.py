"""The compile rung: compiles plans, together with all searches on the same storage."""

from __future__ import annotations

import importlib.util
import mmap
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import Plan
from automesh.outcomes import (
    Compiled,
    Failed,
    Failure,
    Outcome,
    OutOfMemory,
)
from automesh.program.nouns import CompileAnswer, Lowered
from automesh.tuner.compile.jobs import Compiling
from automesh.tuner.compile.lengths import expected_s
from automesh.tuner.context import SearchContext
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import Trial
from automesh.tuner.worker_errors import refuse_to_blame
from automesh.units import format_seconds
from automesh.worker.pool import Pool
from automesh.worker.protocol import Answer

# Errors for the user about compiler options that a compiler does not accept.

# Messages of `automesh.program.lower.compiled` about compiler options.
_UNKNOWN = re.compile(r"this compiler has no option `([^`]+)`")
_WRONG = re.compile(r"the compiler option `([^`]+)` is wrong: ")
# Compilers do not list their options, but their binaries contain the names.
_BINARIES = {
    "libtpu": "libtpu.so",
    "jaxlib": "libjax_common.so",
    "jax_plugins.xla_cuda12": "xla_cuda_plugin.so",
    "jax_plugins.xla_cuda13": "xla_cuda_plugin.so",
}
_NAME = re.compile(rb"xla_[a-z0-9_]{3,100}")


def refuse_options(result: object) -> None:
    """Raises an error if a compile failed because the compiler refuses an option.

    All plans with that option would fail in the same way.

    Raises:
      UsageError: the compiler does not know the option or does not accept its value.
    """
    if not isinstance(result, Failed) or result.stage != "compile":
        return
    hint = "correct it on the command line (--xla) or in the search space ([compiler_options])"
    if match := _UNKNOWN.search(result.reason):
        meant = did_you_mean(match[1], known_names())
        raise UsageError(f"the compiler has no option `{match[1]}`{meant}", hint=hint)
    if _WRONG.search(result.reason):
        raise UsageError(result.reason, hint=hint)


@cache
def known_names() -> frozenset[str]:
    """Returns possible names of options, found in the binaries of the installed compilers."""
    found: set[bytes] = set()
    for path in _installed():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found.update(match[0] for match in _NAME.finditer(data))
    return frozenset(name.decode("ascii") for name in found)


def _installed() -> Iterator[Path]:
    for module, binary in _BINARIES.items():
        parent = module.partition(".")[0]
        if importlib.util.find_spec(parent) is None:
            continue
        # Found without importing: a package is a folder, and a plugin's folder is inside its
        # parent's.
        spec = importlib.util.find_spec(parent)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder, *module.split(".")[1:], binary)
            if path.is_file():
                yield path


POLL_S = 0.5
LAST_PER_WORKER = 4
"""Number of remaining plans per worker from which on the longest compiles begin first; by then the
promising plans have been compiled."""
_MARGIN = 2.0  # Lengths are guesses, and a worker must trace and lower first.
_RETRIES_ELSEWHERE = 4
GRACE_S = 20.0


@dataclass(slots=True)
class CompileRung:
    """Runs the compile rung of one search, at default or at low effort.

    Attributes:
      rung: holds its trials.
      name: name of the phase for the display.
      compiling: makes the jobs for the devices, and outcomes from the answers.
      choose: chooses the plans to compile, given the outcomes so far.
      order: sorts the remaining plans, best first, given the outcomes so far. If there is time for
        all of the last ones, the longest of them begin first instead.
      deadline_s: no compile starts after it, except the first one.
      grace_s: how long a running compile may continue after the deadline; then it is left for the
        next run.
      on_first: gets the seconds that the first compile took, and how many of the chosen plans are
        left after it.
      is_first: whether this run has compiled nothing before. Then it waits for its first compile,
        since a compile longer than the whole budget would otherwise never finish; it also waits for
        running compiles of the baseline and of a second plan.
    """

    search: SearchContext
    pool: Pool
    rung: Rung
    compiling: Compiling
    choose: Callable[[Mapping[Plan, Outcome]], Sequence[Plan]]
    order: Callable[[Sequence[Plan], Mapping[Plan, Outcome]], Sequence[Plan]]
    deadline_s: float
    name: Literal["screen", "compile"] = "compile"
    grace_s: float = GRACE_S
    is_first: bool = True
    on_first: Callable[[float, int], None] | None = None
    _plans: Sequence[Plan] = field(init=False, default=())
    _chosen_from: tuple[int, int] = field(init=False, default=(-1, -1))
    _done: dict[Plan, Outcome] = field(init=False, default_factory=dict)
    _known: dict[str, tuple[str, Outcome]] = field(init=False, default_factory=dict)
    _running: dict[int, tuple[Trial, float]] = field(init=False, default_factory=dict)
    _programs: dict[str, int] = field(init=False, default_factory=dict)
    _waiting: dict[str, list[Trial]] = field(init=False, default_factory=dict)
    _read: list[Trial] = field(init=False, default_factory=list)
    _first: Callable[[Plan], float] | None = field(init=False, default=None)
    _retries: list[Trial] = field(init=False, default_factory=list)
    _retried: Counter[int] = field(init=False, default_factory=Counter[int])
    _started: int = field(init=False, default=0)
    _took_s: float = field(init=False, default=0.0)
    _recorded: int = field(init=False, default=0)
    _began_s: float = field(init=False, default=0.0)
    _first_s: float = field(init=False, default=0.0)

    def run(self) -> Mapping[Plan, Outcome]:
        """Compiles until all plans are done or the deadline has passed.

        Returns:
          The outcome of every finished plan that matches the script as it is now.
        """
        self._began_s = self.search.clock()
        while True:
            self._reload()
            if all(plan in self._done for plan in self._plans):
                break
            late_s = self.search.clock() - self.deadline_s
            impatient = late_s > self.grace_s and not (self.is_first and self._must_wait())
            if late_s > 0 and self._started and (not self._running or impatient):
                break
            if late_s > self.grace_s and not self._running:
                break  # Other searches on this storage compile the rest.
            if late_s <= 0 or not self._started:
                self._lead()
                self._start()
            self.search.study.heartbeat()
            if not self._running:
                time.sleep(POLL_S)  # others on this storage compile what is left
            for finished in self.pool.wait(POLL_S):
                self._record(finished.ticket, finished.result, doubtful=finished.doubtful)
            self.search.progress.tick()
        # Unfinished trials are given back for the next run, since this pool is about to close.
        self.rung.give_all_back()
        return {plan: self._done[plan] for plan in self._plans if plan in self._done}

    def _must_wait(self) -> bool:
        """Whether nothing is compiled yet, or the baseline is being compiled, which all speedups
        refer to, or the second plan, without which there is nothing to choose from.

        The second one is waited for as long again as the first one took.
        """
        if not self._recorded:
            return True
        is_soon = self.search.clock() - self._first_s <= self._first_s - self._began_s
        if len(self._done) < 2 and is_soon:
            return True
        running = (trial.plan for trial, _ in self._running.values())
        return any(plan in self.search.legal.baseline for plan in running)

    def _reload(self) -> None:
        """Loads the outcomes of other searches on this storage and of earlier runs."""
        self._read = self.rung.trials()
        for trial in self._read:
            if trial.outcome is None:
                continue
            if self.search.notebook.is_current(trial):
                self._done[trial.plan] = trial.outcome
            if trial.versions == self.search.preparation.provenance and trial.fingerprint:
                self._remember(trial.fingerprint, str(trial.plan), trial.outcome)
        stored = sum(trial.outcome is not None for trial in self._read)
        finished = stored, len(self._done)
        if finished != self._chosen_from:  # Choosing among many plans is slow.
            self._chosen_from = finished
            self._plans = self.choose(self._done)
        self._show()

    def _remember(self, fingerprint: str, plan: str, outcome: Outcome) -> None:
        if fingerprint in self._known:
            return  # Avoids one store lookup per trial on every poll.
        # A program that does not fit the device never will. If its worker was killed, even for the
        # host's memory, a retry may succeed.
        too_large = isinstance(
            outcome, OutOfMemory
        ) and self.search.preparation.device_memory.is_device(outcome)
        kept = isinstance(outcome, Compiled) and self.compiling.keeps(outcome)
        if kept or too_large:
            self._known[fingerprint] = (plan, outcome)

    def _lead(self) -> None:
        """Adds trials if this search holds the lease: a few more than the workers can take."""
        mine = [trial for trial in self._read if self.search.notebook.is_current(trial)]
        open_plans = {trial.plan for trial in mine if trial.is_open}
        wanted = [p for p in self._plans if p not in self._done and p not in open_plans]
        waiting = [trial.plan for trial in mine if trial.state == "waiting"]
        free = 2 * self.search.workers - len(waiting)
        self._first = self._longest_first([*waiting, *wanted])
        if not self.search.study.lead():
            return
        self.rung.adopt_expired()
        if wanted and free > 0:
            best = self.order(wanted, self._done)
            chosen = best if self._first is None else sorted(best, key=self._first)
            self.rung.enqueue(chosen[:free], self.search.estimates.found)

    def _start(self) -> None:
        while self._retries and len(self._running) < self.search.workers:
            self._submit(self._retries.pop())
        while len(self._running) < self.search.workers:
            trial = self.rung.claim(self._first)
            if trial is None:
                return
            self._submit(trial)

    def _longest_first(self, left: Sequence[Plan]) -> Callable[[Plan], float] | None:
        """Returns a sort key by which the longest compiles begin first; None to begin with the most
        promising, as long as many are left or the time may not suffice for all.

        Args:
          left: plans whose compile has not begun.
        """
        workers = self.search.workers
        if workers < 2 or not 2 <= len(left) <= LAST_PER_WORKER * workers:
            return None
        known_s = {
            plan: outcome.compile_s
            for plan, outcome in self._done.items()
            if isinstance(outcome, Compiled) and outcome.compile_s > 0
        }
        expected = expected_s(left, known_s, self.search.estimates.found)
        if not expected:
            return None
        needed_s = sum(expected.values()) / workers + max(expected.values())
        if self.search.clock() + _MARGIN * needed_s > self.deadline_s:
            return None
        return lambda plan: -expected.get(plan, 0.0)

    def _submit(self, trial: Trial) -> None:
        ticket = self.pool.submit(
            self.compiling.job(trial.plan),
            self.search.preparation.timeout_s,
            on_event=lambda event: self._on_event(trial, event),
            # A retry needs a new process: earlier plans may have damaged the worker.
            fresh=trial.storage_id in self._retried,
            patient=True,
        )
        self._running[ticket] = (trial, self.search.clock())
        self._started += 1
        self.search.progress.now(f"{trial.plan}, compiling")

    def _on_event(self, trial: Trial, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answers a worker that has lowered a plan: whether to compile the program."""
        fingerprint = str(event.get("fingerprint", ""))
        if not fingerprint:
            return None
        if fingerprint in self._known or fingerprint in self._programs:
            return {"go": False}
        self._programs[fingerprint] = trial.storage_id
        return {"go": True}

    def _record(self, ticket: int, result: Answer | Failure, *, doubtful: bool) -> None:
        trial, began_s = self._running.pop(ticket)
        if doubtful and self._retried[trial.storage_id] < self._most_retries:
            self._retry(trial)
            return
        refuse_to_blame(result)
        refuse_options(result)
        self._took_s = self.search.clock() - began_s
        if not self._recorded:
            self._first_s = self.search.clock()
        self._recorded += 1
        if isinstance(result, Lowered):
            if result.fingerprint in self._known:
                self._take_over(trial, result.fingerprint)
            elif result.fingerprint not in self._programs:
                # Its compile failed for a reason that a retry may not meet.
                self._retries.append(trial)
            else:
                self._waiting.setdefault(result.fingerprint, []).append(trial)
            return
        if isinstance(result, CompileAnswer):
            fingerprint, outcome = result.fingerprint, self.compiling.outcome(trial.plan, result)
        elif isinstance(result, Failure):
            fingerprint, outcome = self._compiling(trial), result
        else:
            raise TypeError(f"a compile job was answered with {type(result).__name__}")
        self._programs.pop(fingerprint, None)
        self._finish(trial, outcome, fingerprint)
        if self.on_first is not None and isinstance(outcome, Compiled):
            self.on_first(self._took_s, sum(plan not in self._done for plan in self._plans))
            self.on_first = None
        if fingerprint:
            self._remember(fingerprint, str(trial.plan), outcome)
            self._release_waiting(fingerprint)

    @property
    def _most_retries(self) -> int:
        # A lost host ends all its compiles, so a plan that was lost several times is probably not
        # the cause.
        return 1 if self.search.lender is None else _RETRIES_ELSEWHERE

    def _retry(self, trial: Trial) -> None:
        """Compiles a plan again: earlier plans may have damaged its worker, or somebody killed
        it."""
        self._retried[trial.storage_id] += 1
        fingerprint = self._compiling(trial)
        self._programs.pop(fingerprint, None)
        # Trials that waited for this program are queued as well: the retry may not lower it again.
        self._retries += [trial, *self._waiting.pop(fingerprint, [])]

    def _compiling(self, trial: Trial) -> str:
        """Returns the fingerprint of the program that the trial's worker compiles; empty if
        none."""
        owned = [key for key, owner in self._programs.items() if owner == trial.storage_id]
        return owned[0] if owned else ""

    def _release_waiting(self, fingerprint: str) -> None:
        for trial in self._waiting.pop(fingerprint, []):
            if fingerprint in self._known:
                self._take_over(trial, fingerprint)
            else:
                self._retries.append(trial)

    def _take_over(self, trial: Trial, fingerprint: str) -> None:
        plan, outcome = self._known[fingerprint]
        if isinstance(outcome, Compiled):
            # An outcome for an older script may be the plan's own, which is no duplicate.
            original = outcome.same_as or plan
            same_as = "" if original == str(trial.plan) else original
            known = replace(outcome, compile_s=0.0, same_as=same_as)
            outcome = self.compiling.again(trial.plan, known)
        self._finish(trial, outcome, fingerprint)

    def _finish(self, trial: Trial, outcome: Outcome, fingerprint: str) -> None:
        self.rung.finish(trial, outcome, fingerprint=fingerprint)
        self._done[trial.plan] = outcome

    def _show(self) -> None:
        # Judged with the reserve, as in the final table.
        judged = {
            p: self.search.preparation.device_memory.judged(outcome)
            for p, outcome in self._done.items()
        }
        outcomes = [judged[plan] for plan in self._plans if plan in judged]
        failed = sum(1 for outcome in outcomes if not isinstance(outcome, Compiled))
        self.search.progress.phase(
            self.name,
            total=len(self._plans),
            done=len(outcomes),
            note=f"{failed} failed" if failed else "",
            took_s=self._took_s,
            lanes=self.search.workers,
        )
        self._took_s = 0.0
        if self.name == "screen":
            return  # A compile at low effort predicts no step time.
        best = min(
            (
                (outcome.step_s, plan)
                for plan, outcome in judged.items()
                if isinstance(outcome, Compiled)
            ),
            key=lambda pair: (pair[0], str(pair[1])),
            default=None,
        )
        if best is not None:
            self.search.progress.best(f"{best[1]}, {format_seconds(best[0])} predicted")
