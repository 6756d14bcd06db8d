"""Names of what is kept."""

import enum


class RematRegexSavePatterns(enum.Enum):
    FEED_FORWARD = ".*linear1"
    NATIVE_ATTENTION = ".*([qkvo]_proj|context)"
