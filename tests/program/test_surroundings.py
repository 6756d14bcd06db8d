"""What a study and its rules record of what surrounds a program."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from automesh.program import surroundings
from automesh.program.absent import client


def test_settings_of_jax_that_change_programs_are_recorded() -> None:
    variables = {
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": "/somewhere",
        "XLA_FLAGS": "--xla_dump_to=x",
        "PYTHONHASHSEED": "0",
        "HOME": "/root",
    }
    with mock.patch.dict(os.environ, variables, clear=True):
        assert dict(surroundings.environment()) == {
            name: variables[name]
            for name in (
                "JAX_DISABLE_MOST_OPTIMIZATIONS",
                "JAX_ENABLE_X64",
                "PYTHONHASHSEED",
                "XLA_FLAGS",
            )
        }


def test_what_jax_leaves_out_is_part_of_the_key_of_a_program() -> None:
    assert "jax_disable_most_optimizations" in dict(client.settings())


def test_another_libtpu_than_the_package_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, own = tmp_path / "libtpu", tmp_path / "own" / "libtpu.so"
    for path in (package / "libtpu.so", own):
        path.parent.mkdir()
        path.write_bytes(b"library")
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: spec if name == "libtpu" else find_spec(name, *rest),
    )
    assert surroundings.other_libtpu({}) == ""
    # The package names itself when it is imported.
    assert surroundings.other_libtpu({"TPU_LIBRARY_PATH": str(package / "libtpu.so")}) == ""
    os.utime(own, (0, 0))
    named = {"TPU_LIBRARY_PATH": str(own)}
    assert surroundings.other_libtpu(named) == "libtpu.so of 7 bytes, 1970-01-01T00:00:00+00:00"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(own))
    for found in (surroundings.versions(), client.versions_for("tpu")):
        assert dict(found)["libtpu"] == "libtpu.so of 7 bytes, 1970-01-01T00:00:00+00:00"
    own.write_bytes(b"another library")
    assert dict(client.versions_for("tpu"))["libtpu"].startswith("libtpu.so of 15 bytes")
