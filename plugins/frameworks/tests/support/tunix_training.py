"""Tunix's own command of fine-tuning for a few steps: prints the mesh that it runs on, and the
fingerprint of the program of each of its steps, as JSON on the last line.

Where a step gives its state back in other types, or split otherwise than it took it, the next one
is another program.

    python -m plugins.frameworks.tests.support.tunix_training config.yaml key=value ...

Its model is a small one, from a checkpoint that is written here instead of downloaded; its batch is
one of random tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
from tunix.cli import peft_main  # pyright: ignore[reportMissingImports]
from tunix.oss import utils as downloads  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint
from plugins.frameworks.tests.support.tunix_small import (
    VOCABULARY,
    use_small_model,
    write_checkpoint,
)

_STEPS = 4


class _EnoughStepsError(BaseException):
    """Ends the training."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A jitted step, that of jax inside of that of nnx, which notes what it is when it is called.

    Attributes:
      fingerprints: of the calls so far.
    """

    step: Any
    fingerprints: list[str] = field(default_factory=list[str])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mesh = jax.tree.leaves(args)[0].sharding.mesh
        found = fingerprint(
            self.step.lower(*args, **kwargs),
            device_ids=[device.id for device in mesh.devices.flat],
            compiler_options=(),
            platform="cpu",
        )
        self.fingerprints.append(found)
        if len(self.fingerprints) < _STEPS:
            return self.step(*args, **kwargs)
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        print(json.dumps({"fingerprints": self.fingerprints, "mesh": sizes}))
        raise _EnoughStepsError


def _batches(**settings: Any) -> tuple[list[Any], None]:
    shape = (settings["global_batch_size"], settings["max_target_length"])
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, shape, np.int32)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones(shape, np.bool_))
    return [batch] * _STEPS, None


def main(argv: list[str]) -> None:
    flags.FLAGS(["peft_main"])
    use_small_model()
    made = peft_trainer.PeftTrainer.jit_train_and_eval_step

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        step, evaluation = made(self, *args, **kwargs)
        jitted = step.func.__wrapped__  # By nnx's cache of what the step is called with.
        jitted.jitted_fn = _Watched(jitted.jitted_fn)
        return step, evaluation

    peft_trainer.PeftTrainer.jit_train_and_eval_step = watched
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        downloads.hf_pipeline = lambda *_: folder
        peft_main.model_lib.create_tokenizer = lambda *_: None
        peft_main.data_lib.create_datasets = _batches
        try:
            peft_main.main(["peft_main", *argv])
        except _EnoughStepsError:
            return
    raise SystemExit("the training ended before its last step")


if __name__ == "__main__":
    main(sys.argv[1:])
