"""Where automesh itself lies: its data, and the frames of a traceback that are not the user's."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
