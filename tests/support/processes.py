"""Several jax processes on this machine, each with its own virtual devices, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.support.paths import ROOT

# Compiling takes most of a process' time, and these make it several times as fast.
_FAST_COMPILES = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # An unknown flag ends a process, and jax 0.11 does not know this one any more.
    *(
        ("--xla_cpu_use_fusion_emitters=false",)
        if Version(metadata.version("jax")) < Version("0.11")
        else ()
    ),
)


class ProcessesFailed(AssertionError):
    """A process ended with an error, or not in time; tells its last words."""


def run_processes(
    count: int, checks: Sequence[str], directory: Path, *, timeout_s: float = 150
) -> list[dict[str, Any]]:
    """What checks of `tests.support.jobs.jax_process` gave on each process, in their order.

    When this returns or raises, none of the processes is left, nor any child of theirs.

    Args:
      directory: for results and logs.

    Raises:
      ProcessesFailed: one of them failed, or they took longer than `timeout_s`.
    """
    port = str(free_ports(1))
    commands = [
        [
            "-m",
            "tests.support.jobs.jax_process",
            port,
            str(count),
            str(index),
            str(_result(directory, index)),
        ]
        for index in range(count)
    ]
    run_together([[*command, *checks] for command in commands], directory, timeout_s=timeout_s)
    return [json.loads(_result(directory, index).read_text()) for index in range(count)]


def run_together(commands: Sequence[Sequence[str]], directory: Path, *, timeout_s: float) -> None:
    """Runs Python with each of the commands at the same time; kills all once one has failed.

    Raises:
      ProcessesFailed: as for `run_processes`.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, command in enumerate(commands):
            with _log(directory, index).open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=ROOT,
                        env={**os.environ, "XLA_FLAGS": " ".join(_FAST_COMPILES)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _await(started, directory, timeout_s)
    finally:
        for process in started:
            # The whole session: what a process has started, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(started: Sequence[subprocess.Popen[bytes]], directory: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in started]
        for index, code in enumerate(codes):
            # The others would wait for it until their collectives time out.
            if code not in (None, 0):
                raise ProcessesFailed(
                    f"process {index} ended with {code}: {_tail(directory, index)}"
                )
        if None not in codes:
            return
        if time.monotonic() > end:
            late = codes.index(None)
            raise ProcessesFailed(
                f"process {late} did not end in {timeout_s:g} s: {_tail(directory, late)}"
            )
        time.sleep(0.05)


def free_ports(count: int) -> int:
    """The first of so many ports of this machine in a row that nothing listens on."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for more in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + more))
            # Taken, or past the last port.
            except (OSError, OverflowError):
                continue
            return port


def _result(directory: Path, index: int) -> Path:
    return directory / f"result_{index}.json"


def _log(directory: Path, index: int) -> Path:
    return directory / f"log_{index}.txt"


def _tail(directory: Path, index: int) -> str:
    return "\n".join(_log(directory, index).read_text(errors="replace").splitlines()[-25:])
