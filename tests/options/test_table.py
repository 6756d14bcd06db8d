"""The table of options agrees with the types that repeat it, and nothing else does repeat it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest

from automesh import api
from automesh.errors import UsageError
from automesh.launch.cluster import Cluster, ClusterOptions
from automesh.options.option import Option, described, read_values
from automesh.options.table import BY_NAME, HOSTS, SEARCH
from automesh.tuner.command.timed_command import TimedCommand, read_command
from automesh.tuner.request import SearchOptions, SearchRequest, read_request
from tests.support.paths import ROOT

PACKAGE = ROOT / "automesh"
IN_PYTHON = [option for option in SEARCH if option.doc]
# What a request has beside its options.
_NO_OPTION = {
    "subject", "again", "target", "curated", "notices", "used_s", "cluster", "shared_terms",
}  # fmt: skip
# A service takes an order, by HTTP, from a command that may be older: it states what it takes.
_OF_SERVICE = ("automesh/submissions/", "automesh/serve/")


def _given(options: dict[str, Any]) -> SearchOptions:
    return cast(SearchOptions, options)


def test_every_name_is_there_once() -> None:
    assert len(BY_NAME) == len(SEARCH)
    assert len({option.word for option in SEARCH}) == len(SEARCH)


def test_search_options_are_those_of_the_table_with_their_types() -> None:
    hints = get_type_hints(SearchOptions)
    assert hints == {option.name: option.value.python for option in IN_PYTHON}
    hosts = {option.name: option.value.python for option in HOSTS}
    assert get_type_hints(ClusterOptions) == hosts


def test_the_request_has_a_field_for_every_option() -> None:
    fields = {one.name for one in dataclasses.fields(SearchRequest)}
    assert fields - _NO_OPTION == {one.field for one in SEARCH if one.group == "search"} - {""}
    assert {one.name for one in dataclasses.fields(Cluster)} - {"is_everywhere"} == {
        option.field for option in HOSTS
    }
    assert {one.name for one in dataclasses.fields(TimedCommand)} - {"template", "program"} == {
        option.field for option in SEARCH if option.group == "command"
    }


def test_what_nobody_gives_is_as_usual_in_the_table_and_in_the_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def build(mesh): ...\n")
    given = _given({option.name: option.usual for option in IN_PYTHON} | {"args": []})
    assert read_request(script, given) == read_request(script, SearchOptions())
    request = read_request(script, SearchOptions())
    own = SearchRequest(subject=request.subject, rules=request.rules)
    assert dataclasses.replace(own, results=own.results.absolute()) == request


def test_every_option_arrives_in_the_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def build(mesh): ...\n")
    options = SearchOptions(
        hardware="our.toml",
        space="dense_lm",
        step="train_step",
        split=["data=dp,fsdp"],
        infer=True,
        budget="90s",
        top=3,
        baseline="dp:8",
        args=["--steps", "1"],
        rules=tmp_path / "r.toml",
        results=tmp_path / "studies",
        storage="a.journal",
        workers=2,
        timeout="7s",
        worker_memory="1KiB",
        reserve_hbm="5%",
        xla=["a=1", "curated"],
        dry_run=True,
        new=True,
        launch="slurm",
        hosts=2,
        processes_per_host=4,
        listen="10.0.0.1:8600",
        wait="1m",
        certificate=tmp_path / "c",
        key=tmp_path / "k",
        ca=tmp_path / "a",
    )
    of_commands = {"command", "step_time", "skip_steps", "timed_steps"}
    assert set(options) == {option.name for option in IN_PYTHON} - of_commands
    request = read_request(script, options)
    cluster, (split,), (knob,) = request.cluster, request.splits, request.xla
    assert (request.hardware, request.space, request.step) == ("our.toml", "dense_lm", "train_step")
    assert (split.axis, split.into, request.infer) == ("data", ("dp", "fsdp"), True)
    assert (request.budget_s, request.top, request.baseline) == (90.0, 3, "dp:8")
    assert request.entry.argv == ("--steps", "1")
    assert (request.rules, request.results) == (str(tmp_path / "r.toml"), tmp_path / "studies")
    assert (request.storage, request.workers, request.timeout_s) == ("a.journal", 2, 7.0)
    assert (request.memory_limit_bytes, request.reserve) == (1024, "5%")
    assert (knob.name, request.curated, request.dry_run, request.new) == ("a", True, True, True)
    assert (cluster.launch, cluster.hosts, cluster.processes_per_host) == ("slurm", 2, 4)
    assert (cluster.listen, cluster.wait_s) == ("10.0.0.1:8600", 60.0)
    files = (cluster.certificate, cluster.key, cluster.ca)
    assert files == tuple(str(tmp_path / name) for name in "cka")


def test_every_option_of_a_command_arrives_in_it() -> None:
    options = SearchOptions(step_time="jsonl:times.jsonl", skip_steps=0, timed_steps=3)
    read = read_command("python {dp}", options)
    assert (type(read.source).__name__, read.skip, read.steps) == ("JsonLines", 0, 3)
    usual = read_command("python {dp}")
    assert (type(usual.source).__name__, usual.skip, usual.steps) == ("CaptureSource", 2, 10)


@pytest.mark.parametrize("option", [one for one in IN_PYTHON if one.searches == "build"])
def test_what_is_for_a_step_that_is_built_is_refused_for_a_command(option: Option) -> None:
    """The number of processes of a host was read and forgotten."""
    value = True if option.is_flag else 1 if option.value.typed is int else "x"
    options = _given({"command": "python a.py {dp}", option.name: value})
    with pytest.raises(UsageError, match=f"`{option.name}` is for a step that automesh compiles"):
        read_request(None, options)


@pytest.mark.parametrize("option", [one for one in SEARCH if one.searches == "command"])
def test_what_is_for_a_command_is_refused_for_a_script(option: Option, tmp_path: Path) -> None:
    value = "capture" if option.name == "step_time" else 0
    options = _given({option.name: value})
    with pytest.raises(UsageError, match=f"`{option.name}` is for a search by a command"):
        read_request(tmp_path / "train.py", options)


def test_an_option_that_nothing_reads_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match="nothing reads the option `split`"):
        read_values([BY_NAME["split"]], {}, str)


def test_a_docstring_gets_what_each_option_means() -> None:
    def function() -> None:
        """Does it.

        Args:
          options: all of them.
          more: something else.
        """

    doc = inspect.getdoc(described(SEARCH)(function)) or ""
    assert "  reserve_hbm: memory of a device that plans leave free, as `1GiB` or `5%`.\n" in doc
    assert "options: all" not in doc and doc.endswith("  more: something else.")
    assert max(map(len, (api.search.__doc__ or "").splitlines())) <= 100


# Names that nothing else in the package has.
DISTINCT = (
    "reserve_hbm", "worker_memory", "processes_per_host", "step_time", "skip_steps", "timed_steps",
)  # fmt: skip


def _places(option: Option) -> Iterator[str]:
    """Where an option is declared, or its name or value is copied: a class that has it as a field,
    a function that takes it or passes it on by its name, a text that is its name and nothing else.

    Reading `request.dry_run` is its use, for which it is there.
    """
    names = {option.name, option.word, f"--{option.word}"}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in names):
            continue
        for statement in ast.parse(text).body:
            if any(_is_place(node, names) for node in ast.walk(statement)):
                found = getattr(statement, "name", "a constant")
                yield f"{path.relative_to(ROOT)}: {found}"


def _is_place(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name in names
        case ast.arg(arg=name) | ast.keyword(arg=name):
            return name in names
        case ast.Constant(value=str(text)):
            return text in names
        case _:
            return False


@pytest.mark.parametrize("name", DISTINCT)
def test_an_option_stands_in_at_most_three_places(name: str) -> None:
    places = list(_places(BY_NAME[name]))
    core = [place for place in places if not place.startswith(_OF_SERVICE)]
    print(name, places)
    assert "automesh/options/table.py: a constant" in core
    assert len(core) + (BY_NAME[name].field not in ("", name)) <= 3, core
    assert len(places) - len(core) <= 2, places
