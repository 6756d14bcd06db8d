"""Writes tests/data/pages/*.json.gz: what the pages of real studies show, for tests in a browser.

    python -m tests.regenerate.record_pages [NAME]...

Each is of a whole search: for TPUs that are not here, of a pipeline for two slices of them, of a
pipeline on virtual devices, and of a step that no mesh gets through. Those for TPUs need libtpu. It
takes some minutes, on a machine that does nothing else.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import automesh
from automesh.jsonio import read_json, to_text
from automesh.report.html.nouns import StudyPage
from automesh.tuner.page.collect import page_of
from automesh.tuner.study.metadata import reading
from tests.support.paths import DATA, EXAMPLES, SCRIPTS

FOLDER = DATA / "pages"
_PIPELINE = """\
[axes]
pp = { min = 2, max = 2, dcn = true }
dp = {}
tp = { max = 2 }
[constraints]
pp = { divides = "num_layers" }
"dp*microbatches" = { divides = "batch" }
[knobs]
microbatches = [4]
schedule = ["1f1b"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search that is recorded.

    Attributes:
      location: of its script.
      space: the text of its space.
    """

    location: Path
    target: str
    space: str
    budget: str = "10m"
    top: int = 2


SEARCHES = {
    "slice": Searched(
        location=EXAMPLES / "dense_lm.py",
        target="v5e:2x2",
        space='[axes]\ndp = {}\nfsdp = {}\ntp = {}\nsp = {}\n[knobs]\nremat = ["full", "none"]\n',
    ),
    "slices": Searched(location=SCRIPTS / "pipelined.py", target="v5e:2x2*2", space=_PIPELINE),
    "ranks": Searched(location=SCRIPTS / "pipelined.py", target="cpu:4", space=_PIPELINE),
    "failures": Searched(
        location=SCRIPTS / "unbuildable.py",
        target="cpu:4",
        space="[axes]\ndp = {}\ntp = {}\n[knobs]\nlayers = [2, 1]\n",
        top=5,
    ),
}


def read(name: str) -> StudyPage:
    """What was recorded."""
    data = gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())
    return read_json(data, StudyPage)


def search(name: str, folder: Path) -> Path:
    """Searches; the folder of the study."""
    one = SEARCHES[name]
    space = folder / "space.toml"
    space.write_text(one.space)
    automesh.search(
        one.location,
        target=one.target,
        space=space,
        budget=one.budget,
        timeout="10m",
        top=one.top,
        rules=folder / "mesh_rules.toml",
        results=folder / "results",
    )
    (study,) = (folder / "results").iterdir()
    return study


def page(study: Path) -> StudyPage:
    """What the page of a study shows."""
    with reading(study, results=study.parent, storage="") as (folder, opened, header):
        return page_of(folder, opened, header)


def record(name: str) -> bytes:
    """Searches and packs what the page shows, without the folders of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        text = to_text(page(search(name, Path(folder))), StudyPage)
        for own in {folder, str(Path(folder).resolve()), str(DATA.parents[1])}:
            text = text.replace(own, "/home/ann/model")
        # Tracebacks name the files of jax.
        text = text.replace(sys.prefix, "/home/ann/.venv").replace(sys.base_prefix, "/usr")
    return gzip.compress(text.encode(), 9, mtime=0)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or SEARCHES:
        data = record(name)
        (FOLDER / f"{name}.json.gz").write_bytes(data)
        print(f"{name}: {len(data)} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
