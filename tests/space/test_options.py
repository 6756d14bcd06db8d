"""Compiler options and reserves as they are typed, and the room that a reserve leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.hardware.chips import chip_called
from automesh.hardware.reserve import default_reserve, parse_reserve
from automesh.outcomes import Failed, OutOfMemory
from automesh.space.curated import curated_for, curated_options
from automesh.space.options import knobs_of, parse_options, with_options
from automesh.space.spec import read_space
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from automesh.tuner.compile.rung import known_names, refuse_options
from tests.tuner.choose.test_ahead_of_time import compiled

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("xla_a=5", (5,)),
        ("xla_a=default,1000000", ("default", 1000000)),
        ("xla_a=true", (True,)),
        ("xla_a=True,False", (True, False)),
        ("xla_a=0.5,1e6", (0.5, 1e6)),
        ("xla_a=FAST, SLOW", ("FAST", "SLOW")),
        ("xla_a='5'", ("5",)),
        ('xla_a="a,b",c', ("a,b", "c")),
        ("--xla_a=1,true", (1, True)),
    ],
)
def test_options_have_types(text: str, values: tuple[object, ...]) -> None:
    (knob,) = parse_options([text])
    assert knob.name == "xla_a"
    assert [(type(one), one) for one in knob.values] == [(type(one), one) for one in values]


@given(
    values=st.lists(
        st.one_of(
            st.booleans(),
            st.integers(-(2**40), 2**40),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text("abc_ ,'x", max_size=6),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda one: (type(one), one),
    )
)
def test_what_toml_can_say_is_read_back(values: list[bool | int | float | str]) -> None:
    text = ",".join(json.dumps(one) for one in values)
    (knob,) = parse_options([f"xla_a={text}"])
    assert [(type(one), one) for one in knob.values] == [(type(one), one) for one in values]
    assert knobs_of({"xla_a": values}) == (knob,)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["xla_a"], "is not of the form NAME=VALUE"),
        (["=5"], "is not of the form NAME=VALUE"),
        (["xla a=5"], "is not of the form NAME=VALUE"),
        (["xla_a="], "is given no value"),
        (["xla_a=nan"], "a number that is not finite"),
        (["xla_a=5", "xla_a=5"], "is given a value twice"),
    ],
)
def test_what_is_no_option_is_said(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(texts)


def test_options_of_the_command_line_replace_those_of_the_space(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text("[axes]\ndp = {}\n[compiler_options.tpu]\nxla_a = [1, 2]\nxla_b = [3, 4]\n")
    space = with_options(read_space(str(path)), parse_options(["xla_a=9", "xla_c=default,1"]))
    named = {
        platform: {knob.name: knob.values for knob in space.options_for(platform)}
        for platform in ("cpu", "gpu", "tpu")
    }
    assert named["tpu"] == {"xla_b": (3, 4), "xla_a": (9,), "xla_c": ("default", 1)}
    assert named["cpu"] == named["gpu"] == {"xla_a": (9,), "xla_c": ("default", 1)}
    assert with_options(space, ()) is space


def test_curated_options_have_reasons_and_a_default() -> None:
    for one in curated_options():
        assert one.values[0] == "default" and len(one.values) > 1
        assert one.reason.endswith(".") and one.source
        known = {chip_called(slug).platform for slug in one.generations}
        assert known <= {one.platform}
    single = {knob.name for knob in curated_for("tpu", "v5litepod", 1)}
    several = {knob.name for knob in curated_for("tpu", "v5litepod", 2)}
    assert single < several
    assert curated_for("gpu", "h100", 2) == ()


def test_a_refused_option_ends_a_search_and_other_failures_do_not() -> None:
    refuse_options(Failed(stage="compile", reason="it did not compile"))
    refuse_options(None)
    reason = "the compiler option `xla_x` is wrong: not a bool"
    with pytest.raises(UsageError, match=r"xla_x.*wrong"):
        refuse_options(Failed(stage="compile", reason=reason))


def test_the_options_of_installed_compilers_are_known() -> None:
    # Of XLA's CPU compiler, in jaxlib's own binary.
    assert "xla_cpu_enable_fast_math" in known_names()
    with pytest.raises(UsageError, match=r"did you mean `xla_cpu_enable_fast_math`"):
        reason = "this compiler has no option `xla_cpu_enable_fast_maths`"
        refuse_options(Failed(stage="compile", reason=reason))


@pytest.mark.parametrize(
    ("text", "of_16_gib"),
    [("1GiB", GIB), ("25%", 4 * GIB), ("0", 0), (" 0.5 % ", 85899346), ("512MiB", GIB // 2)],
)
def test_reserves_are_sizes_or_shares(text: str, of_16_gib: int) -> None:
    assert parse_reserve(text).of(16 * GIB) == of_16_gib


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "100%", "250%", "5 percent"])
def test_other_reserves_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reserve(text)


def test_without_a_word_every_platform_has_its_reserve() -> None:
    assert default_reserve("tpu", {}).of(16 * GIB) == 256 * 2**20
    assert default_reserve("gpu", {}).of(80 * GIB) == 20 * GIB
    assert default_reserve("cpu", {}).of(16 * GIB) == 0
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        reserve = default_reserve("gpu", {name: "0.9"})
        assert reserve.of(80 * GIB) == pytest.approx(8 * GIB, abs=1)
        with pytest.raises(UsageError, match=rf"`{name}` is `90`, which is no part of a GPU's"):
            default_reserve("gpu", {name: "90"})


def test_the_room_is_judged_when_it_is_looked_at() -> None:
    device_memory = DeviceMemory(limit_bytes=16 * GIB, reserve_bytes=GIB)
    assert device_memory.judged(compiled(15 * GIB)) == compiled(15 * GIB)
    refused = device_memory.judged(compiled(15 * GIB + 1))
    assert isinstance(refused, OutOfMemory)
    assert (refused.needed_bytes, refused.limit_bytes) == (15 * GIB + 1, 16 * GIB)
    assert refused.reserve_bytes == GIB and "in reserve" in refused.detail
    wider = replace(device_memory, reserve_bytes=0)
    assert wider.judged(compiled(16 * GIB)) == compiled(16 * GIB)
    assert NO_LIMIT.judged(compiled(999 * GIB)) == compiled(999 * GIB)


def test_memory_of_this_machine_is_not_that_of_the_device() -> None:
    device_memory = DeviceMemory(limit_bytes=16 * GIB, reserve_bytes=GIB)
    here = OutOfMemory(stage="compile", needed_bytes=9, limit_bytes=8 * GIB, detail="")
    there = replace(here, limit_bytes=16 * GIB)
    assert device_memory.judged(replace(there, is_host=True)) == replace(there, is_host=True)
    # The compiler's own limit is above one that the user has set.
    lower = DeviceMemory(limit_bytes=12 * GIB, reserve_bytes=GIB)
    assert lower.judged(there) == replace(there, reserve_bytes=GIB)
    assert device_memory.judged(here) == here
    assert device_memory.judged(there) == replace(there, reserve_bytes=GIB)
