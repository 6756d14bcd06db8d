"""A step of `steps` in sizes that fill one accelerator: `--step convnet`.

The steps beside it are as small as a CPU compiles in seconds: on a GPU they would show what it
takes to start a kernel, and little else. `--small` leaves them as they are, to show just that.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "steps"))

# Constants of the step's module -> their larger values.
LARGER: dict[str, dict[str, Any]] = {
    "convnet": {"_IMAGES": 256, "_SIDE": 128, "_WIDTHS": (128, 256, 512), "_CLASSES": 1024},
    "diffusion_transformer": {
        "_ROWS": 128,
        "_TOKENS": 256,
        "_WIDTH": 1024,
        "_HEADS": 16,
        "_HIDDEN": 4096,
        "_LAYERS": 6,
    },
    "embedding": {"_ROWS": 4_194_304, "_BATCH": 65_536, "_BAG": 32, "_HIDDEN": 1024},
    "gnn": {"_NODES": 262_144, "_EDGES": 2_097_152, "_FEATURES": 128, "_HIDDEN": 256},
    "rnn": {"_SEQUENCES": 512, "_LENGTH": 256, "_FEATURES": 512, "_HIDDEN": 2048},
    "shard_map_mlp": {"_ROWS": 32_768, "_WIDTH": 2048, "_HIDDEN": 8192},
    "sorted_moe": {"_TOKENS": 65_536, "_WIDTH": 1024, "_HIDDEN": 4096, "_SLOTS": 16_384},
    "state_space": {"_SEQUENCES": 16, "_LENGTH": 2048, "_WIDTH": 512, "_CHANNELS": 1024},
    "unet": {"_IMAGES": 64, "_SIDE": 256, "_WIDTH": 64},
    "vit": {
        "_IMAGES": 128,
        "_SIDE": 256,
        "_PATCH": 16,
        "_WIDTH": 1024,
        "_HEADS": 16,
        "_HIDDEN": 4096,
        "_LAYERS": 6,
        "_TOKENS": 256,
    },
}

_PARSER = argparse.ArgumentParser()
_PARSER.add_argument("--step", required=True, choices=tuple(LARGER))
_PARSER.add_argument("--small", action="store_true")
_OPTIONS = _PARSER.parse_args()
# Anew: another size of it may have been here before.
_STEP = importlib.reload(importlib.import_module(_OPTIONS.step))
if not _OPTIONS.small:
    for _name, _value in LARGER[_OPTIONS.step].items():
        if not hasattr(_STEP, _name):
            raise AttributeError(f"{_OPTIONS.step}.py has no constant {_name}")
        setattr(_STEP, _name, _value)
build = _STEP.build
