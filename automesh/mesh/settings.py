"""`Settings`: a mapping that cannot change and can be hashed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from automesh.mesh.axes import Scalar


class Settings(Mapping[str, Scalar]):
    """Knobs or compiler options by name, in order; `**config.knobs` and `dict(...)` take it.

    >>> Settings([("remat", "full")]) == {"remat": "full"}
    True
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Scalar] | Iterable[tuple[str, Scalar]] = ()) -> None:
        self._values = dict(values)

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


NO_SETTINGS = Settings()
