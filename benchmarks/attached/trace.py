"""Which kernels a step spends its time on: the program that runs, and a trace of it (jax)."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from automesh.mesh.axes import MeshAxis
from benchmarks.attached.record import Step
from benchmarks.support.paths import ROOT

AXES = ("dp", "fsdp", "ep", "tp", "sp")
_STEPS = 2


def trace(step: Step, knobs: Mapping[str, Any], folder: Path) -> str:
    """Writes `NAME.module.gz`, the scheduled program, and `NAME.kernels.json`, of one plan.

    Returns:
      What was seen, in words.

    Raises:
      SystemExit: no GPU took part.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from automesh.program.execute.arguments import maker, plan_leaves
    from automesh.program.lower.lowering import lower
    from automesh.program.script.build import build_on
    from automesh.program.script.load import load_entry

    axes = [MeshAxis(name=name) for name in AXES]
    built = build_on(
        load_entry(step.entry), axes, knobs=tuple(knobs.items()), devices=jax.devices()[:1]
    )
    program = lower(built)
    compiled = program.lowered.compile()
    tree = (program.args, program.kwargs)
    structure = jax.tree.structure(tree)
    leaves = plan_leaves(tree, compiled.input_shardings, program.domains(), built.mesh)
    args, kwargs = structure.unflatten(maker(leaves)())
    text = compiled.as_text()
    # Without the paths of this machine.
    for path in (str(ROOT), *sorted(filter(None, sys.path), key=len, reverse=True)):
        text = text.replace(f"{path}/", "")
    module = module_of(text)
    for _ in range(3):
        args = program.carry.advance(compiled(*args, **kwargs), args)
    jax.block_until_ready(args)
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place):
            for _ in range(_STEPS):
                args = program.carry.advance(compiled(*args, **kwargs), args)
            jax.block_until_ready(args)
        (found,) = Path(place).glob("**/*.trace.json.gz")
        events = json.loads(gzip.decompress(found.read_bytes()))["traceEvents"]
    plan = " ".join(["dp:1", *(f"{name}={value}" for name, value in knobs.items())])
    kernels = {"plan": plan, **kernels_of(events)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{step.name}.module.gz").write_bytes(gzip.compress(module, mtime=0))
    path = folder / f"{step.name}.kernels.json"
    path.write_text(json.dumps(kernels, indent=0) + "\n", encoding="utf-8")
    return f"{kernels['busy_s']:.4f} s of kernels in {kernels['span_s']:.4f} s"


def module_of(text: str) -> bytes:
    """The serialized HLO module that a compiled program's text stands for."""
    from jaxlib import _hlo  # pyright: ignore[reportMissingImports,reportAttributeAccessIssue]

    module: Any = _hlo.hlo_module_from_text(text)
    return module.as_serialized_hlo_module_proto()


def kernels_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of one step by kernel, from a trace in Chrome's format of `_STEPS` steps."""
    names = {
        (one["pid"], one.get("tid")): one["args"]["name"]
        for one in events
        if one.get("ph") == "M" and one["name"] in ("process_name", "thread_name")
    }
    processes = {one["pid"]: one["args"]["name"] for one in events if _is_process(one)}
    found = [
        one
        for one in events
        if one.get("ph") == "X"
        and "GPU" in processes.get(one["pid"], "")
        and "Stream" in names.get((one["pid"], one["tid"]), "")
    ]
    if not found:
        raise SystemExit("the trace has no kernels of a GPU: --trace needs one")
    spent, count = Counter[str](), Counter[str]()
    for one in found:
        spent[one["name"]] += one["dur"]
        count[one["name"]] += 1
    begin = min(one["ts"] for one in found)
    end = max(one["ts"] + one["dur"] for one in found)
    return {
        "busy_s": sum(spent.values()) / _STEPS / 1e6,
        "span_s": (end - begin) / _STEPS / 1e6,
        "kernels": {
            name: [count[name] / _STEPS, round(us / _STEPS / 1e6, 9)]
            for name, us in spent.most_common()
        },
    }


def _is_process(one: Mapping[str, Any]) -> bool:
    return one.get("ph") == "M" and one["name"] == "process_name"


# What libraries and Triton call kernels that multiply matrices.
_MULTIPLIES = re.compile(r"nvjet|gemm|xmma|cutlass|cublas")


def shares(kernels: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Seconds of a step in kernels that multiply matrices, and in all others."""
    multiplying = sum(one[1] for name, one in kernels.items() if _MULTIPLIES.search(name))
    return multiplying, sum(one[1] for one in kernels.values()) - multiplying
