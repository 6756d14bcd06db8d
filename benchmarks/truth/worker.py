"""Compiles one example on some meshes, and says what came out, one line of JSON for each.

The cases come as JSON in the first argument: of one example and one platform, virtual CPU devices
or a TPU slice that is not there. `benchmarks.truth` starts one process for each example.
"""

from __future__ import annotations

import base64
import gzip
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
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from automesh.errors import AutomeshError
from automesh.hlo import count, read_module
from automesh.mesh.axes import MeshAxis
from automesh.outcomes import Counts
from automesh.program.lower.compiled import count_serialized, read_memory, serialized
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh.program.script.load import load_entry
from benchmarks.truth.command import SLICE, Case, module_path

_DUMP = {"xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_proto": True}
_DUMPED = "*after_spmd-partitioning*.hlo.pb"


def answer(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    """The fields of `Truth` as plain values.

    Args:
      devices: of which the first ones are taken.
    """
    if case.platform == "tpu":
        return _for_tpu(case, devices)
    axes = [MeshAxis(name=name, ici=size) for name, size in case.sizes]
    needed = math.prod(size for _, size in case.sizes)
    build = load_entry(case.entry)
    lowered = lower(build_on(build, axes, knobs=case.arguments, devices=devices[:needed])).lowered
    with tempfile.TemporaryDirectory(prefix="automesh-truth-") as folder:
        begun = time.perf_counter()
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **_DUMP})
        compile_s = time.perf_counter() - begun
        finished = count_serialized(serialized(compiled, {}), case.sizes)
        partitioned = _partitioned(Path(folder), case.sizes)
    return {
        "partitioned": asdict(partitioned),
        "flops": finished.flops,
        "memory": asdict(read_memory(compiled, platform=case.platform)),
        "compile_s": compile_s,
    }


def _for_tpu(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    """Compiles a case for a TPU, unless that was done before; counts the program in any case."""
    path = module_path(case)
    if path.exists():
        kept = json.loads(gzip.decompress(path.read_bytes()))
    else:
        kept = _compiled_for_tpu(case, devices)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(gzip.compress(json.dumps(kept).encode()))
        unfinished.replace(path)
    counts = count_serialized(base64.b64decode(kept.pop("module")), case.sizes)
    return {"partitioned": asdict(counts), "flops": counts.flops, **kept}


def _compiled_for_tpu(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    axes = [MeshAxis(name=name, ici=size) for name, size in case.sizes]
    needed = math.prod(size for _, size in case.sizes)
    build = load_entry(case.entry)
    lowered = lower(build_on(build, axes, knobs=case.arguments, devices=devices[:needed])).lowered
    begun = time.perf_counter()
    compiled = lowered.compile()
    return {
        "compile_s": time.perf_counter() - begun,
        "memory": asdict(read_memory(compiled, platform=case.platform)),
        "module": base64.b64encode(serialized(compiled, {})).decode(),
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


def _case(fields: dict[str, Any]) -> Case:
    for name in ("sizes", "knobs"):
        fields[name] = tuple((key, value) for key, value in fields[name])
    return Case(**fields)


def main() -> None:
    cases = [_case(one) for one in json.loads(sys.argv[1])]
    jax.config.update("jax_platforms", "cpu")
    # A cached executable comes without a dump.
    jax.config.update("jax_enable_compilation_cache", False)
    largest = max(math.prod(size for _, size in case.sizes) for case in cases)
    jax.config.update("jax_num_cpu_devices", largest)
    devices: Sequence[Any] = jax.devices()
    if cases[0].platform == "tpu":
        found: Any = topologies.get_topology_desc(platform="tpu", topology_name=SLICE)
        devices = found.devices
    for case in cases:
        try:
            print(json.dumps(answer(case, devices)), flush=True)
        except (JaxRuntimeError, AutomeshError, ValueError, TypeError) as error:
            print(json.dumps(f"{type(error).__name__}: {str(error).splitlines()[0]}"), flush=True)


if __name__ == "__main__":
    main()
