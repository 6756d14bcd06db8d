"""How XLA's partitioner splits custom calls.

It splits them along batch dimensions that jax states, else not at all (`HandleCustomCall` and
`DefaultAction` in xla/service/spmd/spmd_partitioner.cc).

Shardy has rules for more of them, and splits what the partitioner then gathers.
"""

from __future__ import annotations

import re
from typing import Any

from automesh.sharding.attribute_names import GATHERS
from automesh.sharding.partitioner.top_k import TARGET

_FRONTEND = "mhlo.frontend_attributes"
# jax's mark for functions of LAPACK, cuSOLVER and others that work on each matrix of a batch.
_BATCH = re.compile(r'num_batch_dims = "(\d+)"')
_TARGET = "call_target_name"
# Become plain operations before the partitioner sees them (QrExpander).
_EXPANDED = frozenset(("Qr", "ProductOfElementaryHouseholderReflectors"))
# The partitioner has its own rule for them, or they only state memory or sharding of an array.
_KNOWN = re.compile(
    r"annotate_device_placement|Sharding|SPMD\w+|\w*Partitioning\w*|X64\w+|mhlo\.\w+|xla\.\w+"
    r"|\w*TopK|PartialReduce|MoveTo\w+|PinTo\w+|inspect_sharding|InspectSharding"
)


def batch_dimensions(call: Any, ir: Any) -> int | None:
    """Counts the leading dimensions of a call's operands and results that may be split.

    Args:
      call: a `stablehlo.custom_call`.

    Returns:
      None: the partitioner has its own rule for the call.
    """
    attributes = call.attributes
    if GATHERS in attributes or _TARGET not in attributes or not call.operands:
        return None
    target = ir.StringAttr(attributes[_TARGET]).value
    if target == TARGET:
        return 0
    if _KNOWN.fullmatch(target):
        return None
    if target in _EXPANDED:
        return max(ir.RankedTensorType(call.operands[0].type).rank - 2, 0)
    stated = _BATCH.search(str(attributes[_FRONTEND])) if _FRONTEND in attributes else None
    return int(stated[1]) if stated else 0
