"""Compiles one example on one mesh of virtual CPU devices, and says what came out as JSON.

The case comes as JSON in the first argument; `benchmarks.truth` starts one process for each.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from automesh.errors import AutomeshError
from automesh.hlo import count, read_module
from automesh.mesh.axes import MeshAxis
from automesh.outcomes import Counts
from automesh.program.lower.compiled import count_serialized, read_memory, serialized
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from benchmarks.truth.command import Case

_DUMP = {"xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_proto": True}
_DUMPED = "*after_spmd-partitioning*.hlo.pb"


def answer(case: Case) -> dict[str, Any]:
    """The fields of `Truth` as plain values."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(size for _, size in case.sizes))
    # A cached executable comes without a dump.
    jax.config.update("jax_enable_compilation_cache", False)
    build = load_entry(case.entry)
    axes = [MeshAxis(name=name, ici=size) for name, size in case.sizes]
    lowered = lower(build_on(build, axes, knobs=case.knobs)).lowered
    with tempfile.TemporaryDirectory(prefix="automesh-truth-") as folder:
        begun = time.perf_counter()
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **_DUMP})
        compile_s = time.perf_counter() - begun
        partitioned = _partitioned(Path(folder), case.sizes)
    return {
        "partitioned": asdict(partitioned),
        "flops": count_serialized(serialized(compiled, {}), case.sizes).flops,
        "memory": asdict(read_memory(compiled, platform="cpu")),
        "compile_s": compile_s,
    }


def _partitioned(folder: Path, axes: Sequence[tuple[str, int]]) -> Counts:
    dumps = [path for path in folder.glob(_DUMPED) if path.stat().st_size]
    if len(dumps) != 1:
        raise AutomeshError(f"the compiler dumped {len(dumps)} partitioned modules, not one")
    return count(read_module(_module_of(dumps[0].read_bytes())), axes)


def _module_of(dump: bytes) -> bytes:
    """The module inside a serialized HloProto, where it is field 1.

    https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
    """
    if dump[:1] != b"\x0a":
        raise AutomeshError("the compiler's dump does not begin with a module")
    length = shift = 0
    for position in range(1, 11):
        length |= (dump[position] & 0x7F) << shift
        shift += 7
        if dump[position] < 0x80:
            return dump[position + 1 : position + 1 + length]
    raise AutomeshError("the length of the dumped module cannot be read")


def _case(text: str) -> Case:
    fields = json.loads(text)
    for name in ("sizes", "knobs"):
        fields[name] = tuple((key, value) for key, value in fields[name])
    return Case(**fields)


if __name__ == "__main__":
    print(json.dumps(answer(_case(sys.argv[1]))))
