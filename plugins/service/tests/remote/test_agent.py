"""An agent against the real server; what stands for a search is a script of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from automesh.errors import UsageError
from automesh_service.remote import agent as agent_module
from automesh_service.remote.agent import Agent, AgentOptions, serve_agent
from automesh_service.remote.answers import Answer
from automesh_service.remote.client import Server, open_server
from automesh_service.remote.patience import Unreachable
from automesh_service.remote.tied import tied
from automesh_service.submissions.database import LEASES
from automesh_service.submissions.home import open_home
from automesh_service.submissions.order import Order
from plugins.service.tests.serve.test_submissions import submit as submit_over_http
from plugins.service.tests.support.service import SCRIPT, Running, running_service, tar_of
from tests.support.cases import bad_inputs_run

SEARCH = """
import os, pathlib, signal, sqlite3, sys, time
job, how = pathlib.Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
assert "AUTOMESH_SERVER_TOKEN" not in os.environ
study = job / "results" / f"train-cpu-2-{job.name[:8]}"
study.mkdir(parents=True, exist_ok=True)
with sqlite3.connect(study / "study.db") as made:
    made.execute("PRAGMA journal_mode=WAL")
    made.execute("CREATE TABLE IF NOT EXISTS studies (study_id INTEGER)")
    made.execute("INSERT INTO studies VALUES (1)")
    made.commit()
    trials = made.execute("SELECT count(*) FROM studies").fetchone()[0]
    print(f"trials: {trials}", file=sys.stderr, flush=True)
    while how == "wait" and not (job / "go").exists():
        time.sleep(0.02)
if how == "refuse":
    sys.exit("error: there is no `build`")
(job / "mesh_rules.toml").write_text("schema = 1\\n")
print('{"best": 1}')
"""


@dataclass(kw_only=True)
class At:
    """A service, and agents that work for it in threads."""

    running: Running
    folder: Path
    said: list[str]

    def agent(self, name: str = "a", folder: str = "agent") -> Agent:
        server, _ = open_server(self.running.url)
        options = AgentOptions(name=name, takes=("*",), has=("gpu",), folder=self.folder / folder)
        home = open_home(options.folder)
        return Agent(server=server, home=home, options=options, say=self.said.append)

    def submit(self, *args: str, **changes: object) -> str:
        digest = self.running.send_bundle(tar_of({"train.py": SCRIPT}))
        reply = submit_over_http(self.running, digest, args=list(args), **changes)
        return reply.json()["number"]

    def state(self, number: str) -> str:
        return self.running.service.store.get(number, None).state

    def log(self, number: str) -> str:
        path = self.running.service.home.job(number) / "search.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[At]:
    def words(order: Order, job: Path) -> list[str]:
        return [sys.executable, "-c", SEARCH, str(job), *(order.args or ("found",)), "--json"]

    monkeypatch.setattr(agent_module, "words_of", words)
    for name in ("POLL_S", "TICK_S", "STATE_S", "BEAT_S"):
        monkeypatch.setattr(agent_module, name, 0.05)
    with running_service(tmp_path) as running:
        token = running.service.tokens.make("host-7", "agent", None)
        monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", token)
        yield At(running=running, folder=tmp_path, said=[])


@pytest.fixture
def started(at: At) -> Iterator[Callable[[Agent], threading.Thread]]:
    """Starts agents, and ends them after the test."""
    agents: list[tuple[Agent, threading.Thread]] = []

    def start(agent: Agent) -> threading.Thread:
        thread = threading.Thread(target=agent.serve)
        thread.start()
        agents.append((agent, thread))
        return thread

    yield start
    for agent, thread in agents:
        agent.is_stopping = True
        thread.join(60)
        assert not thread.is_alive()


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_search_with_its_log_study_and_rule(
    at: At, started: Callable[[Agent], threading.Thread]
) -> None:
    number = at.submit("wait", needs=["gpu"])
    agent = at.agent()
    started(agent)
    job = at.running.service.home.job(number)
    study = job / "results" / f"train-cpu-2-{number[:8]}"
    # While it runs, others see what it says and what it has.
    until(lambda: "trials: 1\n" in at.log(number) and (study / "study.db").exists())
    assert at.state(number) == "running"
    assert not (job / "bundle").exists()  # Nothing of it is unpacked where the service is.
    (agent.home.job(number) / "go").touch()
    until(lambda: at.state(number) == "found")
    rules = at.running.ask("GET", f"/v1/submissions/{number}/rules.toml", token="submit")
    assert rules.body == b"schema = 1\n"
    until(lambda: not agent.home.job(number).exists())
    refused = at.submit("refuse")
    until(lambda: at.state(refused) == "nothing")  # Exit code 1 with a sentence.
    assert at.running.service.store.get(refused, None).said == "there is no `build`"


def test_a_cancel_reaches_it_and_a_stopped_agent_gives_back(
    at: At, started: Callable[[Agent], threading.Thread]
) -> None:
    number = at.submit("wait")
    agent = at.agent()
    thread = started(agent)
    until(lambda: "trials: 1\n" in at.log(number))
    at.running.service.store.cancel(number, None)
    until(lambda: at.state(number) == "cancelled")
    at.running.service.store.resume(number, None)
    # It goes on with its own study: what it had found counts.
    until(lambda: "trials: 2\n" in at.log(number))
    agent.is_stopping = True
    thread.join(60)
    assert at.state(number) == "queued"
    other = at.agent(name="b")
    started(other)
    until(lambda: "trials: 3\n" in at.log(number))
    (other.home.job(number) / "go").touch()
    until(lambda: at.state(number) == "found")
    assert at.log(number) == "trials: 1\ntrials: 2\ntrials: 3\n"


def test_an_agent_that_was_lost_ends_its_search_and_another_goes_on(
    at: At, started: Callable[[Agent], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = at.submit("wait")
    first = at.agent()
    started(first)
    job = at.running.service.home.job(number)
    until(lambda: (job / "results").exists())
    found = agent_module.find_search(first.home.job(number))
    assert found is not None
    # Nobody hears it; it hears of it at its next beat, and takes other work.
    service = at.running.service
    with service.database.read() as connection:
        lease = connection.execute(sa.select(LEASES.c.lease)).scalar_one()
    service.store.cut(number, is_meant=False, lease=lease)
    until(lambda: f"submission {number} is somebody else's now" in at.said)
    until(lambda: at.running.service.store.get(number, None).runs == 2)
    until(lambda: "trials: 2\n" in at.log(number))
    (first.home.job(number) / "go").touch()
    until(lambda: at.state(number) == "found")


@pytest.mark.slow
def test_the_state_of_another_machine_is_gone_on_with_in_whatever_folder(
    at: At, started: Callable[[Agent], threading.Thread]
) -> None:
    number = at.submit("wait")
    agent = at.agent()
    thread = started(agent)
    until(lambda: (at.running.service.home.job(number) / "results").exists())
    agent.is_stopping = True
    thread.join(60)
    other = at.agent(name="b", folder="elsewhere")
    started(other)
    until(lambda: "trials: 2\n" in at.log(number))
    (other.home.job(number) / "go").touch()
    until(lambda: at.state(number) == "found")


@pytest.mark.slow
def test_an_answer_that_gets_lost_costs_nothing(
    at: At, started: Callable[[Agent], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = at.submit("found")
    lost: list[str] = []
    ask = Server.ask

    def losing(self: Server, method: str, path: str, *args: Any, **settings: Any) -> Answer:
        answer = ask(self, method, path, *args, **settings)
        kind = path.partition("?")[0].rpartition("/")[2]
        if kind in ("leases", "bundle", "state", "end") and kind not in lost:
            if answer.status == 204 and kind == "leases":
                return answer
            lost.append(kind)
            raise Unreachable("the connection broke")
        return answer

    monkeypatch.setattr(Server, "ask", losing)
    started(at.agent())
    until(lambda: at.state(number) == "found")
    until(lambda: sorted(lost) == ["bundle", "end", "leases", "state"])
    assert at.running.service.store.get(number, None).runs == 1
    until(lambda: f"submission {number}: its lease has ended" in at.said)


def test_what_cannot_be_started_is_told(
    at: At, started: Callable[[Agent], threading.Thread]
) -> None:
    number = at.submit()
    digest = at.running.service.store.get(number, None).digest
    at.running.service.home.bundle(digest).write_bytes(b"something else")
    started(at.agent())
    until(lambda: at.state(number) == "failed")
    assert "another bundle" in at.running.service.store.get(number, None).said


def test_who_may_not_be_an_agent_is_told_at_once(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", at.running.tokens["submit"])
    server, _ = open_server(at.running.url)
    options = AgentOptions(name="", takes=("*",), has=(), folder=at.folder / "agent")
    with pytest.raises(UsageError, match="may submit"):
        serve_agent(server, options, at.said.append)
    home = open_home(options.folder)
    with home.lock("agent"), pytest.raises(UsageError, match="another agent"):
        serve_agent(server, options, at.said.append)
    refused = bad_inputs_run.run("agent", at.folder)
    assert (refused.code, "ADDRESS" in refused.stderr) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_search_ends_with_its_agent(tmp_path: Path) -> None:
    wait = f"import time, pathlib; pathlib.Path({str(tmp_path / 'on')!r}).touch(); time.sleep(600)"
    start = (
        "import subprocess, sys, time\n"
        "from automesh_service.remote.tied import tied\n"
        f"one = subprocess.Popen(tied([sys.executable, '-c', {wait!r}]), start_new_session=True)\n"
        "print(one.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until((tmp_path / "on").exists)
        parent.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or _is_over(pid))
    # And one whose parent has died before it could say so.
    words = tied([sys.executable, "-c", "raise SystemExit(3)"])
    words[words.index(str(os.getpid()))] = "1"
    assert subprocess.run(words, check=False).returncode == 128 + signal.SIGTERM


def _is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
