"""The service's own pages in headless Chromium: logged in, listed, followed live, never run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from automesh.report.html.document import document_of
from automesh.report.html.page import page_text
from automesh_service.serve.limiter import Limiter
from automesh_service.serve.pages import MadePage, Pages, policy_of
from plugins.service.tests.serve.conftest import HOSTILE
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import Running, make_estimated, running_service
from tests.support.browser import open_browser, take_picture
from tests.support.cases.payloads import ALL, PAYLOADS, attacked
from tests.support.samples.page_samples import PAGES

NAME = "train-gpu-h100-16-0123abcd"
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A page with what it complains of, in `complaints`; reports are of a sample."""
    object.__setattr__(running.service, "limiter", Limiter())
    html = page_text(document_of(PAGES["hostile"]())).encode()
    made = MadePage(html=html, policy=policy_of(html), tag="x")
    monkeypatch.setattr(Pages, "page_of", lambda *_: made)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    opened = context.new_page()
    yield opened
    context.close()


def listen(page: Page) -> list[str]:
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    return complaints


def violations(page: Page) -> list[str]:
    """What axe-core finds serious or critical; it is put in past the page's own policy."""
    source = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(source)
    found: dict[str, Any] = page.evaluate(
        "axe.run(document, {resultTypes: ['violations'], iframes: false})"
    )
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}" for one in serious]


@pytest.mark.long
def test_a_person_logs_in_and_finds_a_study(page: Page, running: Running) -> None:
    complaints = listen(page)
    page.goto(running.url)
    page.get_by_label("Token").fill("amt_wrong")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_have_text("the token is not known here")
    # What the browser itself says of an answer with status 401.
    assert [one for one in complaints if "401" not in one] == []
    complaints.clear()
    page.goto(f"{running.url}/#token={running.tokens['read']}")
    page.reload()
    expect(page.locator("#who")).to_have_text("ann (read)")
    assert "token" not in page.url
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    assert violations(page) == []
    take_picture(page, "service-list")
    page.get_by_label("Words").fill("fsdp:4")
    page.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(1)
    page.get_by_role("link", name=NAME).click()
    expect(page.locator("#connection")).to_have_text("ended")
    expect(page.locator("#live")).to_contain_text("fsdp:4,tp:4")
    frame = page.frame_locator("iframe")
    expect(frame.locator("h1")).to_be_visible()
    assert violations(page) == []
    assert complaints == []


@pytest.mark.long
def test_a_submission_is_followed_live(page: Page, running: Running) -> None:
    complaints = listen(page)
    number = submit(running, running.send_bundle(BUNDLE)).json()["number"]
    job = running.service.home.job(number)
    job.mkdir()
    page.goto(f"{running.url}/#token={running.tokens['submit']}")
    page.goto(f"{running.url}/submissions/{number}")
    expect(page.locator("#state")).to_have_text("queued")
    store = running.service.store
    while (one := store.start_next()) and one.number != number:
        store.end(one.number, "cancelled", "not this one")
    expect(page.locator("#state")).to_have_text("running")
    log = job / "search.log"
    log.write_text("compile 1/9\n<img src=x onerror=alert(1)>\n")
    expect(page.locator("#log")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("#log img").count() == 0
    # The connection breaks, and goes on where it was.
    page.context.set_offline(True)
    with log.open("a") as more:
        more.write("compile 2/9\n")
    page.context.set_offline(False)
    expect(page.locator("#log")).to_contain_text("compile 2/9")
    assert page.locator("#log").inner_text().count("compile 1/9") == 1
    take_picture(page, "service-submission")
    page.get_by_role("button", name="Cancel").click()
    store.end(number, "cancelled", "cancelled; resume it to go on")
    expect(page.locator("#state")).to_have_text("cancelled")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#state")).to_have_text("queued")
    assert [one for one in complaints if "ERR_INTERNET_DISCONNECTED" not in one] == []


@pytest.mark.long
def test_nothing_that_others_wrote_is_run(page: Page, running: Running) -> None:
    complaints = listen(page)
    page.goto(f"{running.url}/#token={running.tokens['read']}")
    page.goto(f"{running.url}/studies/{quote(HOSTILE, safe='')}")
    expect(page.locator("h1").first).to_have_text(HOSTILE)
    frame = page.frame_locator("iframe")
    expect(frame.locator("h1")).to_be_visible()
    expect(page.locator("#connection")).to_have_text("ended")
    (inner,) = [one for one in page.frames if one.parent_frame is not None]
    # The report is of no origin: it sees neither the token nor the API.
    assert inner.evaluate("self.origin") == "null"
    look = "(() => { try { return parent.sessionStorage.length } catch { return -1 } })()"
    seen = inner.evaluate(look)
    assert seen == -1
    reached = inner.evaluate("fetch('/v1/health').then(() => true, () => false)")
    assert reached is False
    assert page.evaluate("window.hacked") is None
    assert inner.evaluate("window.hacked") is None
    assert not any(one.startswith("dialog") for one in complaints)


@pytest.mark.long
def test_no_payload_runs_in_any_page(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of studies, devices, plans and exceptions, and lines of a log, with all payloads."""
    for number, payload in enumerate(PAYLOADS):
        # A folder's name has no slash; everything else stays.
        name = f"{number} {payload}".replace("/", "\u2215")[:200]
        make_estimated(tmp_path / "results" / name, workload=payload, device_kind=payload)
    broken = tmp_path / "results" / "broken"
    broken.mkdir()
    (broken / "study.db").write_bytes(ALL.encode())
    html = page_text(attacked(document_of(PAGES["pipelined"]()))).encode()
    made = MadePage(html=html, policy=policy_of(html), tag="x")
    monkeypatch.setattr(Pages, "page_of", lambda *_: made)
    with running_service(tmp_path) as running:
        number = submit(running, running.send_bundle(BUNDLE)).json()["number"]
        job = running.service.home.job(number)
        job.mkdir()
        (job / "search.log").write_text("\n".join(PAYLOADS))
        store = running.service.store
        store.start_next()
        store.end(number, "failed", ALL)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(60_000)
        page = context.new_page()
        complaints = listen(page)
        page.goto(f"{running.url}/#token={running.tokens['submit']}")
        page.reload()
        expect(page.locator("tbody tr").first).to_be_visible()
        assert page.locator("tbody tr").count() > 30
        for name in [f"{n} {PAYLOADS[n]}".replace("/", "\u2215")[:200] for n in (1, 9, 17)]:
            page.goto(f"{running.url}/studies/{quote(name, safe='')}")
            expect(page.locator("h1").first).to_be_visible()
            expect(page.frame_locator("iframe").locator("h1")).to_be_visible()
            for frame in page.frames:
                assert frame.evaluate("window.hacked") is None
        page.goto(f"{running.url}/submissions/{number}")
        expect(page.locator("#state")).to_have_text("failed")
        expect(page.locator("#log")).to_contain_text(PAYLOADS[3])
        assert page.evaluate("window.hacked") is None
        assert complaints == []
        context.close()
