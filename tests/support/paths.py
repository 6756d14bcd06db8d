"""Where things are: every test takes its paths from here, so that it may stand in any folder."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
# What tests read: recorded modules and studies, cases of other systems, scripts to be searched.
DATA = TESTS / "data"
SCRIPTS = DATA / "scripts"
# Texts that people read, kept word for word: `python -m tests.regenerate.update_golden`.
GOLDEN = TESTS / "golden"
