"""Keeps the shell commands of a script from changing files while it is run up to its step (no jax).

A command runs in a process of its own, which does not see the private layer. Commands that make,
copy, move and remove files are done in the layer instead; others that write are not run, which a
notice says. All that only reads, such as `git rev-parse HEAD` or `nvidia-smi`, is run as it is.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automesh.program.capture.world.told import tell

# Programs that change files, in a way that is not followed here. Those that fetch or unpack data
# (`wget`, `tar`) are run, as the script needs what they make.
_WRITE = frozenset({
    "chmod", "chown", "dd", "gzip", "ln", "rsync", "scp", "sed", "shred", "tee", "truncate", "zip",
})  # fmt: skip
# Programs that copy to another place if their last word is one.
_COPY = frozenset({"aws", "azcopy", "gcloud", "gsutil", "rclone", "s3cmd"})
# Commands of git that only read.
_GIT_READS = frozenset({
    "branch", "cat-file", "config", "describe", "diff", "log", "ls-files", "remote", "rev-list",
    "rev-parse", "show", "status", "symbolic-ref",
})  # fmt: skip
# Between two commands of a line; a pipe and a redirection make one command of what they join.
_ENDS = re.compile(r"&&|;|\n")
_JOINS = re.compile(r"[|<>`]|\$\(|&(?!&)")
_WRITES_TO = re.compile(r"(?<![0-9&>])>>?(?!>|\s*/dev/|\s*&)")
_BEFORE_COMMANDS = frozenset({"sudo", "time", "nohup", "command"})
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})
# In place of the program of a command that writes in a way that is not followed here.
_UNKNOWN = ">"
_DONE, _FAILED = "true", "false"


@contextmanager
def commands_in_layer() -> Generator[None]:
    """Does in the private layer what commands of the body would do to files."""
    owner: Any = os
    kind: Any = subprocess.Popen
    system, start = owner.system, kind.__init__

    @functools.wraps(system)
    def run_system(command: Any) -> int:
        instead = _instead_of(command, shell=True)
        return system(command) if instead is None else 256 * (instead != _DONE)

    @functools.wraps(start)
    def begin(self: Any, args: Any, *given: Any, **settings: Any) -> None:
        instead = _instead_of(args, shell=bool(settings.get("shell")))
        if instead is not None:
            args, settings["shell"] = [instead], False
        start(self, args, *given, **settings)

    owner.system, kind.__init__ = run_system, begin
    try:
        yield
    finally:
        owner.system, kind.__init__ = system, start


def _instead_of(command: Any, *, shell: bool) -> str | None:
    """Does in the layer what a command does to files, or leaves it out.

    Returns:
      The program that is run instead, which says whether that worked; None if the command itself is
        to be run.
    """
    try:
        lines = _commands(command, shell=shell)
    except (TypeError, ValueError):
        return None
    if not any(_may_write(words) for words in lines):
        return None
    if not all(words[0] in _DONE_HERE for words in lines):
        text = command if isinstance(command, str) else shlex.join(map(os.fsdecode, command))
        tell(f"a command of the script was not run, as it writes files: `{text}`")
        return _DONE
    return _DONE if all(_is_done(words) for words in lines) else _FAILED


def _commands(command: Any, *, shell: bool) -> list[list[str]]:
    """Returns the words of each command of a line."""
    if not isinstance(command, str | bytes | os.PathLike):
        words = [os.fsdecode(word) for word in command]
        while words and Path(words[0]).name in _BEFORE_COMMANDS:
            del words[0]
        if len(words) > 2 and Path(words[0]).name in _SHELLS and words[1] == "-c":
            return _commands(words[2], shell=True)
        return [[Path(words[0]).name, *words[1:]]] if words else []
    text = os.fsdecode(command)
    if not shell:
        return [[Path(text).name]]
    return [words for part in _ENDS.split(text) if (words := _words(part.strip()))]


def _words(text: str) -> list[str]:
    """Returns the words of one command in a shell; what joins several commands is one word."""
    if _WRITES_TO.search(text):
        return [_UNKNOWN, text]
    if _JOINS.search(text):
        joined = [part.split() for part in text.split("|")]
        commands = [[Path(one[0]).name, *one[1:]] for one in joined if one]
        return [_UNKNOWN, text] if any(map(_may_write, commands)) else [text]
    words: list[str] = []
    for word in shlex.split(text):
        plain = os.path.expandvars(word)
        plain = str(Path(plain).expanduser()) if plain.startswith("~") else plain
        words += sorted(glob.glob(plain)) or [plain]  # noqa: PTH207 - it may be absolute
    found = _commands(words, shell=False)
    return found[0] if len(found) == 1 else [_UNKNOWN, text] if found else []


def _may_write(words: Sequence[str]) -> bool:
    name, given = words[0], list(words[1:])
    if name == "git":
        while given and given[0].startswith("-"):
            del given[: 2 if given[0] in ("-C", "-c") else 1]
        return bool(given) and given[0] not in _GIT_READS
    if name in _COPY and given:
        return "://" in given[-1] or "rm" in given
    return name in _DONE_HERE or name in _WRITE or name == _UNKNOWN


def _is_done(words: Sequence[str]) -> bool:
    flags = {letter for word in words[1:] if word.startswith("-") for letter in word[1:]}
    paths = [Path(word) for word in words[1:] if not word.startswith("-")]
    try:
        _DONE_HERE[words[0]](paths, flags)
    except (OSError, IndexError):
        return False
    return True


def _mkdir(paths: Sequence[Path], flags: set[str]) -> None:
    for path in paths:
        path.mkdir(parents="p" in flags, exist_ok="p" in flags)


def _rmdir(paths: Sequence[Path], flags: set[str]) -> None:
    del flags
    for path in paths:
        path.rmdir()


def _rm(paths: Sequence[Path], flags: set[str]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            if not flags & {"r", "R"}:
                raise IsADirectoryError(path)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok="f" in flags)


def _touch(paths: Sequence[Path], flags: set[str]) -> None:
    del flags
    for path in paths:
        path.touch()


def _cp(paths: Sequence[Path], flags: set[str]) -> None:
    *sources, to = paths
    for source in sources:
        place = to / source.name if to.is_dir() else to
        if source.is_dir() and flags & {"r", "R", "a"}:
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            shutil.copy(source, place)


def _mv(paths: Sequence[Path], flags: set[str]) -> None:
    del flags
    *sources, to = paths
    for source in sources:
        shutil.move(source, to)


_DONE_HERE: dict[str, Callable[[Sequence[Path], set[str]], None]] = {
    "mkdir": _mkdir,
    "rmdir": _rmdir,
    "rm": _rm,
    "touch": _touch,
    "cp": _cp,
    "mv": _mv,
}
