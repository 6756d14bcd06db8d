"""How soon the page of a study with 5,000 plans is painted, and how large its file is.

The page is opened in a headless Chromium several times, each time in a new context, from its file.
What is told, in seconds, by the browser's own clock: until the first paint with content, until the
table of plans is there, and until all charts are drawn; and the time that the thread of the page
worked until the table was there, to which other work on the machine adds nothing. With `--check`
the exit code is 1 if the median of the first paint or the size of the file is more than it may be.
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from automesh.report.html.document import document_of
from automesh.report.html.page import page_text
from tests.support.browser import SLOW_MS, first_paint_ms, open_browser, wait_for_charts
from tests.support.samples.page_samples import large

FIRST_PAINT_S = 1.5
FILE_BYTES = 6e6
_NOW_S = "performance.now() / 1000"


def opened(browser: Browser, path: Path) -> dict[str, float]:
    """Times of opening the page once."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector("#plan-table tbody tr", timeout=SLOW_MS)
        table_s = page.evaluate(_NOW_S)
        metrics = session.send("Performance.getMetrics")["metrics"]
        thread_s = {one["name"]: one["value"] for one in metrics}["TaskDuration"]
        wait_for_charts(page)
        charts_s = page.evaluate(_NOW_S)
        painted_s = first_paint_ms(page)["first-contentful-paint"] / 1e3
    finally:
        context.close()
    return {
        "first_paint_s": painted_s,
        "table_s": table_s,
        "charts_s": charts_s,
        "thread_s": thread_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=5000)
    parser.add_argument("--times", type=int, default=5, help="that the page is opened")
    parser.add_argument("--check", action="store_true", help="exit code 1 if it is too slow")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "report.html"
        path.write_text(page_text(document_of(large(given.plans))), encoding="utf-8")
        size = path.stat().st_size
        times = [opened(browser, path) for _ in range(given.times)]
    found = {
        name: {
            "median": statistics.median(one[name] for one in times),
            "worst": max(one[name] for one in times),
        }
        for name in times[0]
    }
    print(json.dumps({"plans": given.plans, "file_bytes": size, "times": given.times, **found}))
    if given.check and (found["first_paint_s"]["median"] > FIRST_PAINT_S or size > FILE_BYTES):
        sys.exit(1)


if __name__ == "__main__":
    main()
