"""A study that a former version has made of a framework's step is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.plugins.framework import Framework
from automesh.program.nouns import Entry
from automesh.tuner.study.identity import study_name
from automesh_frameworks.steps.registry import FRAMEWORKS


def name(module: str, scope: Path) -> str:
    entry = Entry(kind="module", location=module, argv=("steps=3",))
    return study_name(entry, selector="cpu-8", axes=("dp", "fsdp"), scope=scope)


# Frameworks that came later have no former module.
FORMER = {name: one for name, one in FRAMEWORKS.items() if one.former_module}


def test_frameworks_of_former_versions_keep_their_module() -> None:
    assert {"maxtext", "levanter", "easydel", "tunix", "kauldron", "axlearn"} <= FORMER.keys()


@pytest.mark.parametrize("one", FORMER.values(), ids=list(FORMER))
def test_the_study_of_a_former_version_is_found(one: Framework, tmp_path: Path) -> None:
    assert one.former_module == f"automesh.frameworks.{one.name}"
    new = name(one.module, tmp_path)
    former = name(one.former_module, tmp_path)
    assert new.startswith(f"{one.name}-cpu-8-") and new != former
    (tmp_path / former).mkdir()
    assert name(one.module, tmp_path) == former
