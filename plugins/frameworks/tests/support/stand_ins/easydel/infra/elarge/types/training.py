"""Trainers and their arguments, by kind."""

from easydel.trainers import (
    DPOConfig,
    SFTConfig,
    SFTTrainer,
    Trainer,
    TrainingArguments,
)

_TRAINERS = {"base": Trainer, "sft": SFTTrainer}
_ARGUMENTS = {"base": TrainingArguments, "sft": SFTConfig, "dpo": DPOConfig}


def get_trainer_class(kind):
    return _TRAINERS[kind]


def get_training_arguments_class(kind):
    return _ARGUMENTS[kind]
