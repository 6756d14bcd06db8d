"""What a compile-only client of jax is told about hardware that is not here (no jax)."""

from __future__ import annotations

from automesh.hardware.absent import Absent, AbsentDevices
from automesh.hardware.slices import wraps_of


def absent_devices_of(absent: Absent) -> AbsentDevices:
    """What a compile-only client is told about the devices that a target names.

    The granules of GPUs are their hosts, one jax process each, as for attached ones.
    """
    fabric = absent.fabric
    if absent.platform == "tpu":
        usual = wraps_of(absent.device_kind, fabric.torus)
        return AbsentDevices(
            platform="tpu",
            device_kind=absent.device_kind,
            num_devices=absent.num_devices,
            num_granules=fabric.num_granules,
            num_hosts=absent.num_hosts,
            topology=absent.topology,
            torus=fabric.torus,
            # libtpu makes the same program whichever ends are linked, but refuses unusual ones.
            wraps=fabric.wraps if fabric.wraps == usual else (),
            devices_per_chip=fabric.devices_per_chip,
            chip_config=absent.chip_config,
            host=absent.host,
        )
    return AbsentDevices(
        platform="gpu",
        device_kind=absent.device_kind,
        num_devices=absent.num_devices,
        num_granules=fabric.num_granules,
        num_hosts=absent.num_hosts,
        topology=f"1x{absent.num_hosts}x{absent.num_devices // absent.num_hosts}",
        gpu=absent.gpu,
        memory_bytes=absent.device_memory_bytes,
    )
