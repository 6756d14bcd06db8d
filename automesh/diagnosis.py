"""`automesh doctor`: versions, devices, known-bad combinations, what to install for what."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import psutil

from automesh.errors import UsageError
from automesh.hardware import (
    check_present,
    chip_for,
    parse_target,
    running_under_several_processes,
)
from automesh.hardware.compilers import compiler_for, fits, wanted_by_jax
from automesh.hlo.store import default_store
from automesh.outcomes import Failed
from automesh.package import installed_version
from automesh.program.nouns import Attachment
from automesh.report.blocks.columns import figures_column, text_column
from automesh.report.blocks.nouns import Report, Section, Table
from automesh.report.pages.store import report_of as store_report
from automesh.tuner.workers import one_worker, refuse_gang, surroundings_of
from automesh.units import format_bytes
from automesh.worker.messages import DevicesJob

Level = Literal["ok", "note", "warning", "error"]
_LIMIT_S = 120.0
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One thing that was looked at.

    Attributes:
      about: one or two words.
      detail: what was found, a sentence.
      hint: what to do; empty if nothing need be done.
    """

    level: Level
    about: str
    detail: str
    hint: str = ""


def examine(target: str) -> tuple[DoctorFinding, ...]:
    """Looks at this machine as a search for `target` would find it; devices are asked in a worker.

    Raises:
      UsageError: not a target.
    """
    wanted = parse_target(target, os.environ)
    check_present(wanted)
    refuse_gang(wanted, "a check of this machine")
    findings = [_python(), *_packages(), *_processes(os.environ), _memory()]
    with one_worker(surroundings_of(wanted)) as pool:
        answer = pool.run(DevicesJob(), _LIMIT_S)
    findings += [
        DoctorFinding(level="warning", about="target", detail=notice) for notice in wanted.notices
    ]
    if isinstance(answer, Attachment):
        findings += [*_devices(answer), *_known_bad(answer), *_environment(answer)]
    else:
        reason = f"jax on `{wanted.platforms}` did not answer in time"
        if isinstance(answer, Failed):
            reason = answer.reason
        findings.append(
            DoctorFinding(
                level="error",
                about="devices",
                detail=reason,
                hint="run `python -c 'import jax; print(jax.devices())'` and mend what it says",
            )
        )
    return (*findings, *_targets(), *_storages())


def report_of(findings: tuple[DoctorFinding, ...]) -> Report:
    """Returns the findings, one or two lines each."""
    details = [one.detail + (f"\n{one.hint}" if one.hint else "") for one in findings]
    table = Table(
        columns=(
            figures_column("", [_MARKS[one.level] for one in findings], justify="left"),
            figures_column("", [one.about for one in findings], justify="left"),
            text_column("", details, most=12),
        ),
        is_ruled=False,
        has_header=False,
    )
    return Report(
        sections=(Section(blocks=(table,)),), facts=lambda: [asdict(one) for one in findings]
    )


def examine_store(*, clear: bool) -> Report:
    """Returns the compiled programs that are kept, or what is left after removing them all.

    Raises:
      UsageError: they cannot be removed, or the limit in the environment is no size.
    """
    store = default_store(os.environ)
    if not clear:
        return store_report(store)
    try:
        return store_report(store, removed=store.clear())
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"the compiled programs in `{store.folder}` cannot be removed: {reason}",
            hint="change the permissions of the folder, or remove it",
        ) from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _python() -> DoctorFinding:
    return DoctorFinding(
        level="ok",
        about="python",
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{sys.executable}",
    )


def _packages() -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    for package, least in (("jax-automesh", "0"), ("jax", "0.10.1"), ("jaxlib", "0.10.1")):
        version = installed_version(package)
        level: Level = "error"
        if not version:
            detail, hint = "not installed", f"run `pip install {package}`"
        elif _numbers(version) < _numbers(least):
            detail, hint = f"{version} is older than {least}", f"run `pip install -U {package}`"
        else:
            level, detail, hint = "ok", version, ""
        found.append(DoctorFinding(level=level, about=package, detail=detail, hint=hint))
    return found


def _processes(environ: Mapping[str, str]) -> list[DoctorFinding]:
    several = running_under_several_processes(environ)
    if not several:
        return []
    return [
        DoctorFinding(
            level="error",
            about="processes",
            detail=f"this is one of several processes ({several}); a search runs in one",
            hint="run it on one host, without the launcher",
        )
    ]


def _memory() -> DoctorFinding:
    memory = psutil.virtual_memory()
    return DoctorFinding(
        level="ok" if memory.available > 2 * 2**30 else "warning",
        about="memory",
        detail=f"{format_bytes(memory.available)} of {format_bytes(memory.total)} free, "
        f"{os.cpu_count()} cores",
    )


def _devices(attachment: Attachment) -> list[DoctorFinding]:
    first = attachment.devices[0]
    count = len(attachment.devices)
    slices = len({device.slice_index for device in attachment.devices})
    memory = attachment.device_memory_bytes
    words = f"{count} x {first.kind} ({first.platform})"
    words += f", {format_bytes(memory)} each" if memory else ""
    words += f", {slices} slices" if slices > 1 else ""
    found = [DoctorFinding(level="ok", about="devices", detail=words)]
    if count == 1:
        found.append(
            DoctorFinding(
                level="note",
                about="devices",
                detail="a single device leaves no mesh to choose",
                hint="try virtual devices: `automesh search train.py --target cpu:8`",
            )
        )
    if first.platform != "cpu" and chip_for(first.kind, first.platform).rough:
        found.append(
            DoctorFinding(
                level="warning",
                about="devices",
                detail=f"`{first.kind}` is not in the table of chips: predictions are rough",
            )
        )
    return found


def _known_bad(attachment: Attachment) -> list[DoctorFinding]:
    on_cpu = attachment.devices[0].platform == "cpu"
    if not on_cpu or not dict(attachment.versions).get("jax", "").startswith("0.10.2"):
        return []
    return [
        DoctorFinding(
            level="warning",
            about="jax 0.10.2",
            detail="a miscompilation on CPU is reported for it (jax issue 39103); "
            "automesh compares the losses of every finalist with a reference",
            hint="another jax release is safer for CPU: `pip install 'jax!=0.10.2'`",
        )
    ]


def _environment(attachment: Attachment) -> list[DoctorFinding]:
    return [
        DoctorFinding(level="note", about="environment", detail=f"{name}={value}")
        for name, value in attachment.environment
    ]


def _targets() -> list[DoctorFinding]:
    """Checks the compilers for absent devices; programs for attached ones need them as well."""
    found: list[DoctorFinding] = []
    for kind in ("tpu", "gpu"):
        compiler, wanted = compiler_for(kind), wanted_by_jax(kind)
        detail = f"{compiler.name} {compiler.version}"
        level: Level = "ok"
        hint = compiler.install
        if not compiler.version:
            level = "note"
            detail = f"{compiler.name} is not installed: estimates only, by `--dry-run`"
        elif not fits(compiler.version, wanted):
            level = "warning"
            detail = f"{detail}, but jax {installed_version('jax')} wants {wanted}"
        else:
            detail, hint = f"{detail} compiles for them", ""
        what = f"{kind.upper()} targets"
        found.append(DoctorFinding(level=level, about=what, detail=detail, hint=hint))
    return found


def _storages() -> list[DoctorFinding]:
    if importlib.util.find_spec("psycopg"):
        detail = f"psycopg {installed_version('psycopg')}"
        return [DoctorFinding(level="ok", about="PostgreSQL", detail=detail)]
    return [
        DoctorFinding(
            level="note",
            about="PostgreSQL",
            detail="no driver; only needed for `--storage postgresql://...`",
            hint="run `pip install 'jax-automesh[postgres]'`",
        )
    ]
