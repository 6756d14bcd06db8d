"""A headless Chromium for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable", "chrome"),
)
VARIABLE = "AUTOMESH_CHROMIUM"
SLOW_MS = 120_000.0  # a machine with other work
PICTURES = "AUTOMESH_PICTURES"
"""Of the environment: a folder for a picture of every page that is opened, to be looked at."""


def find_browser() -> str:
    """Path of a Chromium: of the environment, of the system, or one that Playwright has fetched."""
    own = os.environ.get(VARIABLE, "")
    found = own or next(filter(None, map(shutil.which, NAMES)), "")
    if not found:
        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
        found = path if Path(path).exists() else ""
    return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = find_browser()
    if not path:
        pytest.skip(
            "no Chromium was found: `apt-get install chromium`, `playwright install chromium`, or "
            f"${VARIABLE}"
        )
    with sync_playwright() as playwright:
        # Tests may run as root, whom Chromium refuses its sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass(kw_only=True)
class Opened:
    """A page with what it has complained of and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing was complained of, nothing was asked for but the page itself."""
        assert self.complaints == []
        assert [
            one for one in self.requests if not one.startswith(("file:", "data:", "blob:"))
        ] == []
        assert sum(one.startswith("file:") for one in self.requests) == 1


def open_page(
    browser: Browser, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Opened:
    """Opens a file and waits until all of its charts are drawn."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # pyright: ignore[reportArgumentType]
    )
    context.set_default_timeout(SLOW_MS)
    opened = Opened(page=context.new_page())
    opened.page.on("console", lambda said: opened.complaints.append(f"{said.type}: {said.text}"))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on("request", lambda request: opened.requests.append(request.url))
    opened.page.goto(path.as_uri())
    wait_for_charts(opened.page)
    take_picture(opened.page, f"{path.stem}-{width}-{scheme}")
    return opened


def take_picture(page: Page, name: str) -> None:
    """A picture of the whole page, if anybody asked for pictures."""
    folder = os.environ.get(PICTURES, "")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, timeout=SLOW_MS)


def first_paint_ms(page: Page) -> dict[str, float]:
    """`first-paint` and `first-contentful-paint` of an open page, in milliseconds since it was
    asked for; waits until both were."""
    page.wait_for_function(
        "performance.getEntriesByType('paint').length >= 2", timeout=SLOW_MS, polling=50
    )
    return page.evaluate(
        "Object.fromEntries(performance.getEntriesByType('paint')"
        ".map(one => [one.name, one.startTime]))"
    )


def wait_for_charts(page: Page) -> None:
    page.wait_for_selector(
        "html[data-ready=true][data-charts=done]", state="attached", timeout=SLOW_MS
    )
