"""A service with a few studies, for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugins.service.tests.support.service import (
    Running,
    make_estimated,
    make_measured,
    running_service,
)

HOSTILE = "<img src=x onerror=alert(1)>"
"""What somebody may call a study's folder."""


# Not of the session: tests that look who is left would find the process that reads studies.
@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    make_measured(folder / "results" / "train-gpu-h100-16-0123abcd")
    make_estimated(folder / "results" / HOSTILE, workload="<script>alert(1)</script>")
    broken = folder / "results" / "broken"
    broken.mkdir()
    (broken / "study.db").write_bytes(b"no database" * 100)
    (folder / "results" / "etc").symlink_to("/etc")
    with running_service(folder) as service:
        yield service
