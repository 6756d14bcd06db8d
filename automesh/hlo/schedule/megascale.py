"""Collectives between TPU slices, which a compiled module holds as sends to the host and back.

The compiler hands the operand of a cross-slice collective to the Megascale runtime on the host
(`send`) and takes the result from it (`recv`). Frontend attributes say what it was. Nothing of this
is documented; the attributes are those that libtpu 0.0.42 writes.
"""

from __future__ import annotations

import re

from automesh.collectives import MEGASCALE
from automesh.hlo.collectives import source_of
from automesh.hlo.nouns import Computation, Groups, Instruction
from automesh.hlo.partitions import Pairs, Partitions
from automesh.hlo.schedule.nouns import Transfer
from automesh.hlo.spans import span_of_groups, span_of_pairs

_HANDLER = "xla_megascale_runtime"
# Every one of some slices with every one of some devices: {1,2}x{0:15}.
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
# Groups or pairs one by one: {{100000,200000},{100001,200001}}, {{100000->200000}}.
_LIST = re.compile(r"\{([\d,]+|\d+->\d+)\}")
# Slices count from 1, and a device is its slice times this and its id in the slice.
_SLICE = 100_000


def is_megascale(instruction: Instruction) -> bool:
    """True for a send, receive or their end that the Megascale runtime serves."""
    return dict(instruction.frontend).get("_xla_host_transfer_handler_name") == _HANDLER


def transfer_between_slices(
    computation: Computation, send: Instruction, partitions: Partitions, hbm_bytes: int
) -> Transfer:
    """Says what one cross-slice collective moves.

    Raises:
      ValueError: it is of an unknown kind, names its devices in an unknown way, or names a device
        outside the mesh.
    """
    attributes = dict(send.frontend)
    kind = MEGASCALE.get(attributes.get("_xla_megascale_transfer_type", ""))
    members = _members(attributes.get("_xla_megascale_target", ""), partitions)
    if kind is None or not members:
        raise ValueError(f"`{send.name}` sends to other slices in a way that is not known here")
    groups: Groups = ()
    pairs: Pairs = ()
    if kind.name == "collective-permute":
        pairs = tuple((source, target) for source, target in members)
        span = span_of_pairs(pairs, partitions.axes)
    else:
        groups = members
        span = span_of_groups(groups, partitions.axes)
    held = computation.operands(send)[0].shape.bytes
    payload = held * span.group_size if kind.is_sharded_before else held
    return Transfer(
        name=send.name,
        kind=kind.name,
        medium="dcn",
        axes=span.axes,
        groups=groups,
        pairs=pairs,
        group_size=span.group_size,
        payload_bytes=payload,
        wire_bytes=kind.wire_bytes(payload, span.group_size),
        hbm_bytes=hbm_bytes,
        op_name=send.op_name,
        source=source_of(send),
    )


def _members(target: str, partitions: Partitions) -> Groups:
    """Groups, or pairs, of elements of the mesh; empty if the text is of neither form."""
    if product := _PRODUCT.fullmatch(target):
        slices, devices = map(_numbers, product.groups())
        return tuple(
            tuple(partitions.element(number - 1, device) for number in slices) for device in devices
        )
    return tuple(
        tuple(partitions.element(number // _SLICE - 1, number % _SLICE) for number in listed)
        for listed in (_numbers(text.replace("->", ",")) for text in _LIST.findall(target))
    )


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
