"""`automesh targets --json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from automesh.hardware.catalogue import Listed, citations
from automesh.hardware.compilers import Compiler, has_compiler


def to_json(found: Sequence[Listed], compilers: Sequence[Compiler]) -> dict[str, Any]:
    """Targets with their facts as plain JSON values: bytes, bytes and operations per second."""
    installed = {one.platform: one.version for one in compilers}
    return {
        "compilers": [
            {
                "platform": one.platform,
                "name": one.name,
                "version": one.version,
                "install": "" if one.version else one.install,
            }
            for one in compilers
        ],
        "targets": [_target(one, installed) for one in found],
        "sources": citations(),
    }


def _target(one: Listed, installed: dict[str, str]) -> dict[str, Any]:
    absent = one.absent
    fabric = absent.fabric
    chip = fabric.chip
    slices = fabric.num_granules if fabric.torus else 0
    return {
        "name": one.name,
        "kind": one.kind,
        "platform": absent.platform,
        "chip": chip.name,
        "device_kind": absent.device_kind,
        "devices": absent.num_devices,
        "chips": absent.num_devices // fabric.devices_per_chip,
        "devices_per_chip": fabric.devices_per_chip,
        "slices": slices,
        "torus": list(fabric.torus),
        "wraps": list(fabric.wraps),
        "hosts": absent.num_hosts,
        "granules": fabric.num_granules,
        "chips_per_host": math.prod(absent.host) if absent.host else fabric.granule_devices,
        "device_memory_bytes": absent.device_memory_bytes,
        "device_memory_bytes_per_s": chip.hbm_bytes_per_s,
        "device_flops_per_s": dict(chip.peak_flops_per_s),
        "links_per_chip": 2 * len(fabric.torus) or 1,
        "link_bytes_per_s": chip.link_bytes_per_s * fabric.devices_per_chip,
        "device_dcn_bytes_per_s": chip.dcn_bytes_per_s,
        "topology": absent.topology,
        "can_be_compiled_for": has_compiler(absent),
        "can_be_compiled_for_here": has_compiler(absent) and bool(installed[absent.platform]),
        "sources": dict(one.sources),
    }
