"""A rules file that somebody edits while a search runs, or in which somebody else has planted
something: no text is lost, and what cannot be brought together is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from automesh import files
from automesh.errors import UsageError
from automesh.limits import EDITED_MEANWHILE
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.evidence import NO_EVIDENCE, Evidence
from automesh.mesh.rules import file as rules_file
from automesh.mesh.rules.file import RuleEdited, check_mergeable, merge_rule, read_rules
from automesh.mesh.rules.rule import MeshRule, rule_for

AXES = ("dp", "tp")
MINE = """# mine
schema = 1
axes = ["dp", "tp"]

[[rule]]
match = 'cpu-8'
ici = { dp = 8 }

[rule.evidence]
kind = "measured"
step_s = 1.0
"""
OTHER_RULE = "\n[[rule]]\nmatch = 'cpu-4'\nici = { dp = 4 }  # by hand\n"


def found(mesh: str, step_s: float = 2.0) -> MeshRule:
    plan = Plan(axes=parse_mesh(mesh, AXES))
    evidence = Evidence(kind="measured", step_s=step_s, study="another")
    return rule_for(plan, selector="cpu-8", evidence=evidence)


def sizes(path: Path, selector: str = "cpu-8") -> tuple[int, ...]:
    return tuple(read_rules(path).select(selector).mesh_shape.ici_mesh_shape)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mesh_rules.toml"
    file.write_text(MINE)
    return file


@pytest.fixture
def just_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[int]]:
    """Lets something happen between the reading of the file and its replacement, once."""

    def arrange(act: Callable[[], object]) -> list[int]:
        calls: list[int] = []
        replace = files.replace_unchanged

        def late(path: Path, content: str, *, expected: bytes) -> bool:
            calls.append(1)
            if len(calls) == 1:
                act()
            return replace(path, content, expected=expected)

        monkeypatch.setattr(files, "replace_unchanged", late)
        return calls

    return arrange


Before = Callable[[Callable[[], object]], list[int]]


def test_an_edit_while_the_rule_is_merged_survives_with_it(path: Path, just_before: Before) -> None:
    calls = just_before(lambda: path.write_text(MINE.replace("# mine", "# edited") + OTHER_RULE))
    merge_rule(path, found("tp:8"), selector="cpu-8")
    assert len(calls) == 2, "merged anew"
    assert path.read_text().startswith("# edited\n")
    assert "# by hand" in path.read_text()
    assert (sizes(path), sizes(path, "cpu-4")) == ((1, 8), (4, 1))


def test_an_edit_by_a_new_file_survives_too(path: Path, just_before: Before) -> None:
    def save() -> None:
        new = path.with_name("new")
        new.write_text(MINE + OTHER_RULE)
        new.replace(path)  # As many editors save.

    just_before(save)
    merge_rule(path, found("tp:8"), selector="cpu-8")
    assert (sizes(path), sizes(path, "cpu-4")) == ((1, 8), (4, 1))


def test_an_edit_that_breaks_the_file_stays_and_is_told(path: Path, just_before: Before) -> None:
    just_before(lambda: path.write_text("axes = ["))
    with pytest.raises(UsageError, match="is not TOML"):
        merge_rule(path, found("tp:8"), selector="cpu-8")
    assert path.read_text() == "axes = ["


def test_what_an_editor_has_half_written_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("")  # Truncated, and not written yet.
    rest = [MINE + OTHER_RULE]
    monkeypatch.setattr(rules_file.time, "sleep", lambda _: rest and path.write_text(rest.pop()))
    merge_rule(path, found("tp:8"), selector="cpu-8")
    assert (sizes(path), sizes(path, "cpu-4")) == ((1, 8), (4, 1))


def test_a_file_that_appears_meanwhile_is_merged_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "mesh_rules.toml", files.write_new

    def late(place: Path, content: str) -> bool:
        path.write_text(MINE + OTHER_RULE)
        return write(place, content)

    monkeypatch.setattr(files, "write_new", late)
    merge_rule(path, found("tp:8"), selector="cpu-8")
    assert (sizes(path), sizes(path, "cpu-4")) == ((1, 8), (4, 1))


def test_a_program_that_writes_without_end_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def never(*_: object, **__: object) -> bool:
        calls.append(1)
        return False

    monkeypatch.setattr(files, "replace_unchanged", never)
    with pytest.raises(UsageError, match="by another program again and again"):
        merge_rule(path, found("tp:8"), selector="cpu-8")
    assert len(calls) == EDITED_MEANWHILE
    assert path.read_text() == MINE


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param(MINE.replace("dp = 8", "dp = 2, tp = 4"), id="a rule of a search"),
        pytest.param(MINE.partition("[rule.evidence]")[0], id="without its evidence"),
    ],
)
def test_the_rule_that_was_edited_by_hand_stays(path: Path, edited: str) -> None:
    before = check_mergeable(path)
    path.write_text(edited)
    with pytest.raises(RuleEdited, match=r"the rule for cpu-8 in .* was edited while the search"):
        merge_rule(path, found("tp:8"), selector="cpu-8", before=before)
    assert path.read_text() == edited
    # The next search has seen the edit, and was asked for all the same.
    merge_rule(path, found("tp:8"), selector="cpu-8", before=check_mergeable(path))
    assert sizes(path) == (1, 8)


def test_a_rule_that_was_added_by_hand_stays(tmp_path: Path) -> None:
    path = tmp_path / "mesh_rules.toml"
    before = check_mergeable(path)
    assert before == ()
    path.write_text(MINE.partition("[rule.evidence]")[0])
    with pytest.raises(RuleEdited):
        merge_rule(path, found("tp:8"), selector="cpu-8", before=before)
    assert sizes(path) == (8, 1)


def test_edits_elsewhere_and_rules_of_other_searches_do_not_keep_a_rule_out(path: Path) -> None:
    before = check_mergeable(path)
    merge_rule(path, found("dp:2,tp:4", step_s=3.0), selector="cpu-8", before=before)
    path.write_text(path.read_text() + OTHER_RULE)
    merge_rule(path, found("tp:8"), selector="cpu-8", before=before)
    assert (sizes(path), sizes(path, "cpu-4")) == ((1, 8), (4, 1))


# What others have planted


@pytest.mark.parametrize("name", [".mesh_rules.toml.tmp", ".mesh_rules.toml.lock"])
def test_no_planted_link_is_written_through(path: Path, name: str) -> None:
    victim = path.with_name("victim")
    victim.write_text("mine")
    path.with_name(name).symlink_to(victim)
    try:
        merge_rule(path, found("tp:8"), selector="cpu-8")
    except UsageError as error:
        assert name.endswith(".lock")
        assert f"`{path.with_name(name)}` cannot be written: " in error.message
    assert victim.read_text() == "mine"


def test_a_folder_in_the_place_of_the_draft_is_in_nobodys_way(path: Path) -> None:
    path.with_name(".mesh_rules.toml.tmp").mkdir()
    check_mergeable(path)
    merge_rule(path, found("tp:8"), selector="cpu-8")
    assert sizes(path) == (1, 8)


def test_a_folder_in_the_place_of_the_lock_is_told_before_the_search(path: Path) -> None:
    lock = path.with_name(".mesh_rules.toml.lock")
    lock.mkdir()
    with pytest.raises(UsageError) as caught:
        check_mergeable(path)
    assert caught.value.message == f"`{lock}` cannot be written: is a directory"


@pytest.mark.parametrize("what", ["folder", "pipe", "device"])
def test_what_is_no_file_is_told_before_the_search(tmp_path: Path, what: str) -> None:
    path = tmp_path / "mesh_rules.toml"
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to("/dev/null")
    with pytest.raises(UsageError, match=f"is a {what}, not a file|is a named {what}, not a file"):
        check_mergeable(path)
    with pytest.raises(UsageError, match="cannot be"):
        merge_rule(path, found("tp:8"), selector="cpu-8")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_that_another_account_made_is_not_followed(path: Path) -> None:
    link = path.with_name("linked.toml")
    link.symlink_to(path)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    for act in (check_mergeable, lambda file: merge_rule(file, found("tp:8"), selector="cpu-8")):
        with pytest.raises(UsageError, match="is a link that another account made"):
            act(link)
    assert path.read_text() == MINE
    # Whoever has the folder may put into it what they like: the link says no more than a file.
    os.chown(path.parent, 65534, 65534)
    merge_rule(link, found("tp:8"), selector="cpu-8")
    assert link.is_symlink() and sizes(path) == (1, 8)


def test_links_in_a_circle_are_one_sentence(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(UsageError, match="is a symbolic link that leads to itself"):
        check_mergeable(one)


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "mesh_rules.toml"
    link.symlink_to("folder/real.toml")
    assert check_mergeable(link) == ()
    rule = rule_for(Plan(axes=parse_mesh("dp:8", AXES)), selector="cpu-8", evidence=NO_EVIDENCE)
    merge_rule(link, rule, selector="cpu-8")
    assert link.is_symlink() and sizes(tmp_path / "folder" / "real.toml") == (8, 1)
