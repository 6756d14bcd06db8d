"""Two hosts on one machine: network namespaces with a cable between them that is as slow as DCN."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from automesh.errors import AutomeshError
from automesh.worker.environment import TOKEN

_MARK = "AUTOMESH_DCN_SWEEP_HOSTS"
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
_OUTSIDE = ("unshare", "--map-root-user", "--net", "--mount", "--uts")
_ADDRESSES = {"head": "10.9.0.1", "host-a": "10.9.0.2", "host-b": "10.9.0.3"}
_HOSTS = ("host-a", "host-b")
_PORT = 8600
_READY_S = 10.0
# A token bucket; what would wait for longer than the latency is dropped, and sent again.
_BUCKET = "tbf rate {mbit}mbit burst 256kb latency 200ms"
# All that `two_hosts` has to be allowed.
_TRIAL = (
    "mount --bind /dev/null /etc/hosts && hostname head && ip link add net type bridge && "
    "ip link add one type veth peer name other && "
    f"tc qdisc add dev one root {_BUCKET.format(mbit=1000)}"
)


def is_inside() -> bool:
    """Whether this process runs where `two_hosts` can be made."""
    return _MARK in os.environ


def why_not() -> str:
    """Why no hosts can be made here; empty if they can."""
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        return f"commands are not installed: {', '.join(missing)}"
    tried = subprocess.run(
        [*_OUTSIDE, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return f"this user may not make networks: {tried.stderr.strip()}"
    return ""


def run_inside(arguments: Sequence[str]) -> int:
    """Runs this benchmark again in namespaces of its own; gives its exit code.

    Raises:
      AutomeshError: no hosts can be made here.
    """
    if why := why_not():
        raise AutomeshError(f"--network-gbit: {why}")
    again = [*_OUTSIDE, sys.executable, "-m", "benchmarks.dcn_sweep", *arguments]
    return subprocess.run(again, env={**os.environ, _MARK: "1"}, check=False).returncode


@contextmanager
def two_hosts(gbit: float, folder: Path) -> Generator[str]:
    """An agent on each of two hosts, started again whenever its search has ended.

    Processes of one host reach each other at the full speed of the machine; those of two hosts
    over links that carry `gbit` in each direction. The token of the agents is in the environment
    of this process.

    Args:
      gbit: 10^9 bit/s of each host's link.
      folder: for what the agents print.

    Yields:
      What searches listen at.

    Raises:
      AutomeshError: the network cannot be made.
    """
    os.environ[TOKEN] = secrets.token_hex(32)
    folder.mkdir(parents=True, exist_ok=True)
    names = folder / "hosts"
    known = {"localhost": "127.0.0.1", **_ADDRESSES}
    names.write_text("".join(f"{at} {name}\n" for name, at in known.items()), encoding="utf-8")
    _do("mount", "--bind", str(names), "/etc/hosts")
    _do("hostname", "head")
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", "net", "type", "bridge")
    _do("ip", "address", "add", f"{_ADDRESSES['head']}/24", "dev", "net")
    _do("ip", "link", "set", "net", "up")
    listen = f"{_ADDRESSES['head']}:{_PORT}"
    with ExitStack() as stack:
        for name in _HOSTS:
            enter = stack.enter_context(_host(name, gbit))
            log = stack.enter_context((folder / f"agent-{name}.log").open("w", encoding="utf-8"))
            stack.enter_context(_agent(enter, listen, log))
        yield listen


@contextmanager
def _host(name: str, gbit: float) -> Generator[list[str]]:
    """Gives the command by which others are run on the host."""
    with _running(["unshare", "--net", "--uts", "sleep", "infinity"]) as holder:
        _until_apart(holder)
        pid, port = str(holder.pid), f"to-{name}"
        _do("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _do("ip", "link", "set", port, "master", "net", "up")
        enter = ["nsenter", "--target", pid, "--net", "--uts"]
        _do(*enter, "hostname", name)
        _do(*enter, "ip", "link", "set", "lo", "up")
        _do(*enter, "ip", "address", "add", f"{_ADDRESSES[name]}/24", "dev", "eth0")
        _do(*enter, "ip", "link", "set", "eth0", "up")
        bucket = _BUCKET.format(mbit=round(gbit * 1000))
        _do(*enter, "tc", "qdisc", "add", "dev", "eth0", "root", *bucket.split())
        yield enter


@contextmanager
def _agent(enter: Sequence[str], listen: str, log: IO[str]) -> Generator[None]:
    agent = [sys.executable, "-P", "-m", "automesh", "agent", listen, "--wait", "1h"]
    for_ever = ["sh", "-c", 'while true; do "$@"; sleep 0.2; done', "sh", *agent]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with _running([*enter, *for_ever], log=log, variables=variables):
        yield


@contextmanager
def _running(
    command: Sequence[str],
    *,
    log: IO[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """A process in a session of its own, all of which is ended with the body."""
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=variables, start_new_session=True
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _until_apart(holder: subprocess.Popen[bytes]) -> None:
    """Waits until a process has its own network."""
    deadline = time.monotonic() + _READY_S
    own, its = (Path(f"/proc/{who}/ns/net") for who in ("self", holder.pid))
    while own.readlink() == its.readlink():
        if holder.poll() is not None or time.monotonic() > deadline:
            raise AutomeshError("a network namespace could not be made")
        time.sleep(0.01)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AutomeshError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
