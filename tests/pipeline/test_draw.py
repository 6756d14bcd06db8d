"""The timelines: text to the letter, and a picture that says the same."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from automesh.errors import UsageError
from automesh.pipeline import (
    SCHEDULES,
    StageCost,
    draw_svg,
    draw_text,
    make_schedule,
    parse_schedule,
    simulate,
)

SVG = "{http://www.w3.org/2000/svg}"

ONE_F_ONE_B = """\
1f1b: 4 ranks, 4 stages, 6 microbatches
27.0 s, of which 33 % bubble
rank 0 |F0-F1-F2-F3-..................B0====F4-B1====F5-B2====...B3====...B4====...B5====| 4 held
rank 1 |...F0-F1-F2-............B0====F3-B1====F4-B2====F5-B3====...B4====...B5====......| 3 held
rank 2 |......F0-F1-......B0====F2-B1====F3-B2====F4-B3====F5-B4====...B5====............| 2 held
rank 3 |.........F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====F5-B5====..................| 1 held
F forward, B backward, . idle; held: the most activations at a time"""

HALVES = """\
zb_h1: 2 ranks, 2 stages, 3 microbatches
19.0 ms, of which 21 % bubble
rank 0 |F0-------F1-------.....I0~W0+F2-------I1~W1+.......I2~W2+| 2 held
rank 1 |.........F0-------I0~F1-------I1~W0+..F2-------I2~W1+W2+.| 2 held
F forward, I input gradient, W weight gradient, . idle; held: the most activations at a time"""


def test_text() -> None:
    simulated = simulate(make_schedule("1f1b", num_ranks=4, num_microbatches=6))
    assert draw_text(simulated) == ONE_F_ONE_B
    cost = StageCost(
        forward_s=3e-3, input_gradient_s=1e-3, weight_gradient_s=1e-3, to_previous_s=5e-4
    )
    simulated = simulate(make_schedule("zb_h1", num_ranks=2, num_microbatches=3), cost)
    assert draw_text(simulated) == HALVES


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 79, 200])
def test_lines_are_of_one_length_and_fit(name: str, width: int) -> None:
    cost = StageCost(to_next_s=0.25, to_previous_s=0.75)
    simulated = simulate(make_schedule(name, num_ranks=3, num_microbatches=12), cost)
    rows = [line for line in draw_text(simulated, width=width).splitlines() if "|" in line]
    assert len(rows) == 3
    assert {row.index("|") for row in rows} == {7}
    assert len({row.rindex("|") for row in rows}) == 1
    assert max(map(len, rows)) <= width


def test_stages_that_are_not_the_ranks_own_are_named() -> None:
    simulated = simulate(parse_schedule(["F0@0 F0@1 B0@1 B0@0"], name="alone"))
    assert "rank 0 |F0---F0@1-B0@1======B0========| 2 held" in draw_text(simulated)


def test_a_step_without_duration_has_no_columns() -> None:
    nothing = StageCost(forward_s=0, backward_s=0)
    simulated = simulate(make_schedule("gpipe", num_ranks=2, num_microbatches=2), nothing)
    assert "rank 1 || 2 held" in draw_text(simulated)
    ElementTree.fromstring(draw_svg(simulated))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_has_every_action_and_transfer(name: str) -> None:
    cost = StageCost(to_next_s=0.5, to_previous_s=0.25)
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6)
    simulated = simulate(schedule, cost)
    svg = ElementTree.fromstring(draw_svg(simulated, width=800))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    drawn = {}
    for box in svg.iter(f"{SVG}rect"):
        left, top = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 <= left <= left + float(box.attrib["width"]) <= width + 0.01
        assert 0 <= top <= top + float(box.attrib["height"]) <= height
        title = box.find(f"{SVG}title")
        if title is not None:
            assert title.text is not None
            drawn[title.text.split()[0]] = (left, top)
    assert set(drawn) == {str(action) for _, action in schedule.order}
    for spans in simulated.spans:
        lefts = [drawn[str(one.action)][0] for one in spans]
        assert lefts == sorted(lefts)
        assert len({drawn[str(one.action)][1] for one in spans}) == 1
    lines = svg.findall(f"{SVG}line")
    assert len(lines) == len(simulated.transfers) > 0
    assert len(svg.findall(f"{SVG}polygon")) == 3


def test_a_name_is_text_in_the_picture() -> None:
    simulated = simulate(parse_schedule(["F0 B0"], name="<b>&"))
    assert ElementTree.fromstring(draw_svg(simulated)).findtext(f"{SVG}text", "").startswith("<b>&")


def test_too_narrow() -> None:
    simulated = simulate(make_schedule("gpipe", num_ranks=2, num_microbatches=2))
    with pytest.raises(UsageError, match="a timeline needs at least 40 columns, got 39"):
        draw_text(simulated, width=39)
    with pytest.raises(UsageError, match="a timeline needs at least 200 pixels, got 199"):
        draw_svg(simulated, width=199)
