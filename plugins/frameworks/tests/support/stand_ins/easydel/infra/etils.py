"""Which activations a model may keep."""

import enum


class EasyDeLGradientCheckPointers(enum.StrEnum):
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    SAVE_ONLY_THESE_NAMES = "save_only_these_names"
    NONE = ""
