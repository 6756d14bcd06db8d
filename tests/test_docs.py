"""What docs/ says of files, links and layers is so."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
# What a search writes, and neighbours of a file that is named in full.
MADE = ("mesh_rules.toml", "trials.csv", "csv.py", "json.py")
JOURNEYS = re.findall(r"^## (Add .*|Change .*)\n((?:(?!## ).*\n)*)", CONTRIBUTING, re.MULTILINE)


def named(text: str) -> list[str]:
    """Paths in code quotes; a NAME or SLUG in one stands for what a reader adds."""
    found = re.findall(r"`([\w./]+/[\w./-]*|[\w./]+\.(?:py|json|toml|txtpb|txt))`", text)
    return [one for one in found if not re.search("NAME|SLUG", one)]


def exists(path: str) -> bool:
    bases = (
        "",
        "automesh",
        "plugins/frameworks/automesh_frameworks",
        "plugins/frameworks/tests/support",
    )
    return any((ROOT / base / path).exists() for base in bases)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text())
    broken = [
        link for link in links if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert not broken


@pytest.mark.parametrize("text", [ARCHITECTURE, CONTRIBUTING], ids=["architecture", "contributing"])
def test_files_that_are_named_exist(text: str) -> None:
    ours = [one for one in named(text) if one not in MADE]
    assert len(ours) > 10
    assert [one for one in ours if not exists(one)] == []


def test_errors_of_the_estimates_are_those_of_the_data() -> None:
    found = json.loads((ROOT / "benchmarks/data/terms.json").read_text())

    def figures(platform: str, first: str, worst: str) -> tuple[str, str]:
        return tuple(f"{100 * found[platform][name]:.0f}" for name in (first, worst))

    accuracy = (ROOT / "docs/accuracy.md").read_text()
    said: dict[str, str] = {}
    for platform in ("cpu", "tpu"):
        one = found[platform]
        carried = figures(platform, "bytes_median_error", "bytes_max_error")
        memory = figures(platform, "memory_median_error", "memory_max_error")
        inside = f"{100 * one['memory_inside']:.0f}"
        row = (
            f"| {one['meshes']} of {one['steps']} | {', '.join(carried)} % | {', '.join(memory)} %"
        )
        assert f"{row} | {inside} % |" in accuracy
        assert carried[0] == "0"
        said[platform] = f"{carried[1]} %, memory {' and '.join(memory)} %, {inside} % inside"
    cpu, tpu = found["cpu"], found["tpu"]
    for page in ("README.md", "benchmarks/README.md"):
        text = (ROOT / page).read_text()
        head = f"{cpu['meshes']} CPU meshes of {cpu['steps']} steps: bytes exact in the median, "
        assert head + said["cpu"].replace(" %, memory", " % off at worst, memory", 1) in text
        head = f"{tpu['meshes']} meshes of {tpu['steps']} on `v5e:2x4`: bytes exact and "
        assert head + said["tpu"] in text


def test_nine_journeys_name_at_most_four_files_each() -> None:
    assert len(JOURNEYS) == 9
    for title, text in JOURNEYS:
        steps = re.findall(r"^\d\. ", text, re.MULTILINE)
        assert 2 <= len(steps) <= 4, title


def test_the_drawing_has_the_layers_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    inside = {part.strip() for layer in layers for part in re.split(r"[|:]", layer)}
    drawing = ARCHITECTURE.partition("## Layers")[2].partition("```")[2].partition("```")[0]
    drawn = set(re.findall(r"\w+", drawing))
    assert inside - {"__main__", "cli_help"} <= drawn
