"""Figures that one release of jax wrote, checked with a patch of it: no alarm.

`tests/data/check/decoder.py` says how the files beside it were made.
"""

from __future__ import annotations

import itertools
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import automesh
from automesh.mesh.rules.file import read_rules
from automesh.report.check.facts import compare
from tests.support.paths import DATA

SCRIPT = DATA / "check" / "decoder.py"
RECORDED = sorted((DATA / "check").glob("jax_*.toml"))


def release(path: Path) -> str:
    """The release of jax that wrote the figures."""
    (rule,) = read_rules(path).rules
    return dict(rule.evidence.versions)["jax"]


def series(number: str) -> str:
    """Releases that differ in what follows are patches of each other: 0.10 of 0.10.2."""
    return ".".join(number.split(".")[:2])


def by_another_patch(path: Path) -> object:
    """The file, skipped where another series of jax is installed."""
    wrote, here = release(path), version("jax")
    is_other = series(wrote) != series(here)
    reason = f"the figures are those of jax {wrote}: {here} is no patch of it"
    return pytest.param(path, id=wrote, marks=pytest.mark.skipif(is_other, reason=reason))


@pytest.mark.slow
@pytest.mark.parametrize("path", [by_another_patch(path) for path in RECORDED])
def test_a_patch_of_jax_raises_no_alarm(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    found = automesh.check(SCRIPT, rules=path)
    (rule,) = found.rules
    assert found.exit_code == 0, rule
    assert path.read_bytes() == before
    # The same figures are an alarm once the script does twice the work.
    doubled = tmp_path / "decoder.py"
    text = SCRIPT.read_text()
    assert "\n\n\ndef build" in text
    doubled.write_text(text.replace("\n\n\ndef build", "\nROWS *= 2\n\n\ndef build"))
    assert automesh.check(doubled, rules=path).exit_code == 1


def test_figures_of_two_patches_agree_within_the_bounds_and_not_to_the_byte() -> None:
    facts = {release(path): read_rules(path).rules[0].evidence.program for path in RECORDED}
    pairs = [
        (then, now) for then, now in itertools.permutations(facts, 2) if series(then) == series(now)
    ]
    assert pairs
    for then, now in pairs:
        found = compare(facts[then], facts[now])
        assert [one.what for one in found if one.verdict != "same"] == [], (then, now)
    # Another hash, and another packing of temporaries: the bounds are there for something.
    assert any(facts[then].fingerprint != facts[now].fingerprint for then, now in pairs)
    assert any(facts[then].peak_bytes != facts[now].peak_bytes for then, now in pairs)


def test_there_are_figures_of_two_patches_of_one_release() -> None:
    releases = [release(path) for path in RECORDED]
    assert len(releases) > len({series(one) for one in releases})
    for path, wrote in zip(RECORDED, releases, strict=True):
        assert re.fullmatch(rf"jax_{re.escape(wrote)}", path.stem)
