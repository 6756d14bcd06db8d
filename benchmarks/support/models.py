"""Which example, in which size, stands for a public model (pure functions)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from automesh.space.spec import shipped_spaces

DENSE, MOE, LONG = (f"examples/{name}.py" for name in ("dense_lm", "moe_lm", "long_context"))
SPACES = {
    script: shipped_spaces()[script.removeprefix("examples/").removesuffix(".py")]
    for script in (DENSE, MOE, LONG)
}

_DROPPED = "experts drop what is over their capacity (1.25) here"
_NORMED = "queries and keys are normalized there, not here"


class Unlike(Exception):
    """What no example can represent; its text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An example that stands for a model.

    Attributes:
      size: the value of its `--size`.
      heads: of its queries.
      remarks: what differs, one phrase each.
    """

    script: str
    size: str
    heads: int
    remarks: tuple[str, ...] = ()


def _dense(size: str, heads: int, *remarks: str) -> Model:
    return Model(script=DENSE, size=size, heads=heads, remarks=remarks)


def _moe(size: str, heads: int, *remarks: str) -> Model:
    return Model(script=MOE, size=size, heads=heads, remarks=(_DROPPED, *remarks))


_HEADS = {
    "llama2-7b": 32,
    "llama2-13b": 40,
    "llama2-70b": 64,
    "llama3.1-8b": 32,
    "llama3.1-70b": 64,
    "llama3.1-405b": 128,
    "fuji-70b-v1": 64,
    "fuji-70b-v2": 64,
    "fuji-70b-v3": 64,
    "fuji-8b-v3-tiktoken": 32,
    "fuji-70b-v3-tiktoken": 64,
    "default-22b": 24,
    "default-32b": 64,
    "default-128b": 128,
    "default-512b": 128,
    "default-1024b": 256,
    "fuji-7b-v1": 32,
    "fuji-7b-v2": 32,
    "fuji-7b-v3": 32,
    "gala-85m": 12,
    "gala-1b": 32,
    "gala-7b": 32,
    "honeycrisp-85m": 12,
    "honeycrisp-3b": 24,
}
# Lower-case names, as AXLearn, MaxText and Levanter have them; examples/lm/presets.py names the
# sources of the sizes.
_MODELS = {
    **{name: _dense(name, heads) for name, heads in _HEADS.items()},
    "qwen3-0.6b": _dense("qwen3-0.6b", 16, _NORMED),
    "mixtral-8x7b": _moe("8x7b", 32),
    "mixtral-8x22b": _moe("8x22b", 48),
    "qwen3-30b-a3b": _moe("qwen3-30b-a3b", 32, _NORMED),
    "qwen3.5-35b-a3b": _moe(
        "qwen3.5-35b-a3b",
        16,
        "three of four layers have linear attention there, all have softmax attention here",
        "one expert is shared by all tokens there, none here",
    ),
    "vit-g14": _dense(
        "vit-g14",
        16,
        "a vision transformer there; here a causal decoder of the same products, with a small "
        "vocabulary",
    ),
}
_REASONS = (
    (r"gpt3.*", "its feed-forward is a GELU of two matrices, and blocks have biases"),
    (r"gemma.*", "its layers alternate local and global attention, with soft caps"),
    (r"deepseek.*", "its attention is latent (MLA), and its first layers are dense"),
    (r"llama4.*", "its layers alternate dense and routed, with a shared expert"),
    (r"envy.*", "its layers alternate dense and routed"),
    (r"gspmd.*", "it is a pipeline"),
    (r"wan.*|.*diffusion.*", "it is a diffusion model"),
    (r"<any>|default", "it is for any model"),
)


def model_called(name: str) -> Model:
    """What stands for a model.

    Raises:
      Unlike: nothing does.
    """
    found = _MODELS.get(name.lower())
    if found is None:
        reasons = (why for pattern, why in _REASONS if re.fullmatch(pattern, name.lower()))
        raise Unlike(next(reasons, f"the sizes of `{name}` are not among the examples'"))
    return found


def arguments_of(model: Model, values: Mapping[str, int | str]) -> tuple[str, ...]:
    """The command line of the example."""
    said = (word for name, value in values.items() for word in (f"--{name}", str(value)))
    return ("--size", model.size, *said)


def chunk_of(model: Model, tokens_per_device: float) -> int:
    """Keys that attention looks at together, so that their scores take a device 1 GiB at most.

    The kernels that experts use keep no scores at all. Rows, positions and heads of a device
    multiply to the same on every mesh, so that this favours none.

    >>> chunk_of(model_called("llama3.1-8b"), 3 * 8192)
    256
    """
    bytes_per_key = 4 * model.heads * tokens_per_device
    return next((n for n in (1024, 512, 256) if n * bytes_per_key <= 2**30), 128)
