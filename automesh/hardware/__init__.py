"""What the devices can do, and what a search may be aimed at (no jax)."""

from automesh.hardware.absent import Absent as Absent
from automesh.hardware.chips import Chip as Chip
from automesh.hardware.chips import chip_for as chip_for
from automesh.hardware.processes import (
    running_under_several_processes as running_under_several_processes,
)
from automesh.hardware.targets import Target as Target
from automesh.hardware.targets import check_present as check_present
from automesh.hardware.targets import local_selector as local_selector
from automesh.hardware.targets import parse_target as parse_target
