"""The target configurations with which GPU programs are compiled without a GPU."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from automesh.hardware.chips import Chip
from automesh.reading import read_text

_FOLDER = Path(__file__).parent / "data" / "gpus"
_MEMORY = re.compile(r"^ *device_memory_size: ([0-9]+)$", re.MULTILINE)
_CAPABILITY = re.compile(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?")


def configuration_of(chip: Chip) -> str:
    """Returns the name of the configuration of a kind of GPU; empty if automesh has none."""
    return chip.slug if chip.slug in known_configurations() else ""


@cache
def read_configuration(name: str) -> str:
    """Reads the text of a `GpuTargetConfigProto`, as the compile-only client takes it.

    Args:
      name: as `configuration_of` gives it.

    Raises:
      UsageError: no configuration has this name.
    """
    return read_text(_FOLDER / f"{name}.txtpb")


def configured_memory_bytes(name: str) -> int:
    """Reads the memory of one GPU from a configuration.

    Args:
      name: as `configuration_of` gives it.
    """
    found = _MEMORY.search(read_configuration(name))
    if found is None:
        raise ValueError(f"{_FOLDER / name}.txtpb does not say how much memory there is")
    return int(found[1])


def compute_capability(name: str) -> str:
    """Reads the compute capability of a GPU, such as `9.0`; empty if no configuration has it.

    Args:
      name: as `configuration_of` gives it.
    """
    if name not in known_configurations():
        return ""
    found = _CAPABILITY.search(read_configuration(name))
    return f"{found[1]}.{found[2] or 0}" if found is not None else ""


def usable_bytes_of(chip: Chip) -> int:
    """Returns how much memory of a GPU programs can have: less than its data sheet says."""
    name = configuration_of(chip)
    return configured_memory_bytes(name) if name else chip.hbm_bytes


@cache
def known_configurations() -> tuple[str, ...]:
    """Lists the names of all configurations."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.txtpb")))
