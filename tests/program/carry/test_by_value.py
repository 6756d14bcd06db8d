"""How tuples of other classes are written."""

import pickle
from typing import Any, NamedTuple

import pytest

from automesh.program.carry.by_value import tuple_of_arguments


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
