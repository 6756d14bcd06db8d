"""What is said of a framework that is missing, or does not work with what else is installed."""

from __future__ import annotations

import importlib

import pytest

from automesh.errors import UsageError
from automesh_frameworks.steps.installed import import_used
from automesh_frameworks.steps.registry import FRAMEWORKS


def test_the_package_of_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install haliax` would overwrite the package that Levanter needs."""

    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="haliax.partitioning")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match=r"needs the module `haliax\.partitioning`") as caught:
        import_used(FRAMEWORKS["levanter"], {"levanter": ()})
    assert caught.value.hint == "`pip install marin-haliax`"


def test_a_framework_that_this_jax_breaks_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise AttributeError("module 'jax' has no attribute 'no_such_thing'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UsageError, match=r"that can be imported .*no_such_thing") as caught:
        import_used(FRAMEWORKS["levanter"], {"levanter": ()})
    assert "marin-levanter 0.2.227" in str(caught.value.hint)
