"""Every reader of a file, given any bytes: a value or an `AutomeshError`, within a second.

Half of the bytes are anything at all; the others are a good file that was cut, flipped, doubled or
filled with what breaks parsers. Where a file is JSON of ours, single values in it are changed too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState

from automesh import limits
from automesh.errors import AutomeshError
from automesh.hardware.calibration.profile_files import read_profile
from automesh.hardware.clusters_file import read_clusters
from automesh.hlo import read_module
from automesh.hlo.store import ModuleStore
from automesh.jsonio import from_json, read_json, to_json
from automesh.mesh.rules.file import check_mergeable, merge_rule, read_rules
from automesh.outcomes import Measured, Outcome
from automesh.program.lower import program_text
from automesh.program.script.payload import read_payload
from automesh.program.script.sources import hash_of_content
from automesh.reading import parse_json, parse_toml
from automesh.skipped import Skipped, reason_of
from automesh.space.options import parse_options, value_of
from automesh.space.spec import read_space
from automesh.tuner.command.run import Manner, Place, recovered
from automesh.tuner.command.step_times import (
    CaptureReader,
    JsonLines,
    JsonReader,
    Mark,
    Printed,
    PrintedReader,
)
from automesh.tuner.estimate.terms_cache import StoredPropagation, TermsCache
from automesh.tuner.explain.study import _plan_of, estimate_rows
from automesh.tuner.measure.decision import Decision
from automesh.tuner.study.freshness import Grounds
from automesh.tuner.study.lease_tables import FileLeases
from automesh.tuner.study.metadata import Footer, Header
from automesh.tuner.study.optuna_records import is_ours, new_trial, outcome_attributes, read_trial
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.stored.notes import upgraded_decision, upgraded_header
from automesh.worker.messages import Surroundings
from automesh.worker.process import log_tail, read_ending
from automesh.worker.wire import Decoder, WireError, encode
from tests.hardware.calibration.test_profile import PROBES, point, profile_of
from tests.hardware.test_clusters import LAB, OWN_TPU
from tests.hlo.test_store import KEPT
from tests.security.test_faults_of_reads import SECONDS, SPACE, TIMER
from tests.support.cases.bad_inputs import RULES
from tests.support.samples.explain_samples import AXES
from tests.support.samples.recorded import serialized
from tests.support.samples.storage_cases import VERSIONS, compiled, measured, opened, plans
from tests.tuner.explain.test_study import header, propagated, samples

LONGEST_S = 1.0
KEY = "0" * 64


# Bytes


POISON = (
    b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b'"', b"'''", b'"""', b"\\", b"#",
    b"[" * 2000, b"]" * 5, b"{" * 70, b'{"a":' * 300, b"a." * 100 + b"a=1", b"[a." * 3,
    b"9" * 5000, b"-1", b"1e999", b"NaN", b"-Infinity", b"0x" + b"f" * 300, b"true", b"null",
    b'"\\ud800"', b'"\\u0000"', b"1979-05-27T07:32:00Z", b"99:99:99", b"inf", b",", b"=", b"\n",
    b"\xc2\x9b31m", b"\x1b[2J", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with a few changes."""
    data = good
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        upto = draw(st.integers(at, min(at + 40, len(data))))
        match draw(st.sampled_from(["cut", "flip", "drop", "double", "insert", "replace"])):
            case "cut":
                data = data[:at]
            case "flip" if data:
                flipped = data[at] ^ 1 << draw(st.integers(0, 7))
                data = data[:at] + bytes([flipped]) + data[at + 1 :]
            case "drop":
                data = data[:at] + data[upto:]
            case "double":
                data = data[:upto] + data[at:]
            case "insert":
                data = data[:at] + draw(st.sampled_from(POISON)) + data[at:]
            case _:
                data = data[:at] + draw(st.sampled_from(POISON)) + data[upto:]
    return data


def any_bytes(*good: bytes) -> st.SearchStrategy[bytes]:
    """Anything, and good files that were damaged."""
    return st.one_of(
        st.binary(max_size=300), st.sampled_from(POISON), *(damaged(one) for one in good)
    )


# Values of JSON


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**63, 10**30, 10**400, 0.0, -0.5, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "\0", "\ud800", "\x1b[31m", "a" * 5000, "[]", "{", "dp", "../../x"]),
    st.integers(),
    st.text(max_size=5),
)
values = st.recursive(
    odd,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """JSON of ours in which a few values are others, are missing or are too many."""
    tree = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(tree))
        if not places:
            return draw(values)
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "drop", "add"])):
            case "replace":
                holder[key] = draw(values)
            case "drop":
                del holder[key]
            case _ if isinstance(holder, dict):
                holder[draw(st.text(max_size=3))] = draw(values)
            case _:
                holder.insert(key, draw(values))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    )
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


# Readers


def within_a_second(read: Callable[[], object]) -> None:
    """Lets a reader refuse what it reads, in a sentence, and nothing else."""
    # Of this thread: others of the process may still be at the work of an earlier test.
    began_s = time.thread_time()
    try:
        read()
    except AutomeshError as error:
        assert error.message.strip()
        assert "\n" not in reason_of(error)
    assert time.thread_time() - began_s < LONGEST_S


def _read_rules(path: Path) -> None:
    check_mergeable(path)
    rules = read_rules(path)
    if rules.rules:
        merge_rule(path, rules.rules[0], selector="cpu-4")
        read_rules(path)


def _read_terms(path: Path) -> None:
    cache = TermsCache(folder=path.parent, source_hash="abc", versions=())
    cache.all()
    assert len(cache.skipped.notices()) <= 1


def _read_module_file(path: Path) -> None:
    store = ModuleStore(path.parent)
    found = store.find(KEY)
    assert found is None or found.module == KEPT.module
    store.entries()
    store.size_bytes()


def _read_leases(path: Path) -> None:
    leases = FileLeases(path)
    leases.get("a")
    leases.under("a")


def _read_estimates(path: Path) -> None:
    skipped = Skipped()
    for number, row in estimate_rows(path, skipped):
        try:
            _plan_of(row, {}, AXES)
        except (AutomeshError, KeyError) as error:
            skipped.note(f"row {number}", error)


def _read_journal(path: Path) -> None:
    with opened(parse_storage(str(path), path.parent)) as study:
        study.lead()
        study.compile.adopt_expired()
        study.compile.trials()
        study.compile.enqueue(plans(1))
        study.noted("footer")


def _manner(folder: Path) -> Manner:
    return Manner(
        program="true",
        surroundings=Surroundings(platforms="cpu", cpu_devices=8),
        source=JsonLines(file=str(folder / "m.jsonl")),
        skip=0,
        steps=4,
        timeout_s=1.0,
        memory_limit_bytes=2**30,
        cache_dir=folder,
    )


def _read_mark(path: Path) -> None:
    recovered(_manner(path.parent.parent), Place(logs=path.parent.parent, name=path.parent.name))


def _read_printed(path: Path) -> None:
    source = Printed(pattern="step_time ([0-9.]+)")
    PrintedReader(path, source, skip=1, steps=3).read()


def _json_lines(path: Path) -> None:
    for key in ("", "step_time", "rate/steps_per_s"):
        source = JsonLines(file=str(path), key=key)
        steps = JsonReader(path, source, Mark(), skip=1, steps=3).read()
        assert all(0 < one < float("inf") for one in steps.samples_s)


def _timer(path: Path) -> None:
    steps = CaptureReader(path.parent).read()
    assert all(0 < one < float("inf") for one in steps.samples_s)


@cache
def kept() -> Any:
    job, propagation = propagated(samples.plan("fsdp:4,tp:4", remat="full"))
    one = StoredPropagation(source_hash="abc", versions=(), job=job, propagation=propagation)
    return to_json(one, StoredPropagation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of a file.

    Attributes:
      name: of the file.
      good: files that it takes.
    """

    name: str
    read: Callable[[Path], object]
    good: Callable[[Path], tuple[bytes, ...]]
    examples: int = 60


def _profile_bytes(folder: Path) -> tuple[bytes, ...]:
    from dataclasses import asdict

    return (json.dumps(asdict(profile_of([point(PROBES[0], 1e-6)]))).encode(),)


def _stored_bytes(folder: Path) -> tuple[bytes, ...]:
    ModuleStore(folder / "store").keep(KEY, KEPT)
    return ((folder / "store" / f"{KEY}.module").read_bytes(),)


def _journal_bytes(folder: Path) -> tuple[bytes, ...]:
    path = folder / "good.journal"
    with opened(parse_storage(str(path), folder)) as study:
        study.lead()
        study.compile.enqueue(plans(2))
        trial = study.compile.claim()
        assert trial is not None
        study.compile.report(trial, 0, [0.1, 0.2])
        study.compile.finish(trial, compiled(0.5))
        study.note("footer", {"a": 1})
    return (path.read_bytes(), path.with_name("good.journal.holds").read_bytes())


def _holds_bytes(folder: Path) -> tuple[bytes, ...]:
    with opened(parse_storage(f"{folder}/h.journal", folder)) as study:
        study.lead()
        return ((folder / "h.journal.holds").read_bytes(),)


def texts(*good: str) -> Callable[[Path], tuple[bytes, ...]]:
    return lambda folder: tuple(one.encode() for one in good)


JSON_RULES = '{"schema": 1, "axes": ["dp"], "rule": [{"match": "x", "ici": {"dp": 4}}]}'
TABLE = "mesh,remat,step_s,knob.remat,mapping.embed\r\n" + '"dp:2,tp:8",full,0.5,full,tp\r\n' * 3
READERS = {
    "rules": Reader(name="mesh_rules.toml", read=_read_rules, good=texts(RULES)),
    "rules as JSON": Reader(
        name="rules.json",
        read=_read_rules,
        good=texts(JSON_RULES),
    ),
    "space": Reader(
        name="space.toml", read=lambda path: read_space(str(path)), good=texts(SPACE)
    ),
    "clusters": Reader(name="our.toml", read=read_clusters, good=texts(LAB, OWN_TPU)),
    "calibration": Reader(name="p.json", read=read_profile, good=_profile_bytes),
    "terms": Reader(
        name="a.json", read=_read_terms, good=lambda folder: (json.dumps(kept()).encode(),)
    ),
    "compiled program": Reader(
        name=f"{KEY}.module", read=_read_module_file, good=_stored_bytes, examples=120
    ),
    "holds": Reader(name="holds", read=_read_leases, good=_holds_bytes),
    "estimates": Reader(name="estimates.csv", read=_read_estimates, good=texts(TABLE)),
    "journal": Reader(name="a.journal", read=_read_journal, good=_journal_bytes, examples=40),
    "mark of a run": Reader(
        name="mark.json", read=_read_mark, good=texts('{"size": 3, "last": "00ff"}')
    ),
    "ending of a run": Reader(
        name="ended.json",
        read=_read_mark,
        good=texts('{"code": 0, "over_limit": false, "kernel_killed": false, "peak_bytes": 1}\n'),
    ),
    "JSON lines": Reader(name="m.jsonl", read=_json_lines, good=texts(SECONDS)),
    "lines of a timer": Reader(name="1.jsonl", read=_timer, good=texts(TIMER)),
    "what a command prints": Reader(
        name="run.log", read=_read_printed, good=texts("step_time 0.5\n" * 5)
    ),
    "log": Reader(name="worker.log", read=log_tail, good=texts("--- a job ---\nit failed\r\n" * 3)),
    "program text": Reader(
        name="program.txt", read=program_text.read_text, good=texts("t.py:1\tadd\nt.py:2\tmul")
    ),
    "a file that a script reads": Reader(name="data", read=hash_of_content, good=texts("data")),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_in_a_file(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    folder = tmp_path / "here"
    folder.mkdir()

    @settings(max_examples=reader.examples, suppress_health_check=list(HealthCheck))
    @given(any_bytes(*reader.good(tmp_path)))
    def check(data: bytes) -> None:
        for left in folder.iterdir():
            left.unlink()
        path = folder / reader.name
        path.write_bytes(data)
        within_a_second(lambda: reader.read(path))

    check()


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_as_a_pickled_build(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "build.pickle"
    path.write_bytes(data)
    within_a_second(lambda: read_payload(path))


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(any_bytes(*(serialized(name) for name in ("cpu_fsdp", "gpu_tp"))))
@example(b"\x1a\x00" * 5000)
def test_any_bytes_as_a_compiled_module(data: bytes) -> None:
    within_a_second(lambda: read_module(data))


@given(any_bytes(encode({"answer": {"a": 1}}), encode({"event": "x"}) * 2))
@example(b"\x00\x03\x0d\x40" + b"[" * 200_000)
def test_any_bytes_from_a_worker(data: bytes) -> None:
    with_refusal = Decoder()
    try:
        messages = with_refusal.feed(data)
    except WireError:
        return
    assert all(isinstance(one, dict) for one in messages)


@given(any_bytes(b'{"code": 1, "over_limit": false, "kernel_killed": false, "peak_bytes": 1}\n'))
def test_any_bytes_from_a_guardian(data: bytes) -> None:
    within_a_second(lambda: read_ending(data))


@given(any_bytes(RULES.encode(), SPACE.encode()))
def test_any_text_as_toml_or_json(data: bytes) -> None:
    text = data.decode(errors="replace")
    within_a_second(lambda: parse_toml(text))
    within_a_second(lambda: parse_json(text))
    within_a_second(lambda: value_of(text))
    within_a_second(lambda: parse_options([f"xla_a={text}"]) if "\0" not in text else None)


NOUNS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "terms": (StoredPropagation, kept),
    "header": (Header, lambda: to_json(header(Path("/x")), Header)),
    "footer": (
        Footer,
        lambda: {"stop_reason": "done", "rules_path": "r", "interrupted": False, "made": "now"},
    ),
    "grounds": (
        Grounds,
        lambda: {
            "source_hash": "a",
            "program": "b",
            "files": [["/t.py", "00"]],
            "variables": [],
            "packages": [["jax", "1"]],
        },
    ),
    "outcome": (Outcome, lambda: to_json(compiled(0.5), Outcome)),
    "measured": (Outcome, lambda: to_json(measured(0.5), Outcome)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOUNS)
def test_any_values_in_what_a_study_keeps(name: str) -> None:
    kind, good = NOUNS[name]

    examples = 25 if name == "terms" else 80  # Of thousands of values.

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.one_of(values, changed(good())))
    def check(tree: Any) -> None:
        within_a_second(lambda: from_json(tree, kind))

    check()


@settings(max_examples=60)
@given(values)
def test_any_value_as_a_decision_of_a_former_version(tree: Any) -> None:
    within_a_second(lambda: from_json(upgraded_decision(tree), Decision))
    within_a_second(lambda: from_json(upgraded_decision({"race": tree}), Decision))
    within_a_second(lambda: from_json(upgraded_header(tree), Header))
    within_a_second(lambda: from_json(upgraded_header({"axes": tree, "room": tree}), Header))


def _attributes() -> dict[str, Any]:
    frozen = new_trial(plans(1)[0], {}, source_hash="a", versions=VERSIONS)
    owner = {"host": "h", "machine": "m", "pid": 1, "start": "1", "token": "t"}
    rounds = {"round.0000": {"machine": "m", "samples_s": [0.5]}}
    found = {**frozen.user_attrs, **outcome_attributes(measured(0.5)), **rounds, "owner": owner}
    return json.loads(json.dumps(found))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.one_of(values, changed(_attributes())), st.sampled_from(TrialState))
def test_any_values_in_a_trial(attributes: Any, state: TrialState) -> None:
    frozen = FrozenTrial(
        number=0,
        state=state,
        value=None,
        datetime_start=None,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs=attributes,
        system_attrs={},
        intermediate_values={},
        trial_id=0,
    )

    def read() -> None:
        if is_ours(frozen):
            trial = read_trial("measure", frozen)
            trial.medians_s("m")
            assert not isinstance(trial.outcome, Measured) or trial.outcome.step_s > 0

    within_a_second(read)


@pytest.mark.parametrize(
    "text",
    [
        "a." * (limits.PEOPLE_FILE_BYTES // 8) + "a = 1",
        '"a".' * (limits.PEOPLE_FILE_BYTES // 16) + "a = 1",
        "a" * (limits.PEOPLE_FILE_BYTES // 4),
        "[" * (limits.PEOPLE_FILE_BYTES // 4),
        "[a" + ".a" * (limits.PEOPLE_FILE_BYTES // 8) + "]",
        "'" * (limits.PEOPLE_FILE_BYTES // 4),
        '"\\' * (limits.PEOPLE_FILE_BYTES // 8),
        "a = { b = " * 50_000,
        "a = 0x" + "f" * 500_000,
        "a = " + "1" * 500_000,
        "a = 1e" + "9" * 500_000,
    ],
    ids=range(11),
)
def test_texts_that_take_a_parser_long(text: str) -> None:
    began_s = time.process_time()
    for parse in (parse_toml, parse_json):
        with contextlib.suppress(AutomeshError):
            parse(text)
    assert time.process_time() - began_s < LONGEST_S


@pytest.mark.parametrize("data", [b"[" * 10**6, b'{"a":' * 10**6, b"9" * 10**6, b"\xff" * 10**6])
def test_json_of_ours_that_takes_a_parser_long(data: bytes) -> None:
    began_s = time.process_time()
    for kind in (StoredPropagation, Header, list[Any]):
        with pytest.raises(AutomeshError):
            read_json(data, kind)
    assert time.process_time() - began_s < LONGEST_S
