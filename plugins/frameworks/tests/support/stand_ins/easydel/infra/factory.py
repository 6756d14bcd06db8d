"""What a model is for."""

import enum


class TaskType(enum.StrEnum):
    CAUSAL_LM = "causal-language-model"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
