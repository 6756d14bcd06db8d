"""What tells one search by a command from another: its name, its sources and its versions."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from automesh.mesh.evidence import relevant_environment
from automesh.tuner.command.step_times import JsonLines
from automesh.tuner.request import SearchRequest

# What decides what a command computes; a file that it writes must not make its own figures stale.
_SOURCES = (
    *(".py", ".sh", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg", ".conf", ".gin"),
    *(".libsonnet", ".jsonnet", ".star", ".txtpb", ".textproto", ".env"),
)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?|pypy(\d+(\.\d+)*)?")
_ASK_LIMIT_S = 30.0
_ASK_VERSIONS = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print("\\n" + json.dumps(found))
"""
Pairs = tuple[tuple[str, str], ...]


def study_name(request: SearchRequest, *, selector: str, axes: tuple[str, ...]) -> str:
    """`<workload>-<target>-<hash>`; hashed are the template, where it runs, where its step times
    come from, the target, the space and the axes."""
    identity = [
        "command",
        str(request.command.template),
        str(Path.cwd()),
        str(request.command.source),
        selector,
        request.space,
        list(axes),
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    return f"{request.command.workload}-{selector}-{digest}"


def source_hash(request: SearchRequest) -> str:
    """Hash of the scripts and settings that the command names, as far as they exist.

    Programs that are found on PATH belong to the versions, data and what runs write to neither.
    """
    digest = hashlib.sha256()
    for path in _named_files(request):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _named_files(request: SearchRequest) -> list[Path]:
    words = request.command.template.constants
    found = [Path(words[0])] if "/" in words[0] else []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-m":
            module = Path(*word.split("."))
            found += [module.with_suffix(".py"), module / "__main__.py"]
        # Also in `--config=base.yml`.
        found += [Path(text) for text in (word, word.partition("=")[2]) if text.endswith(_SOURCES)]
    source = request.command.source
    written = Path(source.file) if isinstance(source, JsonLines) else None
    return [path for path in dict.fromkeys(found) if path != written and path.is_file()]


def provenance(request: SearchRequest, environ: Mapping[str, str]) -> Pairs:
    """Versions of what runs the command, as far as they can be asked, and the environment."""
    versions = {"automesh": version("jax-automesh")} | _versions(request.command.program)
    return tuple(sorted((*versions.items(), *relevant_environment(environ).items())))


def _versions(program: str) -> dict[str, str]:
    """What the Python that runs a command has installed; nothing if it is not known to be one."""
    python = program if _PYTHON.fullmatch(Path(program).name) else _interpreter(program)
    if not python:
        return {}
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSIONS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_LIMIT_S,
            check=True,
        )
        found: dict[str, str] = json.loads(asked.stdout.decode().strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}  # It may still run the command: then the versions are not known.
    return found


def _interpreter(program: str) -> str:
    """The Python in the first line of a script, such as pip installs; empty for anything else."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(512)
    except OSError:
        return ""
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if len(words) == 1 and _PYTHON.fullmatch(Path(words[0]).name) else ""
