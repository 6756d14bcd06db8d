"""Sends and receives by which the devices of one program exchange data.

Between TPU slices they are what is left of a collective, see `megascale`; on GPUs a compiler may
take a collective-permute apart so (xla/service/collective_ops_utils.h, kSendRecvSourceTargetPairs).
"""

from __future__ import annotations

import re

from automesh.hlo.collectives import source_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.async_pairs import Lanes
from automesh.hlo.schedule.megascale import is_megascale
from automesh.hlo.schedule.nouns import Transfer
from automesh.hlo.spans import span_of_pairs

_PAIRS = "_xla_send_recv_source_target_pairs"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def is_exchange(instruction: Instruction) -> bool:
    """True for a send, a receive or the end of one whose other side is this program too."""
    return is_megascale(instruction) or _PAIRS in dict(instruction.frontend)


def join_pairs(module: Module, lanes: Lanes) -> None:
    """Lets the send and the receive of one exchange travel together."""
    for computation in module.computations.values():
        first: dict[str, Instruction] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode in ("send", "recv") and is_exchange(instruction):
                attributes = dict(instruction.frontend)
                name = attributes.get(_RENDEZVOUS) or f"channel {instruction.channel}"
                lanes.join(first.setdefault(name, instruction), instruction)


def transfer_in_pairs(
    computation: Computation, send: Instruction, partitions: Partitions, hbm_bytes: int
) -> Transfer:
    """Says what one send from device to device moves.

    Raises:
      ValueError: it names a device outside the mesh.
    """
    listed = _PAIR.findall(dict(send.frontend)[_PAIRS])
    pairs = partitions.pairs(tuple((int(source), int(target)) for source, target in listed))
    span = span_of_pairs(pairs, partitions.axes)
    held = computation.operands(send)[0].shape.bytes
    return Transfer(
        name=send.name,
        kind="collective-permute",
        medium="fabric",
        axes=span.axes,
        pairs=pairs,
        group_size=span.group_size,
        payload_bytes=held,
        wire_bytes=held,
        hbm_bytes=hbm_bytes,
        op_name=send.op_name,
        source=source_of(send),
    )
