"""`automesh targets`: word for word, as JSON, and that it is quick."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from rich.cells import cell_len

import automesh
from automesh.errors import UsageError
from automesh.hardware import check_compilable, compilers, parse_target
from automesh.hardware.catalogue import citations, find_targets, list_targets
from automesh.hardware.clusters_file import read_clusters
from automesh.hardware.compilers import compiler_for
from automesh.report.blocks.terminal import render
from automesh.report.pages.targets import report_of
from automesh.tuner import session
from tests.support.cases import bad_inputs_run, targets_golden


@pytest.mark.parametrize("name", targets_golden.CASES)
def test_word_for_word(name: str) -> None:
    path = targets_golden.FOLDER / f"{name}.txt"
    assert targets_golden.CASES[name]() == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in targets_golden.FOLDER.glob("*.txt")} == set(targets_golden.CASES)


@pytest.mark.parametrize("width", [1, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("pattern", ["", "v5p", "h100", "tpu-7x-18432", "tpu-v5litepod-256-1024"])
def test_no_line_is_too_long(pattern: str, width: int) -> None:
    text = targets_golden.table(pattern, width=width)
    assert max(map(cell_len, text.splitlines())) <= max(width, 40)
    assert text.isascii() or set(text) - set(map(chr, range(128))) <= {"─", "━"}


def test_everything_on_record_is_listed_once() -> None:
    names = [one.name for one in list_targets()]
    assert len(names) == len(set(names))
    assert sum(name.startswith("tpu-") for name in names) == 223
    for one in list_targets():
        assert parse_target(one.name, {}).absent == one.absent
        assert one.sources


def test_every_source_is_cited() -> None:
    known = citations()
    for one in list_targets():
        for what, source in one.sources:
            assert source, (one.name, what)
    used = {word for one in list_targets() for _, text in one.sources
            for word in re.findall(r"\b[a-z_0-9]+\b", text)}  # fmt: skip
    assert set(known) - used <= {"gke"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("tpu-v5p-128", ["tpu-v5p-128"]),
        ("V5E:4x8", ["v5e-4x8"]),
        ("h100-4", ["gpu-h100-4"]),
        ("v5litepod-16-3", ["tpu-v5litepod-16-3"]),
        ("tpu-v6e-?", ["tpu-v6e-1", "tpu-v6e-4", "tpu-v6e-8"]),
        ("v5e-25*", []),
        ("tpu-v5e-25*", ["tpu-v5litepod-256"]),
        ("b200", ["gpu-p6-b200.48xlarge-8", "gpu-a4-highgpu-8g-8", "gpu-a4x-highgpu-4g-4",
                  "gpu-b200-8", "gpu-gb200-4"]),
    ],
)  # fmt: skip
def test_what_a_pattern_finds(pattern: str, names: list[str]) -> None:
    if not names:
        with pytest.raises(UsageError, match="no target is called"):
            find_targets(pattern)
        return
    assert [one.name for one in find_targets(pattern)] == names


def test_slices_are_found_by_their_other_names() -> None:
    by_kind = {one.kind for one in find_targets("v5")}
    assert by_kind == {"tpu-v5litepod-N", "tpu-v5p-N"}
    assert len(find_targets("v5p")) == 96
    assert {one.kind for one in find_targets("v5e")} == {"tpu-v5litepod-N"}


def test_clusters_of_ones_own_come_first(tmp_path: Path) -> None:
    path = tmp_path / "our.toml"
    path.write_text(targets_golden.CLUSTERS)
    clusters = read_clusters(path)
    assert [one.name for one in list_targets(clusters)[:2]] == ["lab", "pod"]
    (lab,) = find_targets("lab", clusters)
    report = report_of([lab], pattern="lab", compilers=targets_golden.COMPILERS)
    text = render(report, width=200, colour=False)
    assert "the invoice of March" in text
    assert f"`{path}`: `chips.h100-nvl`" in text
    (part,) = find_targets("lab-32", clusters)
    assert part.absent.num_devices == 32
    (pod,) = find_targets("pod", clusters)
    report = report_of([pod], pattern="pod", compilers=targets_golden.COMPILERS)
    text = render(report, width=200, colour=False)
    assert "6x4, the 1st dimension with its ends linked" in text
    assert "by estimate alone" in text


def test_json_has_all_facts_of_all(tmp_path: Path) -> None:
    ran = bad_inputs_run.run("targets --json", tmp_path)
    found = {one["name"]: one for one in json.loads(ran.stdout)["targets"]}
    assert len(found) == len(list_targets())
    one = found["tpu-7x-128"]
    assert (one["devices"], one["chips"], one["hosts"], one["torus"]) == (128, 64, 16, [4, 4, 4])
    assert (one["wraps"], one["topology"]) == ([True, True, True], "tpu7x:4x4x4")
    assert (one["links_per_chip"], one["link_bytes_per_s"]) == (6, 90e9)
    assert one["device_flops_per_s"] == {"bf16": 1153.5e12, "fp8": 2307e12}
    assert one["sources"]["slices"] == "axlearn, maxtext_spec_map"
    gpus = found["gpu-h100-8"]
    assert (gpus["devices"], gpus["hosts"], gpus["links_per_chip"]) == (8, 1, 1)
    assert not found["gpu-mi300x-8"]["can_be_compiled_for"]


def test_on_a_pipe(tmp_path: Path) -> None:
    for width in (60, 80, 120):
        ran = bad_inputs_run.run("targets", tmp_path, {"COLUMNS": str(width)})
        assert (ran.code, ran.stderr) == (0, "")
        assert max(map(len, ran.stdout.splitlines())) <= width
        assert "\x1b" not in ran.stdout


def test_where_a_terminal_has_only_ascii(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "targets", "v6e"],
        cwd=tmp_path,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "COLUMNS": "80"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "tpu-v6e-256" in done.stdout.decode("ascii")
    assert "?" not in done.stdout.decode("ascii")


def test_jax_is_not_imported_to_list_targets() -> None:
    code = (
        "import sys, automesh; print(len(automesh.targets('v5p').table())); "
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_from_python() -> None:
    found = automesh.targets("tpu-v5p-128")
    assert [one.name for one in found.found] == ["tpu-v5p-128"]
    assert "64 in 1 slice of 64" in found.table(width=80)
    assert found.to_json()["targets"][0]["chips"] == 64


class TestCompilers:
    """What is installed is asked without importing anything."""

    @pytest.fixture(autouse=True)
    def _no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)

    @staticmethod
    def installed(*names: str):
        versions = {
            "libtpu": "0.0.42.1",
            "jax-cuda13-plugin": "0.11.0",
            "jax-cuda13-pjrt": "0.11.0",
        }

        def version(package: str) -> str:
            return versions.get(package, "") if package in names else ""

        modules = {name.replace("-", "_") for name in names}
        return (
            mock.patch.object(compilers, "installed_version", version),
            mock.patch.object(
                compilers.importlib.util, "find_spec", lambda name: name in modules or None
            ),
        )

    def ask(self, platform: str, *names: str) -> compilers.Compiler:
        first, second = self.installed(*names)
        with first, second:
            return compiler_for(platform)

    def test_none(self) -> None:
        for platform in ("tpu", "gpu"):
            one = self.ask(platform)
            assert (one.version, one.platform) == ("", platform)
            assert f"pip install 'jax-automesh[{platform}]'" in one.install

    def test_some(self) -> None:
        assert self.ask("tpu", "libtpu").version == "0.0.42.1"
        assert self.ask("gpu", "jax-cuda13-plugin", "jax-cuda13-pjrt").version == "0.11.0"

    def test_where_a_variable_says_where_it_is(self) -> None:
        with mock.patch.dict(compilers.os.environ, {"TPU_LIBRARY_PATH": "/opt/libtpu.so"}):
            assert self.ask("tpu").version == "at /opt/libtpu.so"
            assert self.ask("gpu").version == ""

    def test_half_a_plugin_is_none(self) -> None:
        assert self.ask("gpu", "jax-cuda13-plugin").version == ""

    def test_where_none_can_be_had(self) -> None:
        with mock.patch.object(compilers.sys, "platform", "darwin"):
            assert "on Linux, for which alone it is made" in self.ask("tpu").install

    @pytest.mark.parametrize(
        ("name", "said", "hint"),
        [
            ("tpu-v5p-128", "is not here, and libtpu, which compiles for TPUs", "[tpu]"),
            ("gpu-h100-16", "the CUDA plugin of jax, which compiles for NVIDIA GPUs", "[gpu]"),
            ("gpu-mi300x-16", "no compiler knows the devices of target `gpu-mi300x-16`", "--dry"),
        ],
    )
    def test_what_is_said_before_a_search_without_one(self, name, said, hint) -> None:
        first, second = self.installed()
        with first, second, pytest.raises(UsageError) as caught:
            check_compilable(parse_target(name, {}))
        assert said in caught.value.message
        assert hint in caught.value.hint
        assert "--dry-run" in caught.value.hint

    def test_nothing_is_said_of_devices_that_are_here(self) -> None:
        first, second = self.installed()
        with first, second:
            check_compilable(parse_target("cpu:8", {}))

    def test_nothing_is_said_with_one(self) -> None:
        first, second = self.installed("libtpu")
        with first, second:
            check_compilable(parse_target("tpu-v5p-128", {}))

    @pytest.mark.parametrize("target", ["tpu-v5p-128", "v5e:4x4", "gpu-h100-16"])
    def test_a_search_is_refused_before_a_worker_starts(self, target: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("def build(mesh): ...\n")
        first, second = self.installed()
        with (
            first,
            second,
            mock.patch.object(session, "Pool", side_effect=AssertionError("a worker is started")),
        ):
            ran = bad_inputs_run.run(f"search train.py --target {target}", tmp_path)
        assert (ran.code, ran.stdout) == (2, "")
        assert re.fullmatch(
            rf"error: target `{re.escape(target)}` is not here, and .* is not installed\n"
            r"hint: run `pip install 'jax-automesh\[[tg]pu\]'`, or rank its meshes .*`--dry-run`\n",
            ran.stderr,
        )
        assert sorted(bad_inputs_run.contents(tmp_path)) == ["train.py"]
