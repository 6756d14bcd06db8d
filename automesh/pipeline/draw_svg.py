"""Draws a simulated pipeline as a self-contained SVG picture."""

from __future__ import annotations

from xml.etree import ElementTree

from automesh.errors import UsageError
from automesh.pipeline.actions import KIND_WORDS, ActionKind
from automesh.pipeline.simulate import Held, Simulated, Span, Transfer
from automesh.units import format_percent, format_seconds

# Okabe and Ito's colours, which colour-blind people can distinguish (jfly.uni-koeln.de/color).
_COLOURS: dict[ActionKind, str] = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0e442", "W": "#009e73"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 48, 40
_BAR, _HELD, _GAP = 24, 20, 12
_LANE = _BAR + _HELD + _GAP
_LETTER = 7
_MIN_WIDTH = 200


def draw_svg(simulated: Simulated, *, width: int = 1000) -> str:
    """Draws when each rank does what, the transfers between ranks, and what each rank holds.

    Each rank has a lane of actions, with its activations as steps below; lines between lanes are
    transfers. The mouse over an action shows its times.

    Args:
      width: of the picture in pixels.

    Returns:
      An SVG document.

    Raises:
      UsageError: fewer than 200 pixels.

    Example:
      >>> from automesh.pipeline import draw_svg, make_schedule, simulate
      >>> svg = draw_svg(simulate(make_schedule("1f1b", num_ranks=2, num_microbatches=3)))
      >>> svg.startswith("<svg"), svg.count("F0@1")
      (True, 1)
    """
    if width < _MIN_WIDTH:
        raise UsageError(f"a timeline needs at least {_MIN_WIDTH} pixels, got {width}")
    ranks = len(simulated.spans)
    height = _TOP + ranks * _LANE + _BOTTOM
    scale = (width - _LEFT - _RIGHT) / (simulated.makespan_s or 1.0)
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "sans-serif",
            "font-size": "12",
        },
    )
    _rect(svg, 0, 0, width, height, "#ffffff")
    _draw_frame(svg, simulated, width=width, height=height)
    for rank, spans in enumerate(simulated.spans):
        _draw_held(svg, simulated.held[rank], rank, scale=scale, end_s=simulated.makespan_s)
        for span in spans:
            _draw_span(svg, span, rank, scale=scale)
    for transfer in simulated.transfers:
        _draw_transfer(svg, transfer, scale=scale)
    return ElementTree.tostring(svg, encoding="unicode")


def _draw_frame(svg: ElementTree.Element, simulated: Simulated, *, width: int, height: int) -> None:
    schedule = simulated.schedule
    _text(
        svg,
        _LEFT,
        16,
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches; {format_seconds(simulated.makespan_s)}, "
        f"{format_percent(simulated.bubble)} bubble",
    )
    for rank, peak in enumerate(simulated.peak_live):
        top = _TOP + rank * _LANE
        _rect(svg, _LEFT, top, width - _LEFT - _RIGHT, _BAR, "#eeeeee")
        _text(svg, 8, top + 16, f"rank {rank}")
        _text(svg, 8, top + _BAR + 14, f"{peak} held", size=10)
    for index, kind in enumerate(simulated.kinds):
        _rect(svg, _LEFT + index * 130, 26, 12, 12, _COLOURS[kind])
        _text(svg, _LEFT + index * 130 + 16, 36, KIND_WORDS[kind])
    _text(svg, _LEFT, height - 12, "0")
    _text(svg, width - _RIGHT, height - 12, format_seconds(simulated.makespan_s), anchor="end")


def _draw_span(svg: ElementTree.Element, span: Span, rank: int, *, scale: float) -> None:
    action = span.action
    left, wide = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    top = _TOP + rank * _LANE
    box = _rect(svg, left, top, wide, _BAR, _COLOURS[action.kind], stroke="#ffffff")
    ElementTree.SubElement(box, "title").text = (
        f"{action} {KIND_WORDS[action.kind]}: {format_seconds(span.start_s)} to "
        f"{format_seconds(span.end_s)}"
    )
    label = str(action.microbatch)
    if _LETTER * len(label) <= wide:
        _text(svg, left + wide / 2, top + 16, label, anchor="middle")


def _draw_held(
    svg: ElementTree.Element, held: tuple[Held, ...], rank: int, *, scale: float, end_s: float
) -> None:
    base = _TOP + rank * _LANE + _BAR + _HELD
    most = max(one.activations for one in held)
    points = [(_LEFT + held[0].at_s * scale, float(base))]
    for one in held:
        x, y = _LEFT + one.at_s * scale, base - (_HELD - 2) * one.activations / most
        points += [(x, points[-1][1]), (x, y)]
    points += [(_LEFT + end_s * scale, points[-1][1]), (_LEFT + end_s * scale, float(base))]
    ElementTree.SubElement(
        svg,
        "polygon",
        {"points": " ".join(f"{x:.2f},{y:.2f}" for x, y in points), "fill": "#cccccc"},
    )


def _draw_transfer(svg: ElementTree.Element, transfer: Transfer, *, scale: float) -> None:
    down = transfer.to_rank > transfer.from_rank
    line = ElementTree.SubElement(
        svg,
        "line",
        {
            "x1": f"{_LEFT + transfer.start_s * scale:.2f}",
            "y1": str(_TOP + transfer.from_rank * _LANE + (_BAR if down else 0)),
            "x2": f"{_LEFT + transfer.end_s * scale:.2f}",
            "y2": str(_TOP + transfer.to_rank * _LANE + (0 if down else _BAR)),
            "stroke": "#555555",
        },
    )
    ElementTree.SubElement(line, "title").text = (
        f"{transfer.action} from rank {transfer.from_rank} to {transfer.to_rank}: "
        f"{format_seconds(transfer.start_s)} to {format_seconds(transfer.end_s)}"
    )


def _rect(
    svg: ElementTree.Element,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str = "none",
) -> ElementTree.Element:
    return ElementTree.SubElement(
        svg,
        "rect",
        {
            "x": f"{x:.2f}",
            "y": f"{y:.2f}",
            "width": f"{width:.2f}",
            "height": f"{height:.2f}",
            "fill": fill,
            "stroke": stroke,
        },
    )


def _text(
    svg: ElementTree.Element,
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
) -> None:
    attributes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor, "font-size": str(size)}
    ElementTree.SubElement(svg, "text", attributes).text = text
