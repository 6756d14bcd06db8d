"""Command templates: what they say, what they are refused for, and that they survive printing."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan, spelled
from automesh.space.space import AxisRange, Constraint, Knob, SearchSpace
from automesh.space.spec import read_space
from automesh.tuner.command.space import restricted, space_of
from automesh.tuner.command.template import (
    Placeholder,
    Template,
    find_program,
    parse_template,
)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name != "run_dir"
)
PLACEHOLDERS = st.builds(Placeholder, name=NAMES, part=st.sampled_from(["", "ici", "dcn"]))
TEXTS = st.text(
    st.characters(exclude_categories=["C"], exclude_characters="$"), min_size=1, max_size=12
)


def merged(pieces: list[str | Placeholder]) -> tuple[str | Placeholder, ...]:
    """As a template holds them: no text beside another."""
    found: list[str | Placeholder] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return tuple(found) or ("",)


WORDS = st.lists(st.one_of(TEXTS, PLACEHOLDERS), max_size=4).map(merged)
SHELL = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
TEMPLATES = st.lists(WORDS, max_size=5).map(lambda words: Template(words=(("python",), *words)))


def is_for_a_shell(template: Template) -> bool:
    return any(word in SHELL for word in template.constants)


@given(TEMPLATES.filter(lambda template: not is_for_a_shell(template)))
def test_what_is_printed_is_read_back(template: Template) -> None:
    assert parse_template(str(template)) == template


@given(TEMPLATES.filter(lambda template: not is_for_a_shell(template)), st.data())
def test_filling_in_is_what_format_does(template: Template, data: st.DataObject) -> None:
    values = {one: data.draw(st.text(max_size=5)) for one in template.placeholders}
    # Python's own formatting as the oracle; it knows no names with a dot.
    names = {one: f"p{number}" for number, one in enumerate(values)}
    for word, filled in zip(template.words, template.fill(values), strict=True):
        spoken = "".join(
            f"{{{names[piece]}}}"
            if isinstance(piece, Placeholder)
            else piece.replace("{", "{{").replace("}", "}}")
            for piece in word
        )
        assert filled == spoken.format(**{names[one]: text for one, text in values.items()})


def test_the_words_of_a_plan() -> None:
    template = parse_template(
        "python -m t 'a b' x={{{fsdp}}} ici={ici.fsdp} dcn={dcn.fsdp} {tp}{tp} "
        "--r={remat} {run_dir}"
    )
    plan = Plan(
        axes=(MeshAxis(name="fsdp", ici=4, dcn=2), MeshAxis(name="tp")), knobs=(("remat", True),)
    )
    words = template.for_plan(plan, run_dir="/tmp/run")
    assert words[3:] == ("a b", "x={8}", "ici=4", "dcn=2", "11", "--r=true", "/tmp/run")
    assert [str(one) for one in template.placeholders] == [
        *("{fsdp}", "{ici.fsdp}", "{dcn.fsdp}", "{tp}", "{remat}", "{run_dir}")
    ]


@pytest.mark.parametrize(
    ("value", "word"), [(False, "false"), (3, "3"), (1e-4, "0.0001"), ("a b", "a b")]
)
def test_knobs_are_spelled_as_in_toml(value: bool | float | str, word: str) -> None:
    assert spelled(value) == word


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the command is empty"),
        ("python 'train.py", "cannot be split into words: no closing quotation"),
        ("python train.py {fsdp", "has a single `{`"),
        ("python train.py fsdp}", "has a single `}`"),
        ("python train.py {}", "`{}` in the command is not the name"),
        ("python train.py '{\"a\": 1}'", "is not the name of an axis or a knob"),
        ("python train.py {ice.fsdp}", "`{ice.fsdp}` in the command is not the name"),
        ("python train.py {dcn.run_dir}", "has no parts"),
        ("python train.py ${HOME}", "`${HOME}` in the command is a variable to a shell only"),
        ("python train.py {fsdp} | tee log", "`|` in the command means something to a shell only"),
        ("X=1 python train.py {fsdp}", "sets a variable only in a shell"),
        ("{fsdp} train.py", "every plan needs the same program"),
    ],
)
def test_what_is_no_template(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        parse_template(text)
    assert error.value.hint


def test_the_program_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_program(parse_template(f"{shlex.quote(sys.executable)} {{tp}}")) == sys.executable
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n")
    for text, message in (
        ("pyhton train.py {tp}", "`pyhton`, and there is no such program"),
        ("./run.sh {tp}", "may not be executed"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            find_program(parse_template(text))
    script.chmod(0o755)
    assert find_program(parse_template("./run.sh {tp}")) == str(script)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match="cannot be run by itself") as error:
        find_program(parse_template("train.py {tp}"))
    assert error.value.hint == "begin with Python: `python train.py ...`"


# Spaces

OWN = SearchSpace(
    name="own.toml",
    shipped=False,
    names=("dp", "fsdp", "tp"),
    axes=(
        AxisRange(name="dp", dcn=True),
        AxisRange(name="fsdp", dcn=True),
        AxisRange(name="tp", maximum=4),
    ),
    knobs=(Knob(name="remat", values=("none", "full")),),
)


def test_without_a_space_the_axes_are_those_that_are_named() -> None:
    found = space_of(parse_template("x {tp} {ici.data} {dcn.data} {ici.sp} {run_dir} {tp}"))
    assert found.space.names == ("tp", "data", "sp")
    assert [axis.dcn for axis in found.space.axes] == [True, True, False]
    assert found.space.knobs == found.notices == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x y", "names no mesh axis"),
        ("x {run_dir}", "names no mesh axis"),
        ("x {dcn.data}", "says nothing of the part of `data` inside a granule"),
    ],
)
def test_templates_without_sizes(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        space_of(parse_template(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x {dp} {fsdp} {tp} {remta}",
            "neither an axis nor a knob of the search space `own.toml` (did you mean `remat`?)",
        ),
        ("x {dp} {fsdp} {remat}", "has the axis `tp`, which the command does not name"),
        ("x {dp} {fsdp} {tp}", "has the knob `remat`, which the command does not name"),
        ("x {dp} {fsdp} {tp} {ici.remat}", "names a part of `remat`, which is a knob"),
        ("x {dcn.dp} {fsdp} {tp} {remat}", "says nothing of the part of `dp`"),
        ("x {remat}", "names no axis of the search space"),
    ],
)
def test_what_a_space_of_ones_own_does_not_allow(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        restricted(OWN, parse_template(text))
    assert error.value.hint


def test_a_shipped_space_gives_what_can_be_expressed() -> None:
    found = restricted(read_space("dense_lm"), parse_template("x {fsdp} {tp} --r {remat}"))
    assert found.space.names == ("fsdp", "tp")
    assert [knob.name for knob in found.space.knobs] == ["remat"]
    said = " ".join(found.notices)
    assert "`dp`" in said and "`microbatches`" in said and "states no facts" in said
    enumeration = found.enumerate(
        parse_template("x {fsdp} {tp} --r {remat}"), num_devices=8, num_granules=1, platform="cpu"
    )
    assert all(plan.num_devices == 8 for plan in enumeration.legal)


def test_an_axis_that_is_left_out_has_the_size_one_in_constraints() -> None:
    from dataclasses import replace

    space = replace(
        OWN,
        shipped=True,
        constraints=(
            Constraint(factors=("dp", "fsdp"), relation="max", bound=4),
            Constraint(factors=("dp",), relation="max", bound=2),
            Constraint(factors=("tp",), relation="divides", bound="num_heads"),
        ),
    )
    found = restricted(space, parse_template("x {fsdp} {tp} {remat}"))
    assert [str(one) for one in found.space.constraints] == ["fsdp max 4"]
    plans = found.enumerate(
        parse_template("x {fsdp} {tp} {remat}"), num_devices=8, num_granules=1, platform="cpu"
    ).legal
    assert {plan.mesh for plan in plans} == {"fsdp:4,tp:2", "fsdp:2,tp:4"}
    with pytest.raises(UsageError, match="refers to the fact `num_heads`"):
        restricted(replace(space, shipped=False), parse_template("x {dp} {fsdp} {tp} {remat}"))


def test_plans_with_the_same_command_are_one() -> None:
    template = parse_template("x {fsdp} {tp}")
    found = space_of(template).enumerate(template, num_devices=8, num_granules=2, platform="tpu")
    commands = [template.for_plan(plan, run_dir="") for plan in found.legal]
    assert len(commands) == len(set(commands)) == 4
    assert any("granules" in notice for notice in found.notices)
    split = parse_template("x {ici.fsdp} {dcn.fsdp} {ici.tp}")
    apart = space_of(split).enumerate(split, num_devices=8, num_granules=2, platform="tpu")
    assert {plan.mesh for plan in apart.legal} == {
        *("dcn.fsdp:2,fsdp:4", "dcn.fsdp:2,fsdp:2,tp:2", "dcn.fsdp:2,tp:4")
    }
    assert not apart.notices
