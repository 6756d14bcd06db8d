"""Draws the top of a study's report, for the README: real figures of a real study.

    python -m tests.regenerate.report_picture STUDY [PICTURE]

By default the picture is docs/report.png. It needs a Chromium, see `tests.support.browser`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from automesh import api
from tests.support.browser import open_browser, open_page
from tests.support.paths import ROOT


def main() -> None:
    study, *picture = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = api.write_report(study, Path(folder) / "report.html")
        page = open_page(browser, path, width=1180, height=760).page
        # What fits into the picture beside the answer is the table, not the rule.
        page.locator("#rule").evaluate("element => element.remove()")
        page.screenshot(path=picture[0] if picture else ROOT / "docs" / "report.png")


if __name__ == "__main__":
    main()
