"""Which reports of studies are kept, and until when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automesh_service.serve.pages import MadePage, Pages
from automesh_service.serve.reading.messages import unread
from automesh_service.serve.reading.summary import KnownStudy


def test_a_page_is_kept_until_its_study_changes_and_without_a_stamp_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(_: Pages, known: KnownStudy) -> MadePage:
        made.append(known.stamp)
        return MadePage(html=str(len(made)).encode(), policy="", tag="")

    monkeypatch.setattr(Pages, "_make", make)
    pages = Pages(folder=tmp_path)
    fresh = unread("a", folder=tmp_path / "a", storage="", changed_s=0.0)
    # Unread, or unreadable for a while: it may change, and its stamp stays empty.
    stamps = ("", "", "1", "1", "2", "", "2")
    found = [pages.page_of(replace(fresh, stamp=stamp)).html for stamp in stamps]
    assert found == [b"1", b"2", b"3", b"3", b"4", b"5", b"4"]
    assert made == ["", "", "1", "2", ""]
