"""The page in headless Chromium: clicked, sorted, filtered, zoomed, compared, read by axe-core."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from automesh import units
from automesh.report.html.document import document_of
from automesh.report.html.page import page_text
from tests.support.browser import (
    Opened,
    first_paint_ms,
    open_browser,
    open_page,
    take_picture,
    wait_for_charts,
)
from tests.support.cases.payloads import attacked
from tests.support.samples.page_samples import EXAMPLES, PAGES, REAL

FIRST_PAINT_S = 1.5
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


class Written(dict[str, Path]):
    """Pages by name, written when they are asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = path = self.folder / f"{name}.html"
        path.write_text(page_text(document_of(PAGES[name]())), encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("pages"))


def closed(opened: Opened) -> None:
    opened.check()
    opened.page.context.close()


def violations(page: Page) -> list[str]:
    """What axe-core finds serious or critical."""
    source = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(source)
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_without_complaints_and_can_be_read_by_all(
    browser: Browser, written: dict[str, Path], name: str
) -> None:
    scheme = "dark" if name in ("moe_lm", "pipelined", "slices") else "light"
    opened = open_page(browser, written[name], scheme=scheme)
    page = opened.page
    assert violations(page) == []
    assert (
        page.locator(".chart svg.marks, .chart canvas.marks").count()
        == page.locator(".chart").count()
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert page.evaluate("window.hacked") is None
    closed(opened)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipelined", "failed", "dense_lm"])
def test_nothing_runs_of_what_others_wrote(browser: Browser, tmp_path: Path, name: str) -> None:
    """Every text of the page has all payloads: nothing runs, and the policy has nothing to say."""
    path = tmp_path / f"{name}.html"
    path.write_text(page_text(attacked(document_of(PAGES[name]()))), encoding="utf-8")
    opened = open_page(browser, path)
    # Also by who moves over it, and opens what is closed.
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    for chart in opened.page.locator(".chart").all()[:3]:
        chart.hover(force=True)
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("iframe, object, base, [onerror], [onload]").count() == 0
    closed(opened)


@pytest.mark.parametrize("name", ["dense_lm", "replayed", *REAL])
def test_a_phone_needs_no_scrolling_sideways(
    browser: Browser, written: dict[str, Path], name: str
) -> None:
    opened = open_page(browser, written[name], width=390, height=844)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(opened.page) == []
    closed(opened)


@pytest.mark.parametrize("name", ["dense_lm", *REAL])
def test_a_printed_page_is_light_and_has_no_buttons(
    browser: Browser, written: dict[str, Path], name: str
) -> None:
    opened = open_page(browser, written[name], width=760, scheme="dark")
    page = opened.page
    page.emulate_media(media="print")
    take_picture(page, f"{name}-printed")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("nav").is_hidden() and page.locator("#theme").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 760
    assert len(page.pdf(format="A4")) > 10_000
    closed(opened)


def test_sorting_and_filtering(browser: Browser, written: dict[str, Path]) -> None:
    opened = open_page(browser, written["large"])
    page = opened.page
    rows = page.locator("#plan-table tbody tr")
    count = page.locator("#plan-count")
    expect(rows).to_have_count(20)
    expect(count).to_contain_text("of 5,000 plans")
    memory = page.get_by_role("button", name="memory per device")
    memory.click()
    head = page.locator("#plan-table th", has_text="memory per device")
    expect(head).to_have_attribute("aria-sort", "ascending")
    lowest = rows.nth(0).inner_text()
    memory.click()
    expect(head).to_have_attribute("aria-sort", "descending")
    assert rows.nth(0).inner_text() != lowest
    page.get_by_label("Filter plans by words").fill("fsdp:8 remat=dots")
    expect(count).to_contain_text("(5,000 in all)")
    texts = rows.all_inner_texts()
    assert texts and all("fsdp:8" in text and "remat=dots" in text for text in texts)
    page.get_by_label("Filter plans by words").fill("no such plan")
    expect(count).to_have_text("no plan matches")
    page.get_by_label("Filter plans by words").fill("")
    page.get_by_label("evidence").first.select_option("measured")
    assert all("measured" in text for text in rows.all_inner_texts())
    page.get_by_label("evidence").first.select_option("")
    page.get_by_role("button", name="Next").click()
    expect(count).to_contain_text("21 to 40")
    closed(opened)


@pytest.mark.parametrize("name", ["replayed", "slice", "slices"])
def test_zooming_into_a_timeline(browser: Browser, written: dict[str, Path], name: str) -> None:
    opened = open_page(browser, written[name])
    page = opened.page
    said = page.locator("#timeline-span")
    whole = said.inner_text()
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    assert said.inner_text() != whole
    closer = said.inner_text()
    page.get_by_role("button", name="Later").click()
    assert said.inner_text() != closer
    page.get_by_role("button", name="Whole step").click()
    expect(said).to_have_text(whole)
    strip = page.get_by_role("group", name="The whole step; drag over a part of it")
    box = strip.bounding_box()
    assert box is not None
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 15)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 15, steps=4)
    page.mouse.up()
    expect(said).not_to_have_text(whole)
    closed(opened)


def test_comparing_two_plans(browser: Browser, written: dict[str, Path]) -> None:
    opened = open_page(browser, written["dense_lm"])
    page = opened.page
    compare = page.locator("#compare")
    before = compare.locator(".takeaway").inner_text()
    compare.get_by_label("B", exact=True).select_option("3")
    expect(compare.locator(".takeaway")).not_to_have_text(before)
    expect(compare.locator("#pair-table tbody tr").first).to_contain_text("step")
    compare.get_by_label("A", exact=True).select_option("3")
    expect(compare).to_contain_text("Choose two different plans.")
    page.locator("#collectives").get_by_label("plan", exact=True).select_option("1")
    page.locator("#placement").get_by_label("axis", exact=True).select_option("0")
    page.locator("#theme").click()
    wait_for_charts(page)
    closed(opened)


@pytest.mark.parametrize("name", ["slice", "slices", "ranks"])
def test_a_real_study_is_sorted_filtered_and_compared(
    browser: Browser, written: dict[str, Path], name: str
) -> None:
    opened = open_page(browser, written[name])
    page = opened.page
    rows = page.locator("#plan-table tbody tr")
    whole = rows.count()
    assert whole > 1
    page.get_by_role("button", name="memory per device").click()
    head = page.locator("#plan-table th", has_text="memory per device")
    expect(head).to_have_attribute("aria-sort", "ascending")
    words = page.get_by_label("Filter plans by words")
    words.fill("no such plan")
    expect(page.locator("#plan-count")).to_have_text("no plan matches")
    words.fill("")
    expect(rows).to_have_count(whole)
    compare = page.locator("#compare")
    if name == "slices":  # Of the others one plan alone is broken down.
        compare.get_by_label("A", exact=True).select_option("0")
        compare.get_by_label("B", exact=True).select_option("1")
        expect(compare.locator("#pair-table tbody tr").first).to_contain_text("step")
    closed(opened)


def test_the_rule_can_be_copied_and_figures_opened(
    browser: Browser, written: dict[str, Path]
) -> None:
    opened = open_page(browser, written["moe_lm"])
    page = opened.page
    page.get_by_role("button", name="Copy the rule").click()
    expect(page.locator("#rule [role=status]")).not_to_be_empty()
    summary = page.locator("#causes details.data summary")
    summary.click()
    expect(page.locator("#causes details.data table")).to_be_visible()
    closed(opened)


def test_five_thousand_plans_are_painted_at_once(
    browser: Browser, written: dict[str, Path]
) -> None:
    assert written["large"].stat().st_size <= 6e6
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    # Seconds of the page's thread, not of the clock: other work on the machine does not count.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(written["large"].as_uri(), wait_until="commit")
    page.wait_for_selector("#plan-table tbody tr")
    spent = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    painted = first_paint_ms(page)
    size = written["large"].stat().st_size
    print(f"main thread {spent['TaskDuration']} s, first paint {painted} ms, {size} bytes")
    assert painted["first-contentful-paint"] > 0
    assert spent["TaskDuration"] <= FIRST_PAINT_S
    page.close()


def test_figures_are_written_as_on_the_terminal(browser: Browser, written: dict[str, Path]) -> None:
    opened = open_page(browser, written["failed"])
    values = [0.0, 3e-10, 9.4e-6, 0.0123, 0.09994, 0.9996, 1.5, 75.2, 999.6, 12345.0, 2.0**31]
    for name, format_one in (
        ("seconds", units.format_seconds),
        ("bytes", units.format_bytes),
        ("percent", units.format_percent),
        ("factor", units.format_factor),
    ):
        written_there = opened.page.evaluate(
            f"values => values.map(one => automeshPage.Format.{name}(one))", values
        )
        assert written_there == [format_one(value) for value in values], name
    closed(opened)


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_parts_are_there(browser: Browser, written: dict[str, Path], name: str) -> None:
    opened = open_page(browser, written[name])
    parts = opened.page.locator("main section").evaluate_all("all => all.map(one => one.id)")
    assert parts == [
        *("rule", "plans", "tradeoff", "causes", "compare", "collectives", "memory"),
        *("placement", "rounds", "predictions", "funnel", "evidence", "left-out"),
    ]
    closed(opened)
