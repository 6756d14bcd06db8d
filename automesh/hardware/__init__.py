"""Targets of a search, and what their devices can do (no jax)."""

from automesh.hardware.absent import Absent as Absent
from automesh.hardware.absent import AbsentDevices as AbsentDevices
from automesh.hardware.chips import Chip as Chip
from automesh.hardware.chips import chip_for as chip_for
from automesh.hardware.clusters import Clusters as Clusters
from automesh.hardware.clusters_file import clusters_in as clusters_in
from automesh.hardware.compilers import absent_devices_of as absent_devices_of
from automesh.hardware.compilers import check_compilable as check_compilable
from automesh.hardware.processes import (
    running_under_several_processes as running_under_several_processes,
)
from automesh.hardware.targets import Target as Target
from automesh.hardware.targets import check_present as check_present
from automesh.hardware.targets import parse_target as parse_target
from automesh.hardware.targets import selector_of as selector_of
