"""A service, two agents and their searches as processes, killed again and again."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import automesh
from automesh import limits
from automesh_service.submissions.store import ENDED
from benchmarks.kill_resume import DEVICES, SCRIPT, SPACE
from benchmarks.support.finished_trials import finished_trials
from plugins.service.tests.support.serve_process import START_S, AgentProcess, ServeProcess, until

SERVER_KILLS = 20
AGENT_KILLS = 2
SUBMISSIONS = 6
SEARCH_S = 1_800.0
"""For one search on a machine that does something else as well; alone it takes half a minute."""
STATE_S = 3.0
"""Between two states of an agent: a search may be over before the usual 20 s are."""
FILES = {"space.toml": SPACE.replace("[1, 2]", "[1, 2, 3]").encode()}
ORDER: dict[str, Any] = {
    "targets": [f"cpu:{DEVICES}"],
    "space": "space.toml",
    "budget": "10m",
    "top": 2,  # More plans race for longer, and who is killed at what is the same.
}


@dataclass(kw_only=True)
class Killed:
    """A service for agents alone, its two agents, and what was submitted to it.

    Attributes:
      numbers: of the submissions, by their idempotency keys.
    """

    served: ServeProcess
    agents: tuple[AgentProcess, AgentProcess]
    luck: random.Random
    numbers: dict[str, str] = field(default_factory=dict[str, str])

    def submit(self, key: str) -> str:
        """Submits a search, or repeats that: the answer must be the same."""
        files = {"train.py": f"# {key}\n{SCRIPT}".encode()} | FILES
        number = self.served.send(key, files, **ORDER)
        assert self.numbers.setdefault(key, number) == number
        return number

    def repeat_all(self) -> None:
        for key in self.numbers:
            self.submit(key)

    def state(self, number: str) -> str:
        return self.served.submission(number)["submission"]["state"]

    def taken_by(self, number: str) -> list[str]:
        """The names of the agents that have taken a submission, the first first."""
        said = [one["said"] for one in self.served.audit(number) if one["action"] == "run"]
        return [one.rpartition("/")[2] for one in said]

    def study(self, number: str) -> Path | None:
        """The copy of its study that the service has; None while there is none."""
        found = sorted((self.served.home / "jobs" / number / "results").glob("*/study.db"))
        assert len(found) <= 1, found
        return found[0] if found else None

    def trials(self, number: str) -> dict[Any, Any]:
        """Finished trials in the service's copy of its study, which agents replace all the time."""
        path = self.study(number)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "study.db"
            try:
                if path is None:
                    return {}
                shutil.copy(path, copy)
            except FileNotFoundError:
                return {}
            with closing(sqlite3.connect(copy)) as database:
                tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
            return finished_trials(copy) if "trials" in tables else {}

    def kill_server(self) -> None:
        self.served.kill()
        time.sleep(self.luck.uniform(0.0, 3.0))
        self.served.start()
        self.repeat_all()

    def said(self) -> str:
        """What everybody has said, for who reads of a failure."""
        is_there = self.served.ask("GET", "/v1/health", token="")[0] == 200
        history = [
            f"{key} {number}: {[(one['action'], one['said']) for one in entries]}"
            for key, number in self.numbers.items()
            if is_there and (entries := self.served.audit(number))
        ]
        texts = [self.served.said(), *(f"{one.name}:\n{one.said()}" for one in self.agents)]
        return "\n".join([*history, *texts])


@pytest.fixture
def killed(tmp_path: Path) -> Generator[Killed]:
    served = ServeProcess(folder=tmp_path, options=("--agents-only",))
    agents: list[AgentProcess] = []
    try:
        served.start()
        agents += [
            AgentProcess(served=served, name=name, state_s=STATE_S) for name in ("ann", "bob")
        ]
        yield Killed(served=served, agents=(agents[0], agents[1]), luck=random.Random(11))
    finally:
        for one in agents:
            one.end()
        served.end()


@pytest.mark.long
def test_every_submission_ends_once_whoever_is_killed(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, (ann, bob) = killed.served, killed.agents

    # An agent dies at work, for good. The other one, elsewhere, goes on with what was sent.
    first = killed.submit("submission-0")
    ann.start()
    until(lambda: killed.trials(first), START_S + SEARCH_S, killed.said, every_s=2.0)
    ann.kill()
    assert killed.state(first) not in ENDED, "ann was too fast to be killed at work"
    left = killed.trials(first)
    bob.start()
    # On a machine that hears nobody for a while each may be lost, and take it again.
    until(lambda: [*dict.fromkeys(killed.taken_by(first))] == ["ann", "bob"], START_S, killed.said)
    until(lambda: killed.state(first) == "found", SEARCH_S, killed.said)
    ended = killed.trials(first)
    assert {key: ended.get(key) for key in left} == left
    assert len(ended) > len(left)

    # Agents and the server die at random, and one agent is only not heard for a while.
    ann.start()
    for number in range(1, SUBMISSIONS):
        killed.submit(f"submission-{number}")
    blows = ["server"] * SERVER_KILLS + ["agent"] * AGENT_KILLS + ["silence"]
    killed.luck.shuffle(blows)
    for blow in blows:
        time.sleep(killed.luck.uniform(1.0, 12.0))
        agent = killed.luck.choice(killed.agents)
        match blow:
            case "server":
                killed.kill_server()
            case "agent":
                agent.kill()
                time.sleep(killed.luck.uniform(0.0, limits.LEASE_S))
                agent.start()
            case _:
                silence(agent)
    until(
        lambda: all(killed.state(one) in ENDED for one in killed.numbers.values()),
        SUBMISSIONS * SEARCH_S,
        killed.said,
    )

    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", served.token)
    for number in killed.numbers.values():
        check_ended_once(killed, number)
    assert served.ask("GET", "/v1/submissions")[1]["total"] == SUBMISSIONS
    for one in killed.agents:
        assert one.stop() == 0, one.said()
        assert one.left() == []
    assert served.stop() == 0, served.said()


def silence(agent: AgentProcess) -> None:
    """Stops an agent, not its search, until its lease has ended; then it comes back."""
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(limits.LEASE_S + 10.0)
    agent.process.send_signal(signal.SIGCONT)


def check_ended_once(killed: Killed, number: str) -> None:
    """A measured rule, one study, and an audit in which a run begins when the last one has ended,
    and only the last one ended with a result."""
    served = killed.served
    found = served.submission(number)
    assert found["submission"]["state"] == "found", killed.said()
    # The service reads a study again a few seconds after its last state has come.
    until(lambda: served.submission(number)["studies"], START_S, killed.said)
    (name,) = served.submission(number)["studies"]
    path = f"/v1/studies/{name}"
    until(lambda: served.got(path)["rule"], START_S, killed.said)
    (rule,) = automesh.load(f"{served.url}{path}/rules.toml").rules
    assert (rule.match, rule.evidence.kind) == (f"cpu-{DEVICES}", "measured")
    history = [one for one in served.audit(number) if one["action"] in ("run", "end")]
    actions = [one["action"] for one in history]
    runs = found["submission"]["runs"]
    assert actions == ["run", "end"] * runs, killed.said()
    said = [one["said"] for one in history if one["action"] == "end"]
    assert said[-1].startswith("found, says "), killed.said()
    assert all("queued" in one for one in said[:-1]), killed.said()
    plans = [(rung, record.key[0]) for (rung, _), record in killed.trials(number).items()]
    assert len(plans) == len(set(plans)), "a plan was finished twice"
