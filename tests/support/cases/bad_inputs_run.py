"""Runs the command line inside the test process, and keeps what bad inputs print.

`python -m tests.support.cases.bad_inputs_run [NAME]...` writes tests/golden/cli/errors.txt anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from automesh.cli import app as cli
from automesh.tuner import session
from tests.support import paths
from tests.support.cases.bad_inputs import ALL, BadInput, Files
from tests.support.paths import ROOT

GOLDEN = paths.GOLDEN / "cli" / "errors.txt"
# Set by conftest.py for jax in the test process; what a user has not.
_TEST_VARIABLES = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "COLUMNS", "NO_COLOR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command did; temporary paths in the texts are `TMP`."""

    code: int
    stdout: str
    stderr: str


def run(
    command: str | Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Ran:
    """Runs `automesh COMMAND` in `folder`, in this process."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    out, err = io.StringIO(), io.StringIO()
    environment = {k: v for k, v in os.environ.items() if k not in _TEST_VARIABLES}
    with (
        mock.patch.dict(os.environ, {**environment, **(variables or {})}, clear=True),
        mock.patch.object(sys, "argv", ["automesh", *words]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Ran(
        code=code,
        stdout=normalised(out.getvalue(), folder),
        stderr=normalised(err.getvalue(), folder),
    )


def normalised(text: str, folder: Path) -> str:
    """Takes out what differs from run to run."""
    text = re.sub(r"^\.\.\. .* elapsed\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^estimate \d.*\n", "", text, flags=re.MULTILINE)
    text = text.replace(str(folder), "TMP").replace(str(ROOT), "AUTOMESH")
    text = text.replace(sys.prefix, "ENVIRONMENT")
    text = re.sub(r"(train-cpu-4)-[0-9a-f]{8}", r"\1-HASH", text)
    text = re.sub(r"(?<=known backends: )\[.*?\]", "[...]", text)
    return re.sub(r"(?<=, )[0-9.]+ (s|min)(?= (elapsed|left))", "TIME", text)


def write(files: Files, folder: Path) -> None:
    """Puts the files into the folder."""
    for name, content in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def refuse(case: BadInput, folder: Path) -> Ran:
    """Runs a bad input in an empty folder, and checks that its files are left as they were.

    Raises:
      AssertionError: a file has changed.
    """
    write(case.files, folder)
    before = contents(folder)
    ran = run(case.command, folder, case.variables)
    after = contents(folder)
    for name, content in before.items():
        assert after.get(name) == content, f"`{name}` was changed"
    return ran


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextlib.contextmanager
def inspections_shared() -> Iterator[None]:
    """Lets a script that was inspected once be known: half of the cases only differ after that."""
    known: dict[object, object] = {}
    ask = session.inspect

    def inspect(
        pool: object,
        request: object,
        target: object,
        space: object,
        progress: object,
        **further: object,
    ) -> object:
        path = Path(request.entry.location)
        script = path.read_bytes() if path.exists() else path
        key = (script, request.entry.function, space.names, target.name)
        if "JAX_PLATFORMS" in os.environ:
            return ask(pool, request, target, space, progress, **further)
        if key not in known:
            known[key] = ask(pool, request, target, space, progress, **further)
        return known[key]

    with mock.patch.object(session, "inspect", inspect):
        yield


def text_of(name: str, ran: Ran) -> str:
    """A case in the golden file."""
    return f"## {name}\n$ automesh {ALL[name].command}\n{ran.stderr}exit code {ran.code}\n"


def golden() -> dict[str, str]:
    """Name -> text of each case in the golden file."""
    if not GOLDEN.exists():
        return {}
    cases = re.split(r"^(?=## )", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {case.split("\n", 1)[0].removeprefix("## "): case.rstrip("\n") + "\n" for case in cases}


def main(names: list[str]) -> None:
    texts = golden()
    with inspections_shared():
        for name in names or ALL:
            with tempfile.TemporaryDirectory() as folder:
                texts[name] = text_of(name, refuse(ALL[name], Path(folder).resolve()))
            print(texts[name])
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text("\n".join(texts[name] for name in ALL if name in texts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
