"""Modules of models, and their settings by name."""

import enum
import importlib


class ModelModule(enum.Enum):
    """Which module of a folder."""

    MODEL = "model"


def get_model_module(model_name, module_type):
    assert "/" not in model_name
    return importlib.import_module(f"tunix.models.llama3.{module_type.value}")


def call_model_config(model_name):
    if model_name not in ("llama3_tiny", "gemma_2b"):
        raise AttributeError(f"Error: Function '{model_name}' not found on the target object")
    return get_model_module(model_name, ModelModule.MODEL).ModelConfig()
