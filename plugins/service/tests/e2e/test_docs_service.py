"""The guide to the service is executed, up to a measured rule that a URL gives."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from automesh.cli.app import app
from automesh_service.serve import agents, studies, submissions
from automesh_service.submissions.home import open_home
from plugins.service.tests.support.serve_process import ServeProcess
from tests.e2e.test_readme import block as block_of_readme
from tests.support.cases import bad_inputs_run
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "service.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    return found[1]


def commands(name: str) -> list[str]:
    return block(name).replace("\\\n", " ").strip().splitlines()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    found = ServeProcess(folder=tmp_path)
    yield found
    found.end()


def run(words: list[str], served: ServeProcess) -> subprocess.CompletedProcess[str]:
    address = {"AUTOMESH_SERVER": served.url, "AUTOMESH_SERVER_TOKEN": served.token}
    return subprocess.run(
        words,
        cwd=served.folder,
        env={**served.environment, **address},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.long
def test_the_guide_for_one_person_ends_with_a_measured_rule(served: ServeProcess) -> None:
    (served.folder / "train.py").write_text(block_of_readme("script"))
    assert commands("one person") == ["automesh serve"]
    served.start()
    (command,) = commands("submit")
    # Fewer devices and more time: machines that test do other work.
    command = command.replace("--target cpu:8 --budget 3m", "--target cpu:2 --budget 2m --top 1")
    done = run([sys.executable, "-m", *shlex.split(command)], served)
    assert done.returncode == 0, done.stderr + served.said()
    assert "measured" in done.stdout
    (rule,) = tomllib.loads((served.folder / "mesh_rules.toml").read_text())["rule"]
    assert (rule["match"], rule["evidence"]["kind"]) == ("cpu-2", "measured")
    (study,) = served.ask("GET", "/v1/studies")[1]["studies"]
    assert (study["state"], study["has_rule"]) == ("ended", True)
    script = block("load").replace("http://127.0.0.1:8700", served.url)
    script = script.replace("NAME", study["name"]).replace("cpu-8", "cpu-2")
    done = run([sys.executable, "-c", f"{script}\nprint(config.mesh_shape)"], served)
    assert done.returncode == 0, done.stderr
    # The same command is the same submission, which has ended.
    again = run([sys.executable, "-m", *shlex.split(command)], served)
    assert (again.returncode, "was there already" in again.stderr) == (0, True), again.stderr
    for name in ("backup", "curl"):
        for line in commands(name):
            done = run(["bash", "-c", line.replace("python ", f"{sys.executable} ")], served)
            assert done.returncode == 0, done.stderr
    assert (served.folder / "backup" / "service.db").stat().st_size > 0
    assert served.stop() == 0, served.said()


def test_tokens_of_the_guide(tmp_path: Path) -> None:
    made = [
        bad_inputs_run.run(shlex.split(line)[1:], tmp_path)
        for line in (*commands("tokens"), commands("tls")[0])
    ]
    assert [one.code for one in made] == [0] * 5, made
    assert re.fullmatch(r"amt_[0-9a-f]{12}_[0-9a-f]{64}\n", made[0].stdout)
    lines = made[3].stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["submit", "read", "agent"]
    revoked = bad_inputs_run.run(["token", "--revoke", lines[0].split()[0]], tmp_path)
    assert revoked.code == 0
    assert "revoked" in bad_inputs_run.run("token --list", tmp_path).stdout
    assert open_home(tmp_path / "automesh-service").database.exists()


def test_options_and_routes_of_the_guide_are_there() -> None:

    group: Any = typer.main.get_command(app)
    named = ("one person", "submit", "tokens", "team", "tls", "systemd")
    for name in (*named, "agent token", "agent", "need"):
        for line in commands(name):
            if match := re.search(r"(?:^|\s|/)automesh (\w+ .*|\w+)$", line):
                command, *words = shlex.split(match[1])
                group.commands[command].make_context(command, words)
    routes = {route.path for one in (agents, studies, submissions) for route in one.router.routes}
    for path in re.findall(r"`(?:GET|POST|PUT) (/v1/[^ `?]+)", GUIDE):
        named = re.sub(r"NAME", "{name}", path)
        named = re.sub(r"(submissions)/NUMBER", r"\1/{number}", named)
        named = named.replace("SHA256", "{digest}")
        assert named in routes | {"/v1/health"}, path
