"""docs/meshes.md says what is so."""

from __future__ import annotations

import doctest
import re

import pytest

from automesh import HybridMeshShape, MeshConfig
from automesh.mesh.infer import resolve_shape
from tests.support.fakes.mesh_devices import slices
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "meshes.md"


def test_its_examples_run():
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_its_drawing_is_what_is_printed():
    shown = re.search(r"<!-- two slices -->\n```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    config = MeshConfig(
        mesh_shape=HybridMeshShape((2, -1), (-1, 1)), mesh_axis_names=("data", "model")
    )
    assert shown
    assert shown[1] == config.explain(devices=slices("TPU v4", (2, 4, 1), 2))


ROWS = re.findall(r"^\| `(\(.*?\))` \| `(\(.*?\))` \| `(\(.*?\))` \|$", PAGE.read_text(), re.M)


@pytest.mark.parametrize(("shape", "ici", "dcn"), ROWS)
def test_its_table_is_true(shape, ici, dcn):
    sizes = [tuple(map(int, re.findall(r"-?\d+", text))) for text in (shape, ici, dcn)]
    resolved = resolve_shape(sizes[0], num_devices=16, num_granules=2)
    assert resolved == HybridMeshShape(*sizes[1:])


def test_its_table_is_found():
    assert len(ROWS) == 4
