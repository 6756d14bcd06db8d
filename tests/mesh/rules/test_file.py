"""mesh_rules.toml and .json: round trip, strictness, merging, many writers, kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.axes import DEFAULT_AXES, Plan, parse_mesh
from automesh.mesh.axis_types import AXIS_TYPES
from automesh.mesh.config import Rules
from automesh.mesh.evidence import NO_EVIDENCE, Evidence, RunnerUp
from automesh.mesh.rules.file import check_mergeable, format_rules, merge_rule, read_rules
from automesh.mesh.rules.rule import MeshRule, escape, rule_for
from automesh.mesh.rules.shardings import Shardings
from automesh.mesh.rules.tree import rules_from_tree
from automesh.mesh.settings import Settings
from automesh.mesh.shape import HybridMeshShape
from automesh.mesh.strict_files import parse_tree

AXES = ("dp", "fsdp", "tp")

words = st.text(st.characters(codec="utf-8"), max_size=12)
names = words.filter(bool)
finite = st.floats(0, 1e30, allow_nan=False)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | words
scalars |= st.floats(allow_nan=False, allow_infinity=False)
settings_of = st.dictionaries(names, scalars, max_size=3).map(Settings)


def pairs(values):
    return st.dictionaries(names, values, max_size=3).map(lambda found: tuple(found.items()))


evidence = st.builds(
    Evidence,
    kind=st.sampled_from(["measured", "compiled", "estimated"]),
    step_s=finite,
    interval_s=st.just(()) | st.tuples(finite, finite),
    hbm_bytes=st.integers(0, 2**50),
    stage_bytes=st.lists(st.integers(0, 2**50), max_size=4).map(tuple),
    mfu=st.floats(0, 1),
    runner_up=st.just(RunnerUp()) | st.builds(RunnerUp, plan=names, slower=finite),
    tried=pairs(st.integers(0, 10**6)),
    study=words,
    made=words,
    values=st.sampled_from(["", "synthetic", "user"]),
    reference=words,
    not_searched=words,
    versions=pairs(words),
    environment=pairs(words),
)
# Patterns are names with `/` between them; of dimensions, a name is none, one, or several.
parts_of_paths = st.text(
    st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8
)
patterns = st.lists(parts_of_paths, min_size=1, max_size=3).map("/".join)
dims = st.lists(
    st.just("") | names | st.lists(names, min_size=2, max_size=3, unique=True), max_size=4
)
shardings = st.dictionaries(patterns, dims, max_size=4).map(Shardings)
part = st.lists(st.integers(1, 512), min_size=3, max_size=3).flatmap(
    lambda sizes: st.integers(0, 3).map(
        lambda gap: tuple(-1 if i == gap else size for i, size in enumerate(sizes))
    )
)
rules = st.builds(
    Rules,
    axes=st.just(AXES),
    batch_axes=st.sampled_from([(), ("dp",), ("dp", "fsdp")]),
    rules=st.lists(
        st.builds(
            MeshRule,
            match=words.map(escape),
            mesh_shape=st.builds(HybridMeshShape, part, part),
            knobs=settings_of,
            shardings=shardings,
            compiler_options=settings_of,
            evidence=st.just(NO_EVIDENCE) | evidence,
            axis_types=st.just(()) | st.tuples(*[st.sampled_from(AXIS_TYPES)] * 3),
            axes=st.sampled_from([(), AXES, ("data", "dp", "model")]),
            batch_axes=st.sampled_from([None, (), ("dp",)]),
        ),
        max_size=3,
    ).map(tuple),
)


def rule(selector, mesh="dp:8", evidence=NO_EVIDENCE, **knobs):
    plan = Plan(axes=parse_mesh(mesh, AXES), knobs=tuple(knobs.items()))
    return rule_for(plan, selector=selector, evidence=evidence)


def merge(path, selector, mesh="dp:8", **others):
    return merge_rule(path, rule(selector, mesh, **others), selector=selector)


def in_file(rule):
    """A rule as it is read from a file that has its axes."""
    return replace(rule, axes=(), batch_axes=None)


@settings(max_examples=150, deadline=None)
@given(rules, st.sampled_from([".toml", ".json"]))
def test_what_is_written_is_read_back(rules, suffix):
    source = Path(f"mesh_rules{suffix}")
    text = format_rules(rules, as_json=suffix == ".json")
    assert rules_from_tree(parse_tree(text, source=source), source=source) == rules


def test_a_new_file_looks_like_this(tmp_path):
    path = tmp_path / "mesh_rules.toml"
    found = Evidence(
        kind="measured",
        step_s=2.4,
        interval_s=(2.39, 2.41),
        hbm_bytes=14_925_102_489,
        mfu=0.45,
        runner_up=RunnerUp(plan="dp:32,fsdp:8", slower=1.02),
        tried=(("compiled", 140), ("measured", 24)),
        study="results/dense_lm-tpu-v5p-128-3fa9c1",
        made="2026-11-21T08:07:00Z",
        values="user",
        reference="the script's own mesh",
        versions=(("jax", "0.10.1"),),
        environment=(("XLA_FLAGS", "--xla_a=1"),),
    )
    new = rule("gpu-p5.48xlarge-64", "dcn.dp:8,fsdp:4,tp:2", evidence=found, remat="dots")
    new = replace(new, batch_axes=("dp", "fsdp"))
    merge_rule(path, new, selector="gpu-p5.48xlarge-64")
    assert path.read_text() == (
        "# Written by `automesh search`. `match` is a regular expression for the whole name of a\n"
        "# target; the first rule that matches wins.\n"
        "schema = 1\n"
        'axes = ["dp", "fsdp", "tp"]\n'
        'batch_axes = ["dp", "fsdp"]\n'
        "\n"
        "[[rule]]\n"
        'match = "gpu-p5\\\\.48xlarge-64"\n'
        "ici = { fsdp = 4, tp = 2 }\n"
        "dcn = { dp = 8 }\n"
        'knobs = { remat = "dots" }\n'
        "compiler_options = {}\n"
        "\n"
        "[rule.evidence]\n"
        'kind = "measured"\n'
        "step_s = 2.4\n"
        "interval_s = [2.39, 2.41]\n"
        "hbm_bytes = 14925102489\n"
        "mfu = 0.45\n"
        'runner_up = { plan = "dp:32,fsdp:8", slower = 1.02 }\n'
        "tried = { compiled = 140, measured = 24 }\n"
        'study = "results/dense_lm-tpu-v5p-128-3fa9c1"\n'
        'made = "2026-11-21T08:07:00Z"\n'
        'values = "user"\n'
        'reference = "the script\'s own mesh"\n'
        'versions = { jax = "0.10.1" }\n'
        'environment = { XLA_FLAGS = "--xla_a=1" }\n'
    )
    assert read_rules(path).rules == (in_file(new),)


def test_a_rule_keeps_what_each_stage_of_a_pipeline_needs(tmp_path):
    path = tmp_path / "mesh_rules.toml"
    found = Evidence(
        kind="compiled", step_s=0.2, hbm_bytes=7, stage_bytes=(7, 5), uncounted=("a loop",)
    )
    new = rule("v5e-4x4-4", "dcn.dp:4,tp:2", evidence=found, schedule="1f1b", microbatches=8)
    merge_rule(path, new, selector="v5e-4x4-4")
    text = path.read_text()
    assert "stage_bytes = [7, 5]" in text and "microbatches = 8" in text
    assert read_rules(path).rules == (in_file(new),)
    path.write_text(text.replace("[7, 5]", "[7, -5]"))
    with pytest.raises(UsageError, match="stage_bytes"):
        read_rules(path)


MINE = """\
# Our meshes. Ask Ann before changing them.
schema = 1  # do not touch
axes = ["dp", "fsdp", "tp"]

# first cluster
[[rule]]
match = "cpu-8"  # the laptop
ici = { dp = 8 }  # by hand
# no knobs yet

# everything else
# (keep last)
[[rule]]
match = ".*"
ici = { dp = -1 }
# the end
"""


def test_a_rule_goes_before_the_first_that_matches_and_comments_stay(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(MINE)
    merge(path, "tpu-v5p-128", "tp:4", remat="full")
    before, after = MINE.split("# everything else")
    text = path.read_text()
    assert text.startswith(before)
    assert text.endswith("# everything else" + after)
    assert [one.match for one in read_rules(path).rules] == ["cpu-8", "tpu-v5p-128", ".*"]
    assert read_rules(path).select("tpu-v5p-128").knobs == {"remat": "full"}


def test_the_rule_of_the_same_selector_is_replaced_and_its_comments_stay(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(MINE)
    merge(path, "cpu-8", "dp:2,tp:4", remat=True)
    merge(path, "cpu-8", "dp:2,tp:4", remat=1)
    text = path.read_text()
    for comment in ("# first cluster", "# the laptop", "# by hand", "# no knobs yet", "# the end"):
        assert comment in text
    assert 'match = "cpu-8"  # the laptop\nici = { dp = 2, tp = 4 }  # by hand\n' in text
    # 1 and True are equal in python, and not to a step.
    assert "knobs = { remat = 1 }" in text
    assert [one.match for one in read_rules(path).rules] == ["cpu-8", ".*"]


def test_a_rule_that_another_shadows_moves_before_it(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        'schema = 1\naxes = ["dp", "fsdp", "tp"]\n[[rule]]\nmatch = "cpu-.*"\nici = { tp = -1 }\n'
        '# mine\n[[rule]]\nmatch = "cpu\\\\-8"\nici = { dp = 8 }\n[[rule]]\nmatch="x"\nici={}\n'
    )
    merge(path, "cpu-8", "fsdp:8")
    assert [one.match for one in read_rules(path).rules] == ["cpu-8", "cpu-.*", "x"]
    assert "# mine\n[[rule]]\n" in path.read_text()
    assert read_rules(path).select("cpu-8").mesh_shape.ici_mesh_shape == (1, 8, 1)


def test_headers_in_strings_and_comments_are_no_rules(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        'schema = 1\naxes = ["dp", "fsdp", "tp"]\n# [[rule]]\n[[rule]]\nmatch = "a"\nici = {}\n'
        '[rule.evidence]\nkind = "measured"\nstudy = """\n[[rule]]\n\\"""\n"""\n'
        "reference = '''\n[[rule]]'''\n[[ rule ]] # last\nmatch = 'b.*'\nici = {}\n"
    )
    merge(path, "b1")
    assert [one.match for one in read_rules(path).rules] == ["a", "b1", "b.*"]


def test_windows_line_ends_are_kept(tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes(MINE.replace("\n", "\r\n").encode())
    merge(path, "tpu-v5p-128")
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")


def on_axes(names, mesh, selector="cpu-4", **more):
    plan = Plan(axes=parse_mesh(mesh, names))
    return rule_for(plan, selector=selector, evidence=NO_EVIDENCE, **more)


def test_a_rule_over_other_axes_than_the_files_states_its_own(tmp_path):
    path = tmp_path / "r.toml"
    merge(path, "cpu-8", "dp:8")
    merge_rule(path, on_axes(("dp", "tp"), "dp:2,tp:2"), selector="cpu-4")
    merge_rule(
        path, on_axes(("model", "data"), "data:2", "cpu-2", batch_axes=["data"]), selector="cpu-2"
    )
    assert 'match = "cpu-4"\naxes = ["dp", "tp"]\nici' in path.read_text()
    assert 'axes = ["model", "data"]\nbatch_axes = ["data"]\n' in path.read_text()
    chosen = {name: read_rules(path).select(name) for name in ("cpu-8", "cpu-4", "cpu-2")}
    assert {name: one.mesh_axis_names for name, one in chosen.items()} == {
        "cpu-8": AXES,
        "cpu-4": ("dp", "tp"),
        "cpu-2": ("model", "data"),
    }
    assert chosen["cpu-4"].mesh_shape.ici_mesh_shape == (2, 2)
    assert chosen["cpu-2"].mesh_shape.ici_mesh_shape == (1, 2)
    assert chosen["cpu-2"].batch_axis_names == ("data",)
    # With the file's axes again, it states none.
    merge(path, "cpu-4", "dp:4")
    assert 'axes = ["dp", "tp"]' not in path.read_text()
    assert read_rules(path).select("cpu-4").mesh_axis_names == AXES


def test_batch_axes_stand_with_a_rule_only_where_they_differ(tmp_path):
    path = tmp_path / "r.toml"
    for selector, batch in (("a", ("dp", "fsdp")), ("b", ("dp", "fsdp")), ("c", ("dp",))):
        merge_rule(path, on_axes(AXES, "dp:8", selector, batch_axes=batch), selector=selector)
    # Of other axes: what the file says of those that there are.
    merge_rule(path, on_axes(("dp", "tp"), "dp:8", "d", batch_axes=("dp",)), selector="d")
    assert [line for line in path.read_text().splitlines() if "batch_axes" in line] == [
        'batch_axes = ["dp", "fsdp"]',
        'batch_axes = ["dp"]',
    ]
    found = [read_rules(path).select(selector).batch_axis_names for selector in "abcd"]
    assert found == [("dp", "fsdp"), ("dp", "fsdp"), ("dp",), ("dp",)]


def test_shardings_have_lines_of_their_own_and_are_merged(tmp_path):
    path = tmp_path / "mesh_rules.toml"
    plan = Plan(axes=parse_mesh("dp:2,tp:4", AXES), mapping=(("mlp", ("tp",)),))
    written = {"params/**/up": ["embed", ["mlp", "dp"]], "**/bias": [""], "step": []}
    found = rule_for(plan, selector="cpu-8", evidence=NO_EVIDENCE, shardings=written)
    merge_rule(path, found, selector="cpu-8")
    assert path.read_text().endswith(
        """
[rule.shardings]
"params/**/up" = ["embed", ["mlp", "dp"]]
"**/bias" = [""]
step = []
"""
    )
    merge_rule(path, rule("cpu-4", "dp:4"), selector="cpu-4")
    config = read_rules(path).select("cpu-8")
    assert config.sharding_patterns == Shardings(written)
    again = replace(found, shardings={"x": ["batch"]})
    merge_rule(path, again, selector="cpu-8")
    assert read_rules(path).rules[0] == in_file(again)
    # Those of another script have the same names in another order, in which they are tried.
    other = replace(found, shardings={"params/**/up": ["embed", ""], "x": ["batch"], "y": []})
    merge_rule(path, other, selector="cpu-8")
    assert list(read_rules(path).select("cpu-8").sharding_patterns) == ["params/**/up", "x", "y"]


def test_axis_types_are_in_the_rule(tmp_path):
    path = tmp_path / "r.toml"
    mixed = ("auto", "explicit", "auto")
    merge_rule(path, on_axes(AXES, "dp:8", "a", axis_types=("auto",) * 3), selector="a")
    merge_rule(path, on_axes(AXES, "dp:8", "unknown"), selector="unknown")
    merge_rule(path, on_axes(AXES, "dp:8", "b", axis_types=("explicit",) * 3), selector="b")
    merge_rule(path, on_axes(AXES, "dp:8", "c", axis_types=mixed), selector="c")
    assert [line for line in path.read_text().splitlines() if "axis_types" in line] == [
        'axis_types = "auto"',
        'axis_types = "explicit"',
        'axis_types = ["auto", "explicit", "auto"]',
    ]
    found = [read_rules(path).select(selector).axis_types for selector in "abc"]
    assert found == [("auto",) * 3, ("explicit",) * 3, mixed]


def test_a_file_of_the_former_version_is_read_as_auto(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(MINE)
    config = read_rules(path).select("cpu-8")
    assert config.axis_types == ("auto",) * 3
    assert config.mesh_axis_names == AXES
    assert config.batch_axis_names == ()


def test_json_is_the_same_tree(tmp_path):
    path = tmp_path / "r.json"
    merge(path, "cpu-8")
    merge(path, "cpu-4", "dp:4")
    merge(path, "cpu-8", "tp:8")
    assert [one["match"] for one in json.loads(path.read_text())["rule"]] == ["cpu-8", "cpu-4"]
    assert read_rules(path).select("cpu-8").mesh_shape.ici_mesh_shape == (1, 1, 8)


def test_a_link_stays_a_link_and_permissions_stay(tmp_path):
    real = tmp_path / "real.toml"
    real.write_text(MINE)
    real.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(real)
    merge(link, "tpu-v5p-128")
    assert link.is_symlink()
    assert len(read_rules(real).rules) == 3
    assert real.stat().st_mode & 0o777 == 0o640


HEAD = 'schema = 1\naxes = ["dp", "tp"]\n'
A = HEAD + "[[rule]]\nmatch = 'a'\n"
BROKEN = [
    ("", "`schema` is missing"),
    ("axes = [", "is not TOML: "),
    ('axes = ["dp"]', "`schema` is missing"),
    ('schema = 2\naxes = ["dp"]', "has schema 2, newer than 1, which this automesh reads"),
    ('schema = 0\naxes = ["dp"]', "has schema 0; there is none before 1"),
    ('schema = "1"\naxes = ["dp"]', '`schema` must be an integer, got "1"'),
    ('schema = true\naxes = ["dp"]', "`schema` must be an integer, got true"),
    ("schema = 1\naxes = []", "mesh axes must be distinct names, got []"),
    ('schema = 1\naxes = ["d-p"]', "`d-p` is not a mesh axis name"),
    (HEAD + 'batch_axes = ["dpp"]', "batch axis `dpp` is not a mesh axis (did you mean `dp`?)"),
    (HEAD + "[[rules]]\n", "`rules` is not a known key (did you mean `rule`?)"),
    (HEAD + "[[rule]]\nici = {}", "`rule[0].match` is missing"),
    (A + "icy = {}", "`rule[0].icy` is not a known key (did you mean `ici`?)"),
    (HEAD + "[[rule]]\nmatch = 'a('\nici = {}", "the rule's match `a(` is not a regular"),
    (A + "ici = { dp = '2' }", '`rule[0].ici.dp` must be an integer, got "2"'),
    (A + "ici = { pp = 2 }", "`rule[0].ici.pp` is not one of the rule's axes"),
    (A + "ici = {}\naxis_types = 'manuel'", "`rule[0]`: `manuel` is not an axis type; use auto,"),
    (A + "ici = {}\naxis_types = ['auto']\naxes = ['a-b']", "`rule[0]`: `a-b` is not a mesh axis"),
    (A + "ici = {}\naxis_types = ['auto', 'auto', 'auto']", "`rule[0]`: got 3 axis types"),
    (A + "ici = {}\naxis_types = 1", "`rule[0].axis_types` must be a string or an array, got 1"),
    (A + "ici = {}\nbatch_axes = ['dpp']", "batch axis `dpp` is not a mesh axis"),
    (A + "axes = ['a', 'a']\nici = {}", "mesh axes must be distinct names, got ['a', 'a']"),
    (A + "axes = ['a']\nici = { dp = 2 }", "`rule[0].ici.dp` is not one of the rule's axes"),
    (A + "ici = { dp = 0 }", "`rule[0]`: mesh size 0 in (0, 1)"),
    (A + "ici = { dp = -1, tp = -1 }", "`rule[0]`: mesh sizes (-1, -1) hold"),
    (
        A + "ici = {}\nknobs = { a = [1] }",
        "`rule[0].knobs.a` must be a boolean or an integer or a number or a string, got [1]",
    ),
    (
        A + "ici = {}\n[rule.evidence]\nkind = 'guessed'",
        "`rule[0].evidence.kind` must be 'measured', 'compiled' or 'estimated', got \"guessed\"",
    ),
    (
        A + "ici = {}\n[rule.evidence]\nkind = 'measured'\nstep = 1",
        "`rule[0].evidence.step` is not a known key (did you mean `step_s`?)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), BROKEN)
def test_a_broken_file_is_named_explained_and_left_alone(tmp_path, text, said):
    path = tmp_path / "r.toml"
    path.write_text(text)
    for act in (read_rules, lambda path: merge(path, "cpu-8"), check_mergeable):
        with pytest.raises(UsageError) as caught:
            act(path)
        assert said in caught.value.message
        assert caught.value.message.startswith(f"`{path}`")
    assert path.read_text() == text


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: no such file or directory"):
        read_rules(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot be read: it is a folder, not a file"):
        read_rules(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9")
    with pytest.raises(UsageError, match=r"is not UTF-8 text \(byte 2 is 0xe9\)"):
        read_rules(latin)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[1]")
    with pytest.raises(UsageError, match="must hold an object, got a list"):
        read_rules(wrong)


def test_a_layout_that_cannot_be_merged_into_is_left_alone(tmp_path):
    path = tmp_path / "r.toml"
    text = HEAD.replace('"tp"', '"fsdp", "tp"') + 'rule = [{ match = "a", ici = {} }]\n'
    path.write_text(text)
    with pytest.raises(UsageError, match="laid out in a way that a rule cannot be merged into"):
        merge(path, "cpu-8")
    assert path.read_text() == text


def test_a_folder_that_is_not_there_is_told_before_the_search(tmp_path):
    with pytest.raises(UsageError, match=r"the folder of `.*` does not exist"):
        check_mergeable(tmp_path / "no" / "r.toml")
    check_mergeable(tmp_path / "r.toml")
    assert not (tmp_path / "r.toml").exists()


WRITER = """
import sys
from pathlib import Path
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.evidence import Evidence
from automesh.mesh.rules.rule import rule_for
from automesh.mesh.rules.shardings import Shardings
from automesh.mesh.rules.file import merge_rule

path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
plan = Plan(axes=parse_mesh("dp:8"))
print("ready", flush=True)
for number in range(count):
    selector = f"{name}-{number}"
    rule = rule_for(plan, selector=selector, evidence=Evidence(kind="measured", step_s=1.5))
    merge_rule(path, rule, selector=selector)
    print(selector, flush=True)
"""


def start_writer(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_many_writers_lose_nothing(tmp_path):
    path = tmp_path / "r.toml"
    writers = [start_writer(path, f"w{index}", 12) for index in range(4)]
    for writer in writers:
        writer.communicate(timeout=300)
        assert writer.returncode == 0
    found = {one.match for one in read_rules(path).rules}
    assert found == {f"w{writer}-{number}" for writer in range(4) for number in range(12)}


def test_a_killed_writer_tears_nothing_and_blocks_nobody(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(f"# keep me\nschema = 1\naxes = {json.dumps(list(DEFAULT_AXES))}\n")
    done: list[str] = []
    chance = random.Random(7)
    for life in range(8):
        writer = start_writer(path, f"life{life}", 10_000)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        if life == 0:  # However busy the machine is, one rule is reported.
            done.append(writer.stdout.readline().strip())
        time.sleep(chance.uniform(0, 0.5))
        os.kill(writer.pid, signal.SIGKILL)
        done += writer.communicate(timeout=600)[0].split()
        found = [one.match for one in read_rules(path).rules]
        # What was reported is there; at most the rule in flight is there as well.
        assert set(done) <= set(found)
        assert len(found) <= len(done) + life + 1
    assert done
    last = rule_for(Plan(axes=parse_mesh("dp:8")), selector="last", evidence=NO_EVIDENCE)
    start = time.monotonic()
    merge_rule(path, last, selector="last")
    assert time.monotonic() - start < 20
    assert path.read_text().startswith("# keep me\n")
    # What the killed ones had begun is removed by the next who holds the lock.
    assert {file.name for file in tmp_path.iterdir()} == {"r.toml", ".r.toml.lock"}
