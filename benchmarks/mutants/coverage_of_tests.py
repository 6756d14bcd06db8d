"""Which test runs which line, from one run of the tests under coverage.py."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

DATA, JUNIT = "lines.coverage", "lines.xml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsOfLines:
    """Attributes:
    by_line: for each file (relative to the repository) and line the tests that run it.
    by_file: for each file the tests that run any line of it.
    seconds: what each test took, with its set-up.
    """

    __test__ = False

    by_line: dict[str, dict[int, frozenset[str]]]
    by_file: dict[str, frozenset[str]]
    seconds: dict[str, float]

    def of(self, file: str, line: int) -> list[str]:
        """The tests that run a line, the fastest first.

        A line that runs while its module is imported, such as a constant's, has no test of its own:
        then all that run anything of the file.
        """
        tests = self.by_line.get(file, {}).get(line) or self.by_file.get(file, frozenset())
        return sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))


def run(root: Path, folder: Path, packages: list[str]) -> int:
    """Runs the ten-minute run once under coverage.py; leaves `DATA` and `JUNIT` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "coverage.ini"
    sources = "\n    ".join(str(root / package) for package in packages)
    configuration.write_text(
        f"[run]\nsource =\n    {sources}\ndata_file = {folder / DATA}\nrelative_files = false\n"
    )
    command = [sys.executable, "-m", "pytest", f"--cov-config={configuration}", "--cov"]
    command += ["--cov-context=test", "--cov-report=", f"--junitxml={folder / JUNIT}"]
    return subprocess.run(command, cwd=root, check=False).returncode


def read(root: Path, folder: Path) -> TestsOfLines:
    """What `run` left.

    Raises:
      FileNotFoundError: nothing was left there.
    """
    from coverage import CoverageData

    seconds, failed = _durations(folder / JUNIT)
    if not (folder / DATA).exists():
        raise FileNotFoundError(folder / DATA)
    data = CoverageData(str(folder / DATA))
    data.read()
    by_line: dict[str, dict[int, frozenset[str]]] = {}
    by_file: dict[str, frozenset[str]] = {}
    for path in data.measured_files():
        file = Path(path).relative_to(root).as_posix()
        by_line[file] = {
            line: frozenset(context.partition("|")[0] for context in contexts if context) - failed
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        by_file[file] = frozenset().union(*by_line[file].values())
    return TestsOfLines(by_line=by_line, by_file=by_file, seconds=seconds)


def _durations(junit: Path) -> tuple[dict[str, float], frozenset[str]]:
    """Seconds of each test, and which failed without any mutant."""
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for case in ElementTree.parse(junit).iter("testcase"):
        name = _node(case.get("classname", ""), case.get("name", ""))
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    return seconds, frozenset(failed)


def _node(classname: str, name: str) -> str:
    """`tests/mesh/test_x.py::TestY::test_z[a]` of `tests.mesh.test_x.TestY` and `test_z[a]`."""
    parts = classname.split(".")
    module = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: module + 1]) + ".py", *parts[module + 1 :], name])
