"""Configurations: what `get_config()` of a file gives, with `--cfg.KEY=VALUE` over it."""

import ast
import contextlib
import runpy
import sys
from types import SimpleNamespace

from absl import flags

from kauldron.konfig.py_flag_utils import Expression, maybe_parse_py_flag_value
from kauldron.kontext import set_by_path


class ConfigDict(SimpleNamespace):
    """Arguments of what is not made yet: of `make`, or of a trainer."""


class _ConfigFlag(flags.Flag):
    """As in Kauldron, the file is run once, and each value is made anew."""

    def __init__(self, name, values):
        super().__init__(flags.ArgumentParser(), None, name, None, "")
        self.values = values
        self.found = None

    def _parse(self, argument):
        for word in sys.argv:  # As in Kauldron.
            key = word.lstrip("-").partition("=")[0]
            if key.startswith(f"{self.name}.") and key not in self.values:
                flags.DEFINE_string(key, None, "", flag_values=self.values)
        try:
            self.found = runpy.run_path(argument)
        except FileNotFoundError as error:
            raise flags.IllegalFlagValueError(f"flag --cfg={argument}: {error}") from error
        return argument

    @property
    def value(self):
        if self.found is None:
            return None
        config = self.found["get_config"]()
        for name in self.values:
            key = name.partition(".")[2]
            if key and self.values[name].value is not None:
                set_by_path(config, key, _literal(self.values[name].value))
        return config

    @value.setter
    def value(self, value):
        pass


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return maybe_parse_py_flag_value(text)


def DEFINE_config_file(name, default, *, flag_values):
    del default
    return flags.DEFINE_flag(_ConfigFlag(name, flag_values), flag_values)


@contextlib.contextmanager
def set_lazy_imported_modules(*, lazy_import):
    assert "xmanager" in lazy_import
    yield


def resolve(config):
    """The object of a configuration, or of an expression."""
    if isinstance(config, Expression):
        return config.value
    if not isinstance(config, ConfigDict):
        return config
    from kauldron.train import Trainer

    found = {key: resolve(value) for key, value in vars(config).items()}
    try:
        return found.pop("make", Trainer)(**found)
    except TypeError as error:  # As Kauldron does, it quotes the configuration.
        raise TypeError(f"For: {config}\n{'=' * 70}\n{error}") from error
