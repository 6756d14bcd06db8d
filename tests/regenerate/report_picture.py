"""Draws docs/report.png, the picture of a report on the README's first screen.

    python -m tests.regenerate.report_picture

It needs a Chromium, see `tests.support.browser`. The study is the one of dense_lm in
`tests/data/studies`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from automesh.report.html.document import document_of
from automesh.report.html.page import page_text
from tests.support.browser import open_browser, open_page
from tests.support.paths import ROOT
from tests.support.samples.page_samples import recorded

PICTURE = ROOT / "docs" / "report.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "report.html"
        path.write_text(page_text(document_of(recorded("dense_lm"))), encoding="utf-8")
        page = open_page(browser, path, width=1180, height=760).page
        page.locator("#rule").evaluate("element => element.remove()")
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
