"""Blocks are shown the same way whatever command has built them, and in one place only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from automesh.report.blocks.columns import GLUE, figures_column, text_column, wrapped
from automesh.report.blocks.html import to_html
from automesh.report.blocks.json import to_json
from automesh.report.blocks.nouns import (
    KeyValues,
    Note,
    Report,
    Section,
    Sentence,
    Table,
    lines_of,
)
from automesh.report.blocks.terminal import render
from tests.support.paths import ROOT

REPORT = ROOT / "automesh" / "report"


def functions() -> Iterator[tuple[str, str]]:
    """(module, name) of every function in automesh/report, methods included."""
    for path in sorted(REPORT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(REPORT).as_posix(), node.name


def test_a_report_is_drawn_and_written_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for module, name in functions():
        for kind in ("render", "to_json", "to_html"):
            if re.search(rf"(^|_){kind}(_|$)", name) and module != "blocks/reportable.py":
                found.setdefault(kind, set()).add(f"{module}:{name}")
    assert found == {
        "render": {"blocks/terminal.py:render"},
        "to_json": {"blocks/json.py:to_json"},
        "to_html": {"blocks/html.py:to_html"},
    }


def test_nobody_else_lays_out_a_terminal() -> None:
    rich = {
        path.relative_to(REPORT).as_posix()
        for path in REPORT.rglob("*.py")
        if re.search(r"^\s*(from|import) rich\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    # The live display is no report: it is redrawn while a search runs.
    assert rich == {"blocks/terminal.py", "blocks/columns.py", "progress.py"}


NAMES = ("dp:2,tp:4", "dp:8")
TABLE = Table(
    columns=(
        text_column("mesh", NAMES, most=8),
        figures_column("time", ["12.3 ms", "4.00 ms"]),
        figures_column("memory *", ["1.00 GiB", "<2 GiB>"]),
    ),
    dropped=("memory *",),
    narrow=(text_column("mesh", NAMES, most=4),),
    notes=(
        Note(mark="*", text="estimated", shown_with=("memory *",)),
        Note(mark="", text="memory is not shown", hidden_with=("memory *",)),
        Note(mark="", text="always"),
    ),
)


def drawn(*blocks: object, width: int = 80) -> str:
    report = Report(sections=(Section(blocks=blocks),))  # pyright: ignore[reportArgumentType]
    return render(report, width=width, colour=False)


def test_notes_go_with_the_columns_that_are_shown() -> None:
    wide = drawn(TABLE)
    assert "memory *" in wide and "* estimated" in wide and "not shown" not in wide
    narrow = drawn(
        Table(
            columns=(*TABLE.columns, figures_column("long", ["0" * 20] * 2)),
            dropped=TABLE.dropped,
            notes=TABLE.notes,
        ),
        width=40,
    )
    assert "GiB" not in narrow and "estimated" not in narrow
    assert "memory is not shown" in narrow and "always" in narrow


def test_columns_of_text_make_room_before_a_line_is_too_long() -> None:
    wide = Table(
        columns=(
            text_column("array", ["params['layer']['weight']"] * 2, most=25, of_keys=True),
            figures_column("time", ["12.3 ms", "4.00 ms"]),
            figures_column("bytes", ["1.00 GiB", "2.00 GiB"]),
        ),
        narrow=(text_column("array", ["params['layer']['weight']"] * 2, most=10, of_keys=True),),
    )
    lines = drawn(wide, width=40).splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert any(line.startswith("['weight']") for line in lines)


def test_what_is_empty_is_not_shown() -> None:
    nothing = (Table(columns=()), Table(columns=(figures_column("a", []),)), lines_of(("a", "")))
    sections = (Section(blocks=nothing), Section(blocks=()), Section(blocks=(Sentence(text="b"),)))
    report = Report(title="a", sections=sections)
    assert render(report, width=80, colour=False) == "a\n\nb\n"
    assert to_html(report) == "<h4>a</h4><p>b</p>"


def test_a_place_in_a_file_is_one_line_however_narrow_the_terminal() -> None:
    place = "src/" + "a" * 60 + ".py:12: a rule: and words"
    assert drawn(Sentence(text=place, is_whole=True), width=40) == f"{place}\n"
    assert len(drawn(Sentence(text=place), width=40).splitlines()) == 3


def test_a_log_is_not_folded() -> None:
    long = KeyValues(lines=(("next", "word " * 40),), width=11)
    report = Report(sections=(Section(blocks=(long,)),), is_folded=False)
    assert render(report, width=40, colour=False) == f"{'next':<12}{('word ' * 40).rstrip()}\n"


def test_html_shows_all_columns_and_reads_no_text_as_html() -> None:
    sections = (Section(title="<t>", blocks=(TABLE, lines_of(("a", f"1{GLUE}<b>")))),)
    said = to_html(Report(title="x & y", sections=sections))
    assert said.startswith("<h4>x &amp; y</h4><h5>&lt;t&gt;</h5><table><thead><tr><th>mesh</th>")
    assert "<td>&lt;2 GiB&gt;</td>" in said
    assert "</table><p>* estimated</p><p>always</p><p><strong>a</strong> 1 &lt;b&gt;</p>" in said


def test_facts_are_strict_json_and_made_only_where_they_are_wanted() -> None:
    def facts() -> dict[str, object]:
        made.append(1)
        return {"a": [float("nan"), 1.0], "b": {"c": float("inf")}}

    made: list[int] = []
    report = Report(sections=(Section(blocks=(Sentence(text="a"),)),), facts=facts)
    render(report, width=80, colour=False)
    assert not made
    assert to_json(report) == {"a": [None, 1.0], "b": {"c": None}}


@given(st.lists(st.text("ab,: ", max_size=12), max_size=4).map("\n".join), st.integers(1, 9))
def test_folding_a_cell_keeps_its_lines_and_letters(text: str, width: int) -> None:
    folded = wrapped(text, width)
    assert re.sub(r"\s", "", folded) == re.sub(r"\s", "", text)
    assert len(folded.split("\n")) >= len(text.split("\n"))
