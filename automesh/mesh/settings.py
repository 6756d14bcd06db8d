"""`Settings`: an immutable, hashable mapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from automesh.errors import WrongType, kind_of
from automesh.mesh.axes import Scalar
from automesh.mesh.mapping import pairs_of

_HINT = 'write for example {"remat": "full", "microbatches": 4}'


class Settings(Mapping[str, Scalar]):
    """Knobs or compiler options by name, in order; `**config.knobs` and `dict(...)` take it.

    Raises:
      WrongType: no mapping of names to booleans, numbers and strings. >>> Settings([("remat",
        "full")]) == {"remat": "full"}
    True
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Scalar] | Iterable[tuple[str, Scalar]] = ()) -> None:
        self._values = _checked(values, "settings")

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Settings({self._values!r})"


def as_settings(values: object, what: str) -> Settings:
    """Makes settings of what people write; `Settings` are returned as they are.

    Args:
      what: name of the settings, for the error: `knobs`.

    Raises:
      WrongType: no mapping of names to booleans, numbers and texts.

    Example:
      >>> as_settings({"remat": "full"}, "knobs")
      Settings({'remat': 'full'})
    """
    return values if isinstance(values, Settings) else Settings(_checked(values, what))


def _checked(values: object, what: str) -> dict[str, Scalar]:
    settings: dict[str, Scalar] = {}
    for name, value in pairs_of(values, f"{what} must be a dict of names to values", hint=_HINT):
        if not isinstance(name, str):
            raise WrongType(
                f"the names of {what} must be strings, got {kind_of(name)}: {name!r}", hint=_HINT
            )
        if not isinstance(value, bool | int | float | str):
            raise WrongType(
                f"`{name}` of the {what} must be a boolean, a number or a string, got "
                f"{kind_of(value)}: {value!r}",
                hint=_HINT,
            )
        settings[name] = value
    return settings


NO_SETTINGS = Settings()
