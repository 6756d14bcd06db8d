"""How tuples of other classes are written."""

import copyreg
import io
import pickle
from typing import Any, NamedTuple

import pytest

from automesh.program.carry.by_value import answers_for_all, tuple_of_arguments


class OneByOne(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, *parts: Any) -> "OneByOne":
        return super().__new__(cls, parts)


class AllAtOnce(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, parts: Any = ()) -> "AllAtOnce":
        return super().__new__(cls, parts)


class Named(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize("value", [OneByOne(1, 2), OneByOne((1, 2)), OneByOne("a")])
def test_a_tuple_that_takes_its_elements_one_by_one_is_made_so_again(value: OneByOne) -> None:
    made = tuple_of_arguments(value)
    assert made is not None
    kind, elements, state = made
    assert kind(*elements) == value and state is None
    # Pickle alone makes another one of it.
    assert pickle.loads(pickle.dumps(value)) != value


@pytest.mark.parametrize("value", [(1, 2), AllAtOnce((1, 2)), Named(1, 2), [1], "text"])
def test_others_are_left_to_pickle(value: Any) -> None:
    assert tuple_of_arguments(value) is None
    assert pickle.loads(pickle.dumps(value)) == value


class Wrapped:
    """Hands on what it is asked for, as a wrapper of a parameter."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


class Settings(dict[str, Any]):
    """Raises KeyError for attributes that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Elements(list[Any]):
    def __getattr__(self, name: str) -> Any:
        return [getattr(one, name) for one in self]


class _Writer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        how = answers_for_all(obj)
        return NotImplemented if how is None else how


def _read_again(value: Any) -> Any:
    buffer = io.BytesIO()
    _Writer(buffer).dump(value)
    return pickle.loads(buffer.getvalue())


def test_an_object_that_answers_for_all_attributes_is_read_again() -> None:
    wrapped = _read_again(Wrapped(Wrapped("text")))
    assert wrapped.value.upper() == "TEXT"
    settings = _read_again(Settings(width=8, inner=Settings(depth=2)))
    assert (settings.width, settings.inner.depth) == (8, 2)
    elements = _read_again(Elements([Wrapped(1), Wrapped(2)]))
    assert elements.value == [1, 2]
    with pytest.raises(RecursionError):  # Pickle alone never ends.
        pickle.loads(pickle.dumps(Wrapped(1)))


class SaysHow(Wrapped):
    def __reduce__(self) -> Any:
        return SaysHow, (self.value,)


@pytest.mark.parametrize("value", [SaysHow(1), Wrapped, {"a": 1}, copyreg, Named(1, 2)])
def test_what_says_how_it_is_pickled_is_left_to_pickle(value: Any) -> None:
    assert answers_for_all(value) is None
