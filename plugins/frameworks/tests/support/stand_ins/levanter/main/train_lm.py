"""What the training command takes."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from levanter.model import LlamaConfig, Optimizer
from levanter.trainer import TrainerConfig


@dataclass
class NoAdaptorConfig:
    @staticmethod
    def get_choice_name(kind):
        return "none"


class Tokenizer(tuple):
    eos_token_id = 0


@dataclass
class LmDataConfig:
    tokenizer: str = "gpt2"
    vocab_size: int | None = None
    block_cross_document_attention: bool = True
    components: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        read = {name: SimpleNamespace(**one) for name, one in self.components.items()}
        self.components = read

    @cached_property
    def the_tokenizer(self):
        return Tokenizer((Path(self.tokenizer) / "tokens").read_text().split())


@dataclass
class TrainLmConfig:
    data: LmDataConfig = dataclasses.field(default_factory=LmDataConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    model: LlamaConfig = dataclasses.field(default_factory=LlamaConfig)
    train_seq_len: int | None = None
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    initialize_from_hf: bool = False
    use_hf_model_config: bool = False
    pad_tokenizer_to_match_model: bool = False
    z_loss_weight: float = 0.0
    adapter: NoAdaptorConfig = dataclasses.field(default_factory=NoAdaptorConfig)
