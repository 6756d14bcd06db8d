"""The client of a job that has one process answers as jax's own does."""

from __future__ import annotations

import threading

import pytest
from jax.errors import JaxRuntimeError

from automesh.program.capture.world.one_process import LonelyClient


def test_a_key_that_is_not_there_is_an_error_of_jax() -> None:
    """Libraries catch that one: before, orbax could not save in a script with `initialize()`."""
    client = LonelyClient()
    with pytest.raises(JaxRuntimeError, match="NOT_FOUND"):
        client.key_value_try_get("a")
    with pytest.raises(JaxRuntimeError, match="DEADLINE_EXCEEDED"):
        client.blocking_key_value_get("a", 10)
    client.key_value_set("a", "1")
    with pytest.raises(JaxRuntimeError, match="ALREADY_EXISTS"):
        client.key_value_set("a", "2")


def test_a_key_is_waited_for_while_a_thread_may_set_it() -> None:
    client = LonelyClient()
    other = threading.Timer(0.1, client.key_value_set, ("a/b", "1"))
    other.start()
    assert client.blocking_key_value_get("a/b", 5000) == "1"
    client.key_value_delete("a/")
    assert client.key_value_dir_get("a") == []
