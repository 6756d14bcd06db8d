"""Reading what others may have written: bounds, kinds of files, and what people's editors write."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automesh import limits
from automesh.errors import UsageError
from automesh.mesh.rules.file import check_mergeable, merge_rule, read_rules
from automesh.program.script.sources import hash_of_content
from automesh.reading import (
    Malformed,
    OutOfBounds,
    Unreadable,
    check_regular,
    kind_of_file,
    open_regular,
    parse_json,
    parse_toml,
    read_bytes,
    read_text,
)
from tests.support.cases.bad_inputs import RULES


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(Unreadable) as caught:
        read()
    return caught.value.message


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    assert read_bytes(path, limit_bytes=1000) == b"x" * 1000
    message = refusal(lambda: read_bytes(path, limit_bytes=999))
    assert message == f"`{path}` cannot be read: it holds more than 999 B"


def test_a_file_without_an_end_is_no_use_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**40)
    began_s = time.process_time()
    assert "holds more than 4.00 MiB" in refusal(lambda: read_text(path))
    assert time.process_time() - began_s < 1.0


def test_a_file_that_does_not_tell_its_size_is_read_all_the_same() -> None:
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert b"Pid:" in read_bytes(path, limit_bytes=2**20)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "it is a folder, not a file"),
        (os.mkfifo, "it is a named pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (lambda path: path.symlink_to(path.name), "too many levels of symbolic links"),
        (lambda path: path.symlink_to("nothing"), "no such file or directory"),
        (lambda path: None, "no such file or directory"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "a"
    make(path)
    began_s = time.monotonic()
    for read in (open_regular, read_text):
        assert refusal(lambda read=read: read(path)) == f"`{path}` cannot be read: {reason}"
    assert time.monotonic() - began_s < 30  # A pipe would be waited for without end.
    if reason.startswith("no such"):
        check_regular(path)
    else:
        assert refusal(lambda: check_regular(path)).endswith(reason)


def test_kinds_of_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    assert kind_of_file(tmp_path) == "a folder"
    assert kind_of_file(tmp_path / "pipe") == "a named pipe"
    assert kind_of_file(Path("/dev/null")) == "a device"
    assert kind_of_file(tmp_path / "file") == kind_of_file(tmp_path / "no") == ""
    assert kind_of_file(Path("a\0b")) == ""


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000])
def test_a_name_that_no_file_has(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for read in (check_regular, open_regular, read_text):
        assert " cannot be read: " in refusal(lambda read=read: read(path))


def test_links_are_followed_and_circles_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "text"
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    with pytest.raises(UsageError, match="leads to itself"):
        check_mergeable(circle)


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    os.mkfifo(path)
    real = Path.stat
    regular = real(Path(__file__))
    # It was a file when it was asked about.
    monkeypatch.setattr(
        Path, "stat", lambda one, **how: regular if one == path else real(one, **how)
    )
    answers: list[str] = []
    reader = threading.Thread(target=lambda: answers.append(refusal(lambda: open_regular(path))))
    reader.start()
    reader.join(20)
    assert answers == [f"`{path}` cannot be read: it is a named pipe, not a file"]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(path) == "a\r\nb"
    path.write_bytes(b"\xef\xbb\xbfa\xff")
    assert refusal(lambda: read_text(path)) == f"`{path}` is not UTF-8 text (byte 4 is 0xff)"


def test_rules_of_any_editor_are_merged_into(tmp_path: Path) -> None:
    path = tmp_path / "mesh_rules.toml"
    path.write_text(RULES)
    rule = read_rules(path).rules[0]
    path.write_bytes(b"\xef\xbb\xbf" + RULES.replace("\n", "\r\n").encode())
    check_mergeable(path)
    merged = merge_rule(path, rule, selector="cpu-8")
    assert read_rules(path) == merged
    assert b"# Kept by hand: do not lose me.\r\n" in path.read_bytes()


# Texts


DEEP = "[" * 3000 + "]" * 3000


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def test_texts_nest_up_to_a_bound() -> None:
    deep = nested(limits.NESTING - 1)
    assert parse_json(json.dumps([deep])) == [deep]
    assert parse_toml(f"a = {json.dumps(deep)}") == {"a": deep}
    for text in (json.dumps(nested(limits.NESTING + 1)), DEEP, "[" * 10**6):
        with pytest.raises(Malformed):
            parse_json(text)
    for text in (
        f"a = {json.dumps(nested(limits.NESTING + 1))}",
        f"a = {DEEP}",
        "a." * limits.NESTING + "a = 1",
        "a . " * limits.NESTING + "a = 1",
        "'a'.\"b\"." * limits.NESTING + "a = 1",
        "[" + "a." * limits.NESTING + "a]",
    ):
        with pytest.raises(OutOfBounds, match=f"nested more than {limits.NESTING} deep"):
            parse_toml(text)


def test_numbers_and_sentences_with_dots_are_no_long_keys() -> None:
    text = f'# {"one two. " * 60}\na = {[1.5] * 200}\nb = "{"some words, and more. " * 200}"\n'
    assert parse_toml(text)["a"] == [1.5] * 200


@pytest.mark.parametrize("parse", [parse_json, lambda text: parse_toml(f"a = {text}")])
def test_whole_numbers_have_a_bound(parse: Callable[[str], Any]) -> None:
    parse(str(2**63 - 1))
    parse(str(-(2**63)))
    for text in (str(2**63), "9" * 5000, "-" + "9" * 400):
        with pytest.raises(OutOfBounds, match="a whole number of more than 64 bits"):
            parse(text)


def test_half_of_a_character_is_refused() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "😀"
    for text in ('"\\ud800"', '{"\\udc00": 1}', '[["\\udfff"]]'):
        with pytest.raises(Malformed, match="half of a character"):
            parse_json(text)


def test_a_syntax_error_is_told_with_its_line() -> None:
    with pytest.raises(Malformed, match=re.escape("(at line 2, column 5)")):
        parse_toml("a = 1\nb = ]\n")
    with pytest.raises(Malformed, match="line 2 column 1"):
        parse_json("[1,\n")


# What else waits for a pipe


def test_a_pipe_that_a_script_has_opened_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    answers: list[str] = []
    reader = threading.Thread(target=lambda: answers.append(hash_of_content(path)), daemon=True)
    reader.start()
    reader.join(20)
    assert answers == [""]
