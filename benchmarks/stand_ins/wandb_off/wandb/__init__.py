"""Stands in for `wandb`: takes what it is given and keeps nothing."""

from __future__ import annotations

from typing import Any

config: dict[str, Any] = {}
summary: dict[str, Any] = {}


class Run:
    """A run that records nothing."""

    id = "none"
    name = "none"
    config: dict[str, Any] = config
    summary: dict[str, Any] = summary

    def log(self, *_values: Any, **_options: Any) -> None:
        pass

    def finish(self, *_values: Any, **_options: Any) -> None:
        pass


def init(*_values: Any, **_options: Any) -> Run:
    return Run()


def log(*_values: Any, **_options: Any) -> None:
    pass


def login(*_values: Any, **_options: Any) -> None:
    pass


def finish(*_values: Any, **_options: Any) -> None:
    pass
