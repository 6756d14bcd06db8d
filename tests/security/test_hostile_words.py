"""Wrong words where no command line is between: baselines, selectors, paths given from Python."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import automesh
from automesh.errors import UsageError
from automesh.mesh.rules.file import merge_rule, read_rules
from automesh.mesh.rules.rule import MeshRule
from automesh.space.spec import read_space
from automesh.tuner.choose.baseline import parse_plan
from automesh.tuner.request import UNMODIFIED, SearchOptions, parse_entry, read_request
from tests.support.cases.bad_inputs import GOOD_SPACE, RULES, UNUSED
from tests.support.cases.hostile_inputs import BYTE, DIGITS, ESCAPES, HUGE, NUL

KNOBS = {"width": 8, "remat": "none", "scale": 1.0, "fused": False}
BASELINES = (
    *(
        "",
        " ",
        "x",
        "dp",
        "dp:",
        "dp:x",
        "dp:0",
        "dp:-2",
        "dp:1.5",
        "dp:nan",
        "dp:٤",
        "dq:4",
        "dp=4",
    ),
    *(f"dp:{DIGITS}", "dp:2,dp:2", "dp:4,", "dp:4;", "dcn.dp:2", "dcn.:2", "dp:-1,tp:-1", "dp:3"),
    *("dp:4 width", "dp:4 width=", "dp:4 width=1.5", f"dp:4 width={DIGITS}", "dp:4 scale=nan"),
    *("dp:4 scale=inf", "dp:4 scale=1e999", "dp:4 fused=2", "dp:4 remta=x", "dp:4 =", "dp:4 x:tp"),
    *(NUL, BYTE, ESCAPES, HUGE),
)


@pytest.mark.parametrize("text", BASELINES, ids=lambda text: ascii(text)[:20])
def test_a_baseline(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_plan(text, names=("dp", "tp"), num_devices=4, num_granules=1, knobs=KNOBS, varied=[])
    assert caught.value.message.isprintable() and len(caught.value.message) < 2_000


@pytest.mark.parametrize(
    "selector",
    ["", " ", "cpu-4\n", "*", "cpu-[4", "cpu-٤", NUL, BYTE, ESCAPES, HUGE, DIGITS, 3, b"cpu-4"],
    ids=lambda selector: ascii(selector)[:20],
)
def test_a_selector(selector: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    with pytest.raises(UsageError) as caught:
        automesh.load(tmp_path / "rules.toml").select(selector)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert len(str(caught.value)) < 4_500


@pytest.mark.parametrize(
    "path", ["~nosuchuser/rules.toml", f"{NUL}.toml", f"{'x' * 300}.toml", "loop.toml", "pipe.toml"]
)
def test_a_path_from_python(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.toml")
    Path("loop.toml").symlink_to("loop.toml")
    rule = MeshRule(match="cpu-4", mesh_shape=(4,), axes=("dp",))
    with pytest.raises(UsageError):
        automesh.load(path)
    if path != "pipe.toml":  # which is replaced, and not written to
        with pytest.raises(UsageError):
            merge_rule(Path(path), rule, selector="cpu-4")
    # What is read later than that is named all the same: a pipe that is there is a path.
    names = ("rules", "results", "hardware") if path != "pipe.toml" else ()
    for name in names:
        with pytest.raises(UsageError) as caught:
            read_request("nowhere/train.py", SearchOptions({name: path}))
        assert caught.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("args", ["--data", BYTE]),
        ("baseline", NUL),
        ("xla", {"x": ["default", NUL]}),
        ("step", BYTE),
        ("split", [f"data={NUL},b"]),
    ],
)
def test_a_word_from_python_is_named_as_there(name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNUSED)
    with pytest.raises(UsageError) as caught:
        read_request(tmp_path / "train.py", SearchOptions({name: value}))
    assert caught.value.message.startswith(f"{name}: ")


class TestMarksAndLineEnds:
    """What editors of other systems write is read as it is meant."""

    @pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    def test_files(self, start: bytes, end: bytes, tmp_path: Path) -> None:
        def write(name: str, text: str) -> Path:
            (tmp_path / name).write_bytes(start + text.encode().replace(b"\n", end))
            return tmp_path / name

        space = read_space(str(write("space.toml", GOOD_SPACE)))
        assert space.names == ("dp", "tp")
        rules = write("rules.toml", RULES)
        assert read_rules(rules).rules[0].match == "cpu-4"
        before = read_rules(rules)
        own = replace(before.rules[0], match="cpu-8", axes=before.axes)
        merge_rule(rules, own, selector="cpu-8")
        assert [rule.match for rule in read_rules(rules).rules] == ["cpu-4", "cpu-8"]
        assert b"# Kept by hand: do not lose me." in rules.read_bytes()
        script = write("train.py", "import jax\n\n\ndef build(mesh):\n    ...\n")
        assert parse_entry(str(script)).function == "build"
        bare = write("bare.py", "import jax\n")
        assert parse_entry(str(bare)).function == UNMODIFIED


def test_a_method_is_no_function_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("class Trainer:\n    def build(self, mesh): ...\n")
    with pytest.raises(UsageError) as caught:
        parse_entry(f"{tmp_path}/train.py:Trainer.build")
    assert "`Trainer.build`" in caught.value.message
    assert "is no function at the top level of the script" in caught.value.message
    assert "def build(mesh)" in caught.value.hint


def test_a_zip_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"PK\x03\x04" + bytes(30))
    with pytest.raises(UsageError, match=r"train\.py` is a zip archive, not a script"):
        parse_entry(f"{tmp_path}/train.py")
