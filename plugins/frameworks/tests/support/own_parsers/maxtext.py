"""MaxText: its configuration, read as its training command reads it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.utils import max_utils  # pyright: ignore[reportMissingImports]

# A model that every mesh of the tests divides; what is not there is not asked for.
_MODEL = (
    "base_num_decoder_layers=960",
    "run_name=x",
)
_ALWAYS = (
    "internal_compile=true",
    "skip_jax_distributed_system=true",
    "hardware=tpu",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "log_config=false",
)
# What the keys call otherwise than the mesh.
_KEYS = {"stage": "pipeline"}


def read(
    *,
    text: str,
    selector: str,
    num_devices: int,
    num_granules: int,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """
    Args:
      words: more arguments, with the model; by default a model that every mesh divides.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "mesh.yml"
        settings.write_text(f"{text}base_config: base.yml\n")
        config = pyconfig.initialize_pydantic(
            [
                "",
                str(settings),
                *(words or _MODEL),
                *_ALWAYS,
                f"base_output_directory={folder}",
                f"internal_compile_num_devices={num_devices}",
                f"compile_topology_num_slices={num_granules}",
            ]
        )
    # As `maxtext_utils.create_device_mesh` does it, whose module imports all of MaxText.
    fill = max_utils.fill_unspecified_mesh_axes
    ici = fill(list(config.ici_parallelism), num_devices // num_granules, "ICI")
    dcn = [1] * len(ici)
    if num_granules > 1:
        dcn = fill(list(config.dcn_parallelism), num_granules, "DCN")
    names = [_KEYS.get(name, name) for name in config.mesh_axes]
    return {
        "sizes": {name: pair for name, *pair in zip(names, ici, dcn, strict=True)},
        # A configured `none` is None there.
        "remat": config.remat_policy or "none",
        "accumulation": config.gradient_accumulation_steps,
        "global_batch": config.global_batch_size_to_train_on,
    }
