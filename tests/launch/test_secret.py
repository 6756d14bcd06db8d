"""The token, and the seal of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.launch import secret
from automesh.launch.secret import (
    PIECE_BYTES,
    BrokenSeal,
    Seal,
    is_proof,
    new_nonce,
    new_token,
    proof,
    read_token,
)

TOKEN = "0123456789abcdef-a-token"


def test_a_token_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    assert read_token({"AUTOMESH_TOKEN": f" {TOKEN}\n"}) == TOKEN
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert read_token({"AUTOMESH_TOKEN_FILE": str(file)}) == TOKEN
    assert read_token({"AUTOMESH_TOKEN": "x" * 20, "AUTOMESH_TOKEN_FILE": "no"}) == "x" * 20


def test_without_a_token_nothing_is_served(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no token is set") as caught:
        read_token({})
    assert "AUTOMESH_TOKEN_FILE" in caught.value.hint
    with pytest.raises(UsageError, match="could be guessed"):
        read_token({"AUTOMESH_TOKEN": "secret"})
    with pytest.raises(UsageError, match="cannot be read"):
        read_token({"AUTOMESH_TOKEN_FILE": str(tmp_path / "missing")})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with pytest.raises(UsageError, match="others may read the token") as caught:
        read_token({"AUTOMESH_TOKEN_FILE": str(file)})
    assert caught.value.hint == f"run `chmod 600 {file}`"


def test_a_proof_is_of_one_side_in_one_conversation() -> None:
    mine, theirs = new_nonce(), new_nonce()
    right = proof(TOKEN, "agent", mine, theirs)
    assert is_proof(right, proof(TOKEN, "agent", mine, theirs))
    others = (
        proof(new_token(), "agent", mine, theirs),
        proof(TOKEN, "search", mine, theirs),
        proof(TOKEN, "agent", theirs, mine),
        proof(TOKEN, "agent", mine, new_nonce()),
    )
    for other in (*others, "", None, 3, right[:-1]):
        assert not is_proof(other, right)
    assert TOKEN not in right


def only(pieces: Iterator[bytes]) -> bytes:
    (piece,) = pieces
    return piece


def seals() -> tuple[Seal, Seal]:
    return Seal(TOKEN, "agent", "a", "b"), Seal(TOKEN, "agent", "a", "b")


def test_messages_arrive_as_they_were_sent() -> None:
    sender, reader = seals()
    for message in ({"beat": True}, {"from": "x", "message": {"n": [1.5, float("inf")]}}):
        assert reader.open(b"".join(sender.close(message))) == message


def test_a_long_message_comes_in_pieces() -> None:
    sender, reader = seals()
    message = {"log": "x" * (5 * PIECE_BYTES // 2)}
    pieces = list(sender.close(message))
    assert [reader.open(piece) for piece in pieces] == [None, None, message]
    assert max(map(len, pieces)) < PIECE_BYTES + 100
    assert reader.open(b"".join(sender.close({"beat": True}))) == {"beat": True}
    sender, reader = seals()
    pieces = list(sender.close(message))
    with pytest.raises(BrokenSeal):
        reader.read(iter((pieces[0], pieces[2])))
    sender, reader = seals()
    with pytest.raises(BrokenSeal):
        reader.read(iter(list(sender.close(message))[:2]))


def test_a_message_without_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "LARGEST_BYTES", 2 * PIECE_BYTES)
    sender, reader = seals()
    with pytest.raises(BrokenSeal, match="a message is longer than"):
        reader.read(sender.close({"log": "x" * (5 * PIECE_BYTES // 2)}))


def test_what_was_changed_repeated_or_left_out_is_noticed() -> None:
    sender, reader = seals()
    first, second = only(sender.close({"kill": False})), only(sender.close({"kill": False}))
    assert first != second
    with pytest.raises(BrokenSeal):
        reader.open(first[:-1] + b"]")
    sender, reader = seals()
    first, second = only(sender.close({"a": 1})), only(sender.close({"a": 2}))
    with pytest.raises(BrokenSeal):
        reader.open(second)
    sender, reader = seals()
    first = only(sender.close({"a": 1}))
    reader.open(first)
    with pytest.raises(BrokenSeal):
        reader.open(first)
    with pytest.raises(BrokenSeal):
        Seal(TOKEN, "search", "a", "b").open(only(Seal(TOKEN, "agent", "a", "b").close({})))
    with pytest.raises(BrokenSeal):
        Seal(TOKEN, "search", "a", "b").open(b"")
