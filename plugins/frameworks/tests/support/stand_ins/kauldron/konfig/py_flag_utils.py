"""Expressions in arguments."""

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class Expression:
    """What `py::` stands before; its value is made when it is asked for."""

    text: str

    @property
    def value(self):
        from kauldron.utils.sharding_utils import sharding

        return eval(self.text, {"kd": SimpleNamespace(sharding=sharding)})


def maybe_parse_py_flag_value(value):
    if not isinstance(value, str) or not value.startswith("py::"):
        return value
    text = value.removeprefix("py::")
    compile(text, "py::", "eval")
    return None if text == "None" else Expression(text)
