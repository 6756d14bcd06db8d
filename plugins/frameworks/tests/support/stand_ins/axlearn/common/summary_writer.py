"""Writers of summaries: the usual one makes a folder at once, as AXLearn's does."""

from pathlib import Path

from axlearn.common.config import ClassConfig


class NoOpWriter:
    def __init__(self, cfg):
        del cfg

    @classmethod
    def default_config(cls):
        return ClassConfig(cls, dir=None)


class SummaryWriter(NoOpWriter):
    def __init__(self, cfg):
        super().__init__(cfg)
        Path(cfg.dir).mkdir(parents=True)
