"""Fixtures of the storage tests: `storage` is an empty place of the kind that `kind` names."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from automesh.tuner.study.storage import Storage, parse_storage
from tests.support.postgres import new_database, postgres_server


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    """The URL of a running server; fails where there is none."""
    with postgres_server() as url:
        yield url


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def storage(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Storage:
    match kind:
        case "sqlite":
            return parse_storage("", tmp_path / "study")
        case "journal":
            return parse_storage(f"{tmp_path}/study.journal", tmp_path)
        case _:
            url = new_database(request.getfixturevalue("postgres_url"))
            return parse_storage(url, tmp_path)
