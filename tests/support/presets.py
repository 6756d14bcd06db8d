"""A preset as `python -m benchmarks.presets` keeps it, with figures that somebody made up."""

from __future__ import annotations

import json
from pathlib import Path

from automesh.jsonio import to_json
from automesh.mesh.rules.shipped import PresetOrigin, PresetOrigins, Side

RULES = """\
# Written by `python -m benchmarks.presets`.
schema = 1
axes = ["data", "fsdp", "tensor"]
batch_axes = ["data", "fsdp"]

# model_name=small max_target_length=128 per_device_batch_size=4
[[rule]]
match = "tpu-v5p-64"
ici = { fsdp = 32 }
dcn = {}
knobs = { remat_policy = "full", gradient_accumulation_steps = 1 }
compiler_options = {}

[rule.evidence]
kind = "compiled"
step_s = 1.5
hbm_bytes = 21474836480

[rule.evidence.program]
fingerprint = "abc"

# model_name=small max_target_length=128 per_device_batch_size=2
[[rule]]
match = "gpu-h100-64"
ici = { fsdp = 8 }
dcn = { data = 8 }
knobs = { remat_policy = "minimal", gradient_accumulation_steps = 1 }
compiler_options = {}

[rule.evidence]
kind = "estimated"
step_s = 2.0
hbm_bytes = 10737418240
"""
OURS = Side(
    plan="fsdp:32 remat_policy=full gradient_accumulation_steps=1",
    kind="compiled",
    step_s=1.5,
    memory_bytes=20 * 2**30,
    estimated_s=1.4,
    causes=(("compute", 1.2), ("ici fsdp", 0.3)),
)
THEIRS = Side(
    plan="data:4,fsdp:8 remat_policy=full gradient_accumulation_steps=1",
    source="AXLearn's small for tpu-v5p-.* (axlearn@0)",
    kind="compiled",
    step_s=1.8,
    memory_bytes=30 * 2**30,
    estimated_s=1.7,
    causes=(("compute", 1.2), ("ici data", 0.6)),
    remark="published with remat full",
)


def made(**changes: object) -> PresetOrigin:
    """How a rule was made, but for `changes`."""
    usual: dict[str, object] = {
        "arguments": "model_name=small max_target_length=128 per_device_batch_size=4",
        "command": "python -m benchmarks.presets --model small --target tpu-v5p-64",
        "seconds": 61.0,
        "made": "2026-11-25T12:00:00+00:00",
        "versions": {"jax": "0.0", "libtpu": "0.0", "maxtext": "0.0"},
        "legal": 36,
        "compiled": 4,
        "is_final": True,
        "ours": OURS,
        "published": (THEIRS,),
    }
    return PresetOrigin(**(usual | changes))  # pyright: ignore[reportArgumentType]


TARGETS = {
    "tpu-v5p-64": made(),
    "gpu-h100-64": made(reason="no compiler", ours=None, published=(), versions={"jax": "0.0"}),
    "tpu-v6e-64": made(reason="nothing is estimated to fit", ours=None, published=()),
}


def preset_in(folder: Path, name: str = "maxtext/small") -> Path:
    """Writes the preset into a folder, and returns the path of its rules."""
    path = folder / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RULES)
    tree = to_json(PresetOrigins(targets=TARGETS), PresetOrigins)
    path.with_name(f"{path.name.removesuffix('.toml')}.json").write_text(json.dumps(tree))
    return path
