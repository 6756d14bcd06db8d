"""Presets: rules for public models that come with automesh, found by name.

`python -m benchmarks.presets` makes them, in `results/presets` of the repository; an installed
package has the same files in `automesh/preset_rules`. A model has two files: `NAME.toml`, the rules
by target, and `NAME.json`, for each target how its rule was made and what it was compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from automesh.errors import UsageError, did_you_mean
from automesh.limits import TARGET_CHARS
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import read_rules
from automesh.mesh.rules.rule import matches_only
from automesh.mesh.strict_files import read_table
from automesh.package import PACKAGE

PREFIX = "preset:"
"""Prefix of a preset's name where the path of a rules file is possible, too."""
SCHEMA = 1
_HINT = "`automesh presets` lists what there is"

SideKind = Literal["compiled", "estimated", "too large", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A plan for a preset's batch and target: the rule's, or a published one.

    Attributes:
      plan: mesh and knobs, as text.
      source: who publishes the mesh, and where; empty for the rule's own plan.
      kind: source of the figures; `too large` is a result of the compiler, too.
      step_s: predicted seconds of a step: replayed from the compiled schedule, else estimated; 0 if
        there are none.
      memory_bytes: peak on one device, by the compiler, else estimated; 0 if unknown.
      estimated_s: seconds by the estimate alone.
      causes: (cause, seconds) that sum to `step_s`, largest first.
      remark: what differs from what was published, or the reason of a failure.
    """

    plan: str
    source: str = ""
    kind: SideKind
    step_s: float = 0.0
    memory_bytes: int = 0
    estimated_s: float = 0.0
    causes: tuple[tuple[str, float], ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOrigin:
    """The origin of one target's rule: how it was made, or why there is none.

    Attributes:
      arguments: of the framework's training
      command: the model, the batch and the length. command: command that made the pair.
      seconds: its time, over all of its runs.
      made: UTC time in ISO 8601.
      versions: of the packages that made the programs, including the framework's.
      legal: plans of the search space that are legal on the target.
      compiled: plans that were compiled at default effort.
      is_final: the same versions would compile nothing more.
      reason: why nothing was compiled, or why there is no rule; else empty.
      ours: the rule's plan; None if there is no rule.
      published: the meshes of others, for the same batch and length.
    """

    arguments: str
    command: str
    seconds: float
    made: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    legal: int = 0
    compiled: int = 0
    is_final: bool = False
    reason: str = ""
    ours: Side | None = None
    published: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOrigins:
    """The file `NAME.json`: target -> how its rule was made."""

    schema: int = SCHEMA
    targets: dict[str, PresetOrigin] = field(default_factory=dict[str, PresetOrigin])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The rules for one model.

    Attributes:
      name: `maxtext/qwen3-1.7b`: the framework, and its name of the model.
      path: of its rules file.
      rules: one for each target.
      records: how they were made, by target.
    """

    name: str
    path: Path
    rules: Rules
    records: Mapping[str, PresetOrigin]

    @property
    def targets(self) -> tuple[str, ...]:
        """Lists the targets that have a rule."""
        return tuple(matches_only(rule.match) for rule in self.rules.rules)


def presets_folder() -> Path:
    """Returns the folder of the presets, installed or in a checkout."""
    installed = PACKAGE / "preset_rules"
    return installed if installed.is_dir() else PACKAGE.parent / "results" / "presets"


def preset_files(folder: Path | None = None) -> dict[str, Path]:
    """Maps the name of every preset to its rules file.

    Args:
      folder: by default that of the presets that come with automesh.
    """
    root = presets_folder() if folder is None else folder
    return {
        path.relative_to(root).as_posix().removesuffix(".toml"): path
        for path in sorted(root.glob("*/*.toml"))
    }


def is_preset(path: str | Path) -> bool:
    """Whether a path is the name of a preset."""
    return str(path).startswith(PREFIX)


def rules_path(path: str | Path) -> str | Path:
    """Returns the rules file of a preset, `preset:maxtext/qwen3-1.7b`; any other path unchanged.

    Raises:
      UsageError: there is no such preset.
    """
    if not is_preset(path):
        return path
    name, known = str(path).removeprefix(PREFIX).strip(), preset_files()
    if name not in known:
        raise UsageError(f"there is no preset `{name}`{did_you_mean(name, known)}", hint=_HINT)
    return known[name]


def find_presets(pattern: str = "", *, folder: Path | None = None) -> tuple[Preset, ...]:
    """Finds the presets that match a pattern, sorted by name.

    Args:
      pattern: a name, a part of a name, or a whole name with the wildcards `*` and `?`; empty: all.
      folder: by default that of the presets that come with automesh.

    Raises:
      UsageError: it matches nothing, or a file cannot be read.
    """
    small = pattern.strip().removeprefix(PREFIX).lower()
    if len(small) > TARGET_CHARS:
        raise UsageError(f"`{pattern}` is longer than the name of any preset", hint=_HINT)
    known = preset_files(folder)
    wild = any(char in small for char in "*?[")
    found = [small] if small in known else [
        name
        for name in known
        if (fnmatchcase(name.lower(), small) if wild else small in name.lower())
    ]  # fmt: skip
    if not found and small:
        raise UsageError(
            f"no preset is called `{pattern}`, nor has that in its name"
            f"{did_you_mean(small, known)}",
            hint=_HINT,
        )
    return tuple(read_preset(name, known[name]) for name in found)


def read_preset(name: str, path: Path) -> Preset:
    """Reads the two files of a preset.

    Raises:
      UsageError: one of them cannot be read, or is wrong.
    """
    return Preset(name=name, path=path, rules=read_rules(path), records=read_records(path).targets)


def read_records(path: Path) -> PresetOrigins:
    """Reads how the rules of a rules file were made; empty if that is not recorded.

    Raises:
      UsageError: it cannot be read, or is wrong.
    """
    beside = path.with_name(f"{path.name.removesuffix('.toml')}.json")
    return read_table(beside, PresetOrigins) if beside.exists() else PresetOrigins()
