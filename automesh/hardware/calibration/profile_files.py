"""Reads and writes profiles: one file per kind of device, in a folder of the user's."""

from __future__ import annotations

import json
import platform as machine
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
from filelock import Timeout

from automesh import files
from automesh.errors import UsageError, unwritable
from automesh.hardware.calibration.profile import SCHEMA, Profile, identity, merge
from automesh.hardware.processes import usable_cores
from automesh.limits import LOCK_S
from automesh.mesh.strict_files import check_tree, parse_tree
from automesh.reading import check_regular, read_text
from automesh.texts.user_text import user_path

FOLDER_VARIABLE = "AUTOMESH_PROFILES"
_CPU_INFO = Path("/proc/cpuinfo")
_MEND = "delete it, and measure again with `automesh calibrate`"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoProfile:
    """There is no profile of these devices.

    Attributes:
      path: where one would be.
      reason: a sentence.
    """

    path: Path
    reason: str


def profile_folder(environ: Mapping[str, str]) -> Path:
    """Returns `$AUTOMESH_PROFILES`, else a folder in the user's home.

    Raises:
      UsageError: the variable is no path.
    """
    chosen = environ.get(FOLDER_VARIABLE, "").strip()
    if not chosen:
        return platformdirs.user_data_path("automesh") / "profiles"
    try:
        return user_path(chosen)
    except UsageError as error:
        raise UsageError(f"${FOLDER_VARIABLE}: {error.message}", hint=error.hint) from None


def host_of(platform: str) -> str:
    """Describes this machine's cores (model and number) if `platform` is cpu; else empty.

    Virtual CPU devices are no faster than the cores that they share.
    """
    if platform != "cpu":
        return ""
    text = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    model = named[1].strip() if named else machine.processor() or machine.machine()
    cores = usable_cores()
    return f"{model}, {cores} {'core' if cores == 1 else 'cores'}"


def profile_path(
    folder: Path,
    *,
    platform: str,
    device_kind: str,
    num_devices: int,
    host: str,
    num_granules: int = 1,
) -> Path:
    """Returns the path of the profile of these devices."""
    words = [platform, device_kind]
    if platform == "cpu":
        each = num_devices // num_granules
        words = [f"cpu-{each}x{num_granules}" if num_granules > 1 else f"cpu-{each}", host]
    slug = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")
    return folder / f"{slug}.json"


def find_profile(
    platform: str,
    device_kind: str,
    num_devices: int,
    *,
    environ: Mapping[str, str],
    host: str | None = None,
    num_granules: int = 1,
) -> Profile | NoProfile:
    """Reads the profile of these devices, if a calibration has written one.

    Args:
      num_devices, num_granules: only matter for virtual CPU devices, which share cores.
      environ: `$AUTOMESH_PROFILES` names the folder.
      host: see `host_of`; by default this machine.

    Raises:
      UsageError: there is one, but it is broken.
    """
    host = host_of(platform) if host is None else host
    path = profile_path(
        profile_folder(environ),
        platform=platform,
        device_kind=device_kind,
        num_devices=num_devices,
        host=host,
        num_granules=num_granules,
    )
    check_regular(path)
    if not path.exists():
        return NoProfile(path=path, reason=f"there is no profile `{path}`")
    profile = read_profile(path)
    is_same = (platform, device_kind, host) == (profile.platform, profile.device_kind, profile.host)
    virtual = (profile.num_devices, profile.num_granules)
    if not is_same or (platform == "cpu" and virtual != (num_devices, num_granules)):
        return NoProfile(path=path, reason=f"`{path}` is of other devices: {profile.about()}")
    return profile


def read_profile(path: Path) -> Profile:
    """Reads a profile, and refuses unknown, missing or mistyped keys.

    Raises:
      UsageError: it cannot be read, or is no profile that this version understands.
    """
    try:
        tree = parse_tree(read_text(path), source=path)
        if tree.get("schema", SCHEMA) != SCHEMA:
            raise UsageError(f"`{path}`: schema {tree['schema']} is not {SCHEMA}, which this reads")
        profile = check_tree(tree, Profile, source=path)
        _check_figures(profile, path)
    except UsageError as error:
        raise UsageError(error.message, hint=error.hint or _MEND) from None
    return profile


def check_place(path: Path) -> None:
    """Checks, before anything is measured, that a profile can be merged into this file.

    Raises:
      UsageError: it cannot be written, or the existing file is no profile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.check_place(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    if path.exists():
        read_profile(path)


def merge_profile(path: Path, profile: Profile) -> Profile:
    """Adds the points of `profile` to a file, or creates it; returns the merged profile.

    The file is replaced in one step.

    Raises:
      UsageError: the file is broken, of other devices, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.lock_beside(path, timeout_s=LOCK_S):
            if path.exists():
                before = read_profile(path)
                if identity(before) != identity(profile):
                    raise UsageError(
                        f"`{path}` is a profile of {before.about()}, not of {profile.about()}",
                        hint="choose another file with --out",
                    )
                profile = merge(before, profile)
            files.write_whole(path, json.dumps(asdict(profile), indent=1) + "\n", alone=True)
    except Timeout:
        raise UsageError(
            f"`{path}` is locked by another process",
            hint="wait for the other calibration to end",
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    return profile


def _unwritable(path: Path, error: OSError) -> UsageError:
    hint = f"choose another file with --out, or another folder with {FOLDER_VARIABLE}"
    return unwritable(path, error, hint=hint)


def _check_figures(profile: Profile, path: Path) -> None:
    constants = [profile.kernel_s]
    for fit in profile.matmuls:
        constants += [fit.call_s, fit.batch_s, fit.left_s, fit.right_s, fit.result_s, fit.flop_s]
    constants += [one for fit in profile.streams for one in (fit.call_s, fit.byte_s)]
    constants += [one for fit in profile.collectives for one in (fit.call_s, fit.slowness)]
    constants += [point.seconds for point in profile.points]
    # `not >=` is also true for NaN.
    bad = [constant for constant in constants if not 0 <= constant < float("inf")]
    if bad:
        raise UsageError(f"`{path}`: a time of {bad[0]} s is impossible")
