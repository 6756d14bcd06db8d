"""Everything that automesh writes, each as a case that can be repeated while the system refuses it.

`python -m tests.security.writers FOLDER` does all of it on a small disk of its own that is mounted
at FOLDER, while that is full, read-only or somebody else's, and prints as JSON what became of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from automesh.cli import guard
from automesh.hardware.calibration.profile_files import merge_profile
from automesh.hlo.store import ModuleStore, Stored
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.evidence import Evidence
from automesh.mesh.rules.file import merge_rule
from automesh.mesh.rules.rule import rule_for
from automesh.outcomes import Counts, Memory
from automesh.program.lower import program_text
from automesh.program.lower.program_text import TextLine
from automesh.program.script.payload import pickle_entry
from automesh.report.estimates import Estimates
from automesh.report.files.csv import dataframe, write_estimates, write_table, write_text
from automesh.tuner.command.run import Manner, Place, run
from automesh.tuner.command.step_times import Printed
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.study.storage import parse_storage
from automesh.worker.messages import Surroundings
from automesh.worker.process import Guarded
from tests.hardware.calibration.test_profile import PROBES, point, profile_of
from tests.support.samples import results_samples
from tests.support.samples.storage_cases import opened, plans
from tests.tuner.explain.test_study import propagated

Act = Callable[[], object]
Prepare = Callable[[Path], Act]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """One kind of file.

    Attributes:
      name: what it is.
      prepare: makes the first version of it in a folder; gives what writes the next one.
      names: what an error names, beside the folder.
    """

    name: str
    prepare: Prepare
    names: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What became of a writer whose writing was refused.

    Attributes:
      code: what the command line would exit with.
      said: what it would print on stderr.
      lost: old files that are not as they were.
      left: drafts that were left behind.
    """

    code: int
    said: str
    lost: tuple[str, ...]
    left: tuple[str, ...]


def attempt(folder: Path, act: Act, fault: AbstractContextManager[object]) -> Refused:
    """Does `act` as the command line does it, while a fault lasts.

    Args:
      folder: that it writes into.
    """
    before = _contents(folder)
    said = io.StringIO()

    def without_answer() -> None:  # Which would be taken for an exit code.
        act()

    with (
        mock.patch.object(guard, "end_on_sigterm"),
        contextlib.redirect_stderr(said),
        fault,
    ):
        code = guard.guarded(without_answer, [])
    after = _contents(folder)
    return Refused(
        code=code,
        said=said.getvalue(),
        lost=tuple(name for name, content in before.items() if after.get(name) != content),
        left=tuple(name for name in after.keys() - before.keys() if name.endswith(".draft")),
    )


def _contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder but those whose content a database or a lock decides."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(_OWN_AFFAIR)
    }


# A database may write a page that no transaction refers to, and a journal the half of a line.
_OWN_AFFAIR = (".db", "-wal", "-shm", "lock", "study.journal")


def _rules(name: str) -> Prepare:
    def prepare(folder: Path) -> Act:
        def merge(mesh: str) -> None:
            plan = Plan(axes=parse_mesh(mesh, ("dp", "tp")))
            evidence = Evidence(kind="measured", step_s=1.0)
            rule = rule_for(plan, selector="cpu-8", evidence=evidence)
            merge_rule(folder / name, rule, selector="cpu-8")

        merge("dp:8")
        return lambda: merge("tp:8")

    return prepare


def _trials(folder: Path) -> Act:
    table = dataframe(results_samples.measured_search())
    write_table(table.head(1), folder / "trials.csv")
    return lambda: write_table(table, folder / "trials.csv")


def _estimates(folder: Path) -> Act:
    def write(*names: str) -> None:
        missing = {Plan(axes=parse_mesh(name)): "no time" for name in names}
        write_estimates(Estimates(missing=missing), folder / "estimates.csv")

    write("dp:8")
    return lambda: write("dp:8", "tp:8")


def _trace(folder: Path) -> Act:
    path = folder / "trace.json"
    write_text("[]", path, hint="h")
    return lambda: write_text("[1]", path, hint="h")


def _terms(folder: Path) -> Act:
    cache = TermsCache(folder=folder / "terms", source_hash="a", versions=())
    axes = parse_mesh("fsdp:4,tp:4")
    cache.keep(*propagated(Plan(axes=axes)))
    return lambda: cache.keep(*propagated(Plan(axes=axes, knobs=(("remat", "full"),))))


def _modules(folder: Path) -> Act:
    store = ModuleStore(folder / "modules")
    kept = Stored(
        module=os.urandom(100),
        memory=Memory(
            argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=0, peak_bytes=2
        ),
        counts=Counts(flops=1, hbm_bytes=1, collectives=()),
        compile_s=1.0,
        effort="default",
        target="v5e",
        label="dp:8",
        versions=(),
    )
    store.keep("a" * 64, kept)
    return lambda: store.keep("a" * 64, replace(kept, compile_s=2.0))


def _leases(folder: Path) -> Act:
    study = opened(parse_storage(f"{folder}/a.journal", folder))
    study.lead()
    return study.heartbeat


def _text(folder: Path) -> Act:
    path = folder / "program.txt"
    program_text.write_text(path, [TextLine(text="a", place="")])
    return lambda: program_text.write_text(path, [TextLine(text="b", place="")])


def _payload(folder: Path) -> Act:
    path = folder / "build.pickle"
    pickle_entry(_build, path)
    return lambda: pickle_entry(_another_build, path)


def _build(mesh: object) -> None: ...
def _another_build(mesh: object) -> None: ...


def _profile(folder: Path) -> Act:
    path = folder / "profile.json"
    merge_profile(path, profile_of([point(PROBES[0], 1e-3)]))
    return lambda: merge_profile(path, profile_of([point(PROBES[1], 1e-3)]))


def _run(folder: Path) -> Act:
    manner = Manner(
        program="/bin/true",
        surroundings=Surroundings(platforms="cpu"),
        source=Printed(pattern="([0-9]+) ms"),
        skip=0,
        steps=1,
        timeout_s=60.0,
        memory_limit_bytes=2**30,
        cache_dir=folder,
    )
    place = Place(logs=folder / "logs", name="run-0001")
    place.logs.mkdir()

    def start() -> object:
        return run(
            manner,
            place,
            ("true",),
            clock=time.monotonic,
            pulse=lambda: None,
            on_steps=lambda _: None,
        )

    return start


def _log(folder: Path) -> Act:
    log = folder / "worker-1-0001.log"
    log.write_text("--- a job ---\n")

    def start() -> None:
        process = Guarded(["/bin/true"], variables={}, log=log, memory_limit_bytes=2**30)
        while not process.has_ended():
            time.sleep(0.01)
        process.collect_ending()

    return start


def _storage(name: str) -> Prepare:
    def prepare(folder: Path) -> Act:
        storage = parse_storage(f"{folder}/{name}", folder)

        def enqueue(count: int) -> None:
            with opened(storage) as study:
                study.lead()
                study.compile.enqueue(plans(count))

        enqueue(1)
        return lambda: enqueue(25)

    return prepare


WRITERS = (
    Writer(name="rules", prepare=_rules("mesh_rules.toml"), names="mesh_rules.toml"),
    Writer(name="rules as JSON", prepare=_rules("mesh_rules.json"), names="mesh_rules.json"),
    Writer(name="trials", prepare=_trials, names="trials.csv"),
    Writer(name="estimates", prepare=_estimates, names="estimates.csv"),
    Writer(name="trace of explain", prepare=_trace, names="trace.json"),
    Writer(name="terms", prepare=_terms, names="terms"),
    Writer(name="compiled modules", prepare=_modules, names="modules"),
    Writer(name="text of a program", prepare=_text, names="program.txt"),
    Writer(name="pickled function", prepare=_payload, names="build.pickle"),
    Writer(name="profile", prepare=_profile, names="profile.json"),
    Writer(name="leases", prepare=_leases, names="a.journal"),
)
# Files that others than `automesh.files` write, or go on writing.
STORAGES = (
    Writer(name="study in SQLite", prepare=_storage("study.db"), names="study"),
    Writer(name="study in a journal", prepare=_storage("study.journal"), names="study"),
)
RUN = Writer(name="files of a run", prepare=_run, names="run-0001")
LOG = Writer(name="log", prepare=_log, names="worker-1-0001.log")


# On a real disk that refuses


def main(folder: Path) -> None:
    """Does everything in a mount of its own at `folder`, and prints what became of it."""
    _mount("-t", "tmpfs", "-o", "size=16m,mode=755", "none", str(folder))
    every = (*WRITERS, *STORAGES, RUN, LOG)
    acts: dict[str, dict[str, Act]] = {}
    for fault in ("full", "read-only", "not ours"):
        acts[fault] = {}
        for writer in every:
            place = folder / fault / writer.name
            place.mkdir(parents=True)
            acts[fault][writer.name] = writer.prepare(place)
    for writer in every:  # What is imported late could not be by another account.
        place = folder / "once" / writer.name
        place.mkdir(parents=True)
        writer.prepare(place)()
    found: dict[str, dict[str, dict[str, object]]] = {}

    def note(fault: str) -> None:
        found[fault] = {
            name: asdict(attempt(folder / fault / name, act, contextlib.nullcontext()))
            for name, act in acts[fault].items()
        }

    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    note("full")
    filler.unlink()
    _mount("-o", "remount,ro", str(folder))
    note("read-only")
    _mount("-o", "remount,rw", str(folder))
    os.setuid(65534)
    note("not ours")
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # Studies that are open could not be closed.


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
