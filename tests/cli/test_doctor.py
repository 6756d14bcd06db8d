"""What `automesh doctor` says about compilers for devices that are not here."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from automesh import diagnosis
from automesh.hardware import compilers
from automesh.hardware.compilers import Compiler, fits, is_too_old, wanted_by_jax

INSTALL = "run `pip install 'jax-automesh[tpu]'`"


def findings(
    monkeypatch: pytest.MonkeyPatch, version: str, wanted: str
) -> list[tuple[str, str, str]]:
    compiler = Compiler(platform="tpu", name="libtpu", version=version, install=INSTALL)
    monkeypatch.setattr(diagnosis, "compiler_for", lambda platform: compiler)
    monkeypatch.setattr(diagnosis, "wanted_by_jax", lambda platform: SpecifierSet(wanted))
    monkeypatch.setattr(diagnosis, "installed_version", lambda package: "0.10.2")
    found = diagnosis._targets()
    assert [one.about for one in found] == ["TPU targets", "GPU targets"]
    return [(one.level, one.detail, one.hint) for one in found][:1]


def test_no_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    detail = "libtpu is not installed: estimates only, by `--dry-run`"
    assert findings(monkeypatch, "", "") == [("note", detail, INSTALL)]


def test_the_version_that_jax_wants_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, "0.0.42.1", "==0.0.42.*")
    assert found == [("ok", "libtpu 0.0.42.1 compiles for them", "")]


@pytest.mark.parametrize("version", ["0.0.41", "0.0.43"])
def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    detail = f"libtpu {version}, but jax 0.10.2 wants ==0.0.42.*"
    assert findings(monkeypatch, version, "==0.0.42.*") == [("warning", detail, INSTALL)]


@pytest.mark.parametrize(
    ("requirements", "platform", "version", "fitting_version", "old"),
    [
        (["libtpu==0.0.42.*; extra == 'tpu'"], "tpu", "0.0.42.7", True, False),
        (["libtpu==0.0.42.*; extra == 'tpu'"], "tpu", "0.0.17", False, True),
        (["libtpu==0.0.42.*; extra == 'other'"], "tpu", "0.0.17", True, False),
        (
            ["jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.1; extra == 'cuda12-local'"],
            "gpu",
            "0.10.2",
            True,
            False,
        ),
        (
            ["jax-cuda12-plugin<=0.10.2,>=0.10.1; extra == 'cuda12-local'"],
            "gpu",
            "0.9.0",
            False,
            True,
        ),
        (["jax-cuda12-plugin<=0.10.2; extra == 'cuda12-local'"], "gpu", "0.11.0", False, False),
        ([], "tpu", "0.0.1", True, False),
    ],
)
def test_versions_are_read_from_what_jax_asks_for(
    monkeypatch: pytest.MonkeyPatch,
    requirements: list[str],
    platform: str,
    version: str,
    fitting_version: bool,
    old: bool,
) -> None:
    monkeypatch.setattr(compilers.importlib.metadata, "requires", lambda package: requirements)
    wanted = wanted_by_jax(platform)
    assert (fits(version, wanted), is_too_old(version, wanted)) == (fitting_version, old)


def test_the_installed_jax_asks_for_something() -> None:
    assert str(wanted_by_jax("tpu")).startswith("==0.0.")
    assert str(wanted_by_jax("gpu"))
