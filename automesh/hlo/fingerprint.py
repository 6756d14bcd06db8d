"""Hashes compiled programs so that those which only differ in names are equal."""

from __future__ import annotations

import hashlib

from automesh.hlo import hlo_pb2
from automesh.hlo.nouns import Computation, Instruction, Module

# Shardings that were annotated before partitioning; they spell the names of mesh axes.
_ANNOTATIONS = "xla.sdy."
# Attributes that are compared in another way, or that may differ between equal programs. All others
# are compared as they are.
_CLEARED = (
    "name",
    "id",
    "metadata",
    "operand_ids",
    "control_predecessor_ids",
    "called_computation_ids",
    "channel_id",
    "sharding",
    "original_value",
    "backend_config",
    "backend_config_payload",
    "replica_groups",
    "collective_device_list",
    "iota_collective_device_list",
    "mesh_axes_replica_group_list",
    "source_target_pairs",
    "frontend_attributes",
)


def module_fingerprint(module: Module) -> str:
    """Hashes what a program does, without its names, ids, channel numbers and metadata.

    Device groups are compared decoded, so their encoding does not matter either. The order of
    instructions does: it is the schedule.
    """
    known: dict[int, str] = {}

    def of(computation: Computation) -> str:
        if computation.id not in known:
            positions = {number: k for k, number in enumerate(computation.instructions)}
            digest = hashlib.sha256()
            for instruction in computation.instructions.values():
                called = [of(callee) for callee in module.called(instruction)]
                digest.update(_canonical(instruction, positions, called))
            digest.update(repr((positions[computation.root], computation.thread)).encode())
            known[computation.id] = digest.hexdigest()
        return known[computation.id]

    return hashlib.sha256(repr((of(module.entry_computation), module.aliases)).encode()).hexdigest()


def _canonical(instruction: Instruction, positions: dict[int, int], called: list[str]) -> bytes:
    return repr(
        (
            instruction.opcode,
            _attributes(instruction.wire),
            [positions[operand] for operand in instruction.operands],
            sorted(positions[before] for before in instruction.predecessors),
            called,
            instruction.groups,
            instruction.pairs,
            instruction.channel > 0,
            instruction.backend_config,
            [item for item in instruction.frontend if not item[0].startswith(_ANNOTATIONS)],
        )
    ).encode()


def _attributes(wire: bytes) -> bytes:
    message = hlo_pb2.Instruction.FromString(wire)
    for name in _CLEARED:
        message.ClearField(name)
    return message.SerializeToString(deterministic=True)
