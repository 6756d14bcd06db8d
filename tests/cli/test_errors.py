"""Bad inputs: one clear sentence and a hint, the exit code, no traceback, nothing overwritten."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import automesh
from automesh.__main__ import main as start
from automesh.errors import UsageError
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.nouns import Entry
from automesh.space.spec import read_space
from automesh.tuner import session
from automesh.tuner.worker_errors import inspection_error
from tests.support.cases import bad_inputs, bad_inputs_run
from tests.support.cases.bad_inputs import ALL, INSPECTED, LONG, QUICK, BadInput

GOLDEN = bad_inputs_run.golden()
ENTRY = Entry(kind="script", location="/home/me/train.py", function="build", argv=())
SPACE = read_space("auto")


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    with bad_inputs_run.inspections_shared():
        yield


def refuse(name: str, folder: Path) -> bad_inputs_run.Ran:
    ran = bad_inputs_run.refuse(ALL[name], folder)
    assert bad_inputs_run.text_of(name, ran) == GOLDEN[name]
    assert ran.code == ALL[name].code
    return ran


@pytest.mark.parametrize("name", QUICK)
def test_refused_before_a_worker_starts(name: str, tmp_path: Path) -> None:
    with mock.patch.object(session, "Pool", side_effect=AssertionError("a worker is started")):
        ran = refuse(name, tmp_path)
    assert ran.stdout == ""
    written = set(bad_inputs_run.contents(tmp_path)) - set(QUICK[name].files)
    assert not {one for one in written if not one.endswith(".flock")}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSPECTED)
def test_refused_after_a_look_at_the_script(name: str, tmp_path: Path) -> None:
    assert refuse(name, tmp_path).stdout == ""
    assert not (tmp_path / "mesh_rules.toml").exists()


HANGS = pytest.param("build-hangs", marks=pytest.mark.long)  # 20 s of nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", [HANGS if name == "build-hangs" else name for name in LONG])
def test_refused_after_a_while(name: str, tmp_path: Path) -> None:
    ran = refuse(name, tmp_path)
    assert not (tmp_path / "mesh_rules.toml").exists()
    if ran.code == 1:
        # The table says why; where no mesh was left to try, the error does.
        assert "failed in" in ran.stdout or "none is legal; ruled out: " in ran.stderr


def test_there_are_at_least_forty() -> None:
    assert len(ALL) >= 40
    assert list(GOLDEN) == list(ALL)
    assert len(set(re.findall(r"^error: .*", "".join(GOLDEN.values()), re.MULTILINE))) >= 40


@pytest.mark.parametrize("name", ALL)
def test_what_is_said_is_a_sentence_and_a_hint(name: str) -> None:
    text = GOLDEN[name]
    lines = text.splitlines()[2:-1]
    start = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert re.match(r"error: [^A-Z]|error: (TMP|AUTOMESH)/", lines[start])
    assert not lines[start].endswith(".") or "shape" in lines[start]  # jax ends its own with one
    assert lines[start + 1].startswith("hint: ")
    assert all(line.startswith("  ") for line in lines[start + 2 :])
    assert len(lines) - start <= 12
    assert all(re.match(r"note: |enumerate |compile ", line) for line in lines[:start])
    # The user's own code may say what it likes.
    said = [line for line in lines if not line.startswith("  TMP/")]
    for foreign in ("Traceback", "/worker/", "site-packages", "secret", "None", "Error()"):
        assert foreign not in "\n".join(said)


def test_what_a_case_may_not_do_is_noticed(tmp_path: Path) -> None:
    case = BadInput(command="search", files={"notes.txt": "mine"})

    def overwrite(*_: object) -> bad_inputs_run.Ran:
        (tmp_path / "notes.txt").write_text("yours")
        return bad_inputs_run.Ran(code=2, stdout="", stderr="")

    with (
        mock.patch.object(bad_inputs_run, "run", overwrite),
        pytest.raises(AssertionError, match=r"`notes\.txt` was changed"),
    ):
        bad_inputs_run.refuse(case, tmp_path)


def test_a_good_space_and_good_rules_are_not_refused(tmp_path: Path) -> None:
    files = {"train.py": bad_inputs.UNUSED, "space.toml": bad_inputs.GOOD_SPACE}
    case = BadInput(
        command=f"{bad_inputs.SEARCH} --space space.toml",
        files={**files, "mesh_rules.toml": bad_inputs.RULES},
    )
    with (
        mock.patch.object(session, "Pool", side_effect=RuntimeError("a worker is started")),
        pytest.raises(RuntimeError, match="a worker is started"),
    ):
        bad_inputs_run.refuse(case, tmp_path)


class TestInspection:
    """The words for outcomes that are too slow or too rare to be had from a real worker."""

    @pytest.mark.parametrize(
        ("stage", "message"),
        [
            ("start", "the worker did not start within 2 min"),
            ("load", "importing `train.py` did not end within 2 min"),
            ("build", "`build` did not return within 2 min"),
            ("lower", "lowering the step did not end within 2 min"),
        ],
    )
    def test_time(self, stage: str, message: str) -> None:
        error = inspection_error(TimedOut(stage=stage, limit_s=120.0), ENTRY, SPACE)
        assert error.message == message
        busy = "look at what else this machine is doing"  # --timeout is about the script
        hint = busy if stage == "start" else "find what it waits for, or raise --timeout"
        assert error.hint == hint

    def test_memory(self) -> None:
        outcome = OutOfMemory(stage="load", needed_bytes=9, limit_bytes=8, detail="killed by it")
        error = inspection_error(outcome, ENTRY, SPACE)
        assert error.message == "the script ran out of memory: killed by it"
        assert "--worker-memory" in error.hint

    def test_only_the_end_of_a_long_output(self) -> None:
        tail = "\n".join(f"step {number}" for number in range(40))
        error = inspection_error(TimedOut(stage="load", limit_s=1.0, log_tail=tail), ENTRY, SPACE)
        assert error.hint.splitlines()[1:] == [f"  step {number}" for number in range(32, 40)]

    def test_only_the_users_frames(self) -> None:
        library = inspect.getfile(pytest)
        tail = (
            "Traceback (most recent call last):\n"
            '  File "/home/me/train.py", line 4, in build\n    return go(mesh)\n           ^^^^\n'
            f'  File "{library}", line 9, in raises\n    raise error\n'
            f'  File "{inspect.getfile(session)}", line 9, in run\n    raise error\n'
            "ValueError: 3 heads\nand 4 devices\n"
        )
        error = inspection_error(
            Failed(stage="build", reason="`build` raised ValueError: 3 heads", log_tail=tail),
            ENTRY,
            SPACE,
        )
        assert error.hint.splitlines() == [
            "it was raised here:",
            "  /home/me/train.py:4 in build: return go(mesh)",
            "  and 4 devices",
        ]

    def test_a_hint_of_the_failure_itself_comes_first(self) -> None:
        failed = Failed(stage="build", reason="no `build`", log_tail="noise", hint="write one")
        assert str(inspection_error(failed, ENTRY, SPACE)) == "no `build`\nhint: write one"

    def test_what_is_not_in_the_script_is_not_to_be_mended_there(self) -> None:
        library = inspect.getfile(pytest)
        tail = f'  File "{library}", line 9, in raises\n    raise error\nValueError: no\n'
        failed = Failed(stage="lower", reason="lowering the step raised ValueError: no")
        assert inspection_error(failed, ENTRY, SPACE).hint == ""
        hint = inspection_error(replace(failed, log_tail=tail), ENTRY, SPACE).hint
        assert hint == (
            f"it was raised in a library: {library}:9 in raises; nothing of it is in `train.py`"
        )


class TestPython:
    """The same from Python, as exceptions."""

    def test_a_captured_mesh(self, tmp_path: Path) -> None:
        import jax

        mesh = jax.make_mesh((1,), ("dp",))
        with pytest.raises(UsageError) as caught:
            automesh.search(lambda _: mesh, results=tmp_path)
        assert str(caught.value) == (
            "`<lambda>` captures a jax Mesh (`mesh`), which cannot be sent to another process\n"
            "hint: use the mesh that the function is given, and create arrays inside it"
        )

    def test_no_function(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is an int, which cannot be called"):
            automesh.search(3, results=tmp_path)  # pyright: ignore[reportArgumentType]

    def test_no_finalists(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="`top` is 0; at least one finalist"):
            automesh.search("train.py", top=0, results=tmp_path)

    def test_no_script(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no script"):
            automesh.search(tmp_path / "train.py", results=tmp_path)

    def test_no_rules(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read: no such file"):
            automesh.load(tmp_path / "mesh_rules.toml")


def test_ctrl_c_while_modules_are_loaded_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "automesh.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "automesh.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Stopped(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was begun\n"
