"""One step of several functions, and when there were enough calls to tell."""

from __future__ import annotations

from automesh.program.capture.flow.choice import (
    Choice,
    Doubt,
    StepChoice,
    best,
    choice_of,
    circle_of,
    is_enough,
    is_usual,
)


def candidate(number: int, **known: object) -> StepChoice:
    usual = {
        "calls": 3,
        "all_calls": 3,
        "has_gradient": False,
        "trains": False,
        "bytes": 10_000,
        "from_others": {},
        "constant_bytes": 0,
    }
    return StepChoice(number=number, **{**usual, **known})  # pyright: ignore[reportArgumentType]


def test_a_circle_is_what_state_goes_through_and_comes_back_from() -> None:
    candidates = {
        0: candidate(0, from_others={1: 4096}),  # Gradients, of parameters that 1 makes.
        1: candidate(1, from_others={0: 4096, 1: 8192}),
        2: candidate(2, from_others={1: 4096}),  # Evaluates what 1 makes.
        3: candidate(3),
    }
    assert circle_of(candidates, 0) == {0, 1}
    assert circle_of(candidates, 2) == {2}
    assert circle_of(candidates, 3) == {3}


def test_what_is_called_more_often_is_no_part_of_the_same_iteration() -> None:
    candidates = {
        0: candidate(0, has_gradient=True, calls=12, all_calls=12, from_others={0: 4096, 1: 4096}),
        1: candidate(1, from_others={0: 4096, 1: 4096}),
    }
    assert choice_of(candidates, 0, [0, 1]).numbers == (0,)


def test_what_takes_the_sums_that_another_one_makes_is_part_of_the_step() -> None:
    """Before, gradients and sums alone were the step, and no parameter changed in it."""
    candidates = {
        0: candidate(0, has_gradient=True, calls=5, all_calls=5, from_others={2: 4096}),
        1: candidate(1, all_calls=4, from_others={0: 4096, 1: 4096}),
        2: candidate(2, all_calls=1, from_others={1: 4096, 2: 8192}),
    }
    middle = choice_of(candidates, 0, [0, 1])
    assert (middle.numbers, middle.in_rounds, middle.is_cut) == ((0, 1), True, True)
    whole = choice_of(candidates, 0, [0, 1, 2])
    assert (whole.numbers, whole.in_rounds, whole.is_cut) == ((0, 1, 2), True, False)


def test_gradients_that_are_changed_on_their_way_still_close_the_circle() -> None:
    candidates = {
        0: candidate(0, has_gradient=True, from_others={1: 4096}),
        1: candidate(1, from_others={1: 8192}),
    }
    found = choice_of(candidates, 0, [0, 1])
    assert found == Choice(numbers=(0, 1), doubt=Doubt.NONE, is_carried=True)


def test_the_less_a_function_trains_the_more_calls_are_waited_for() -> None:
    trains = candidate(0, has_gradient=True, trains=True, from_others={0: 4096})
    assert choice_of({0: trains}, 0, [0]).doubt is Doubt.NONE
    sums = candidate(0, has_gradient=True, from_others={0: 4096}, constant_bytes=4096)
    assert choice_of({0: sums}, 0, [0]).doubt is Doubt.NOTHING_TRAINED
    average = candidate(0, from_others={0: 4096})
    assert choice_of({0: average}, 0, [0]).doubt is Doubt.NO_GRADIENT
    total = candidate(0, from_others={0: 4}, constant_bytes=4096)
    assert choice_of({0: total}, 0, [0]).doubt is Doubt.LITTLE_STATE
    key = candidate(0, from_others={0: 8})
    assert choice_of({0: key}, 0, [0]).doubt is Doubt.LITTLE_STATE


def test_small_parameters_are_state_if_they_are_trained() -> None:
    tiny = candidate(0, has_gradient=True, trains=True, from_others={0: 8}, constant_bytes=10**6)
    assert choice_of({0: tiny}, 0, [0]).doubt is Doubt.NONE


def test_a_rare_variant_is_never_enough() -> None:
    choice = Choice(numbers=(0,), doubt=Doubt.NONE, is_carried=True)
    assert is_enough(choice, candidate(0))
    assert not is_usual(candidate(0, all_calls=6))
    assert not is_enough(choice, candidate(0, all_calls=6))
    assert not is_enough(choice, candidate(0, calls=2, all_calls=2))


def test_doubt_is_bounded_in_calls_and_seconds() -> None:
    choice = Choice(numbers=(0,), doubt=Doubt.LITTLE_STATE, is_carried=False)
    assert not is_enough(choice, candidate(0, calls=40, all_calls=40, seconds=1.0))
    assert is_enough(choice, candidate(0, calls=40, all_calls=40, seconds=30.0))
    assert is_enough(choice, candidate(0, calls=400, all_calls=400, seconds=1.0))


def test_at_the_end_of_a_script_the_least_doubt_counts_before_the_most_bytes() -> None:
    trained = Choice(numbers=(0,), doubt=Doubt.NONE, is_carried=True)
    evaluated = Choice(numbers=(1,), doubt=Doubt.LITTLE_STATE, is_carried=True)
    choices = [(evaluated, candidate(1, bytes=10**9)), (trained, candidate(0, bytes=10))]
    assert best(choices) == trained
    assert best([]) is None


def test_a_function_without_state_or_parameters_is_never_the_step() -> None:
    helper = candidate(0, calls=1000, all_calls=1000, seconds=600)
    choice = choice_of({0: helper}, 0, [0])
    assert choice.doubt is Doubt.NO_STATE
    assert not is_enough(choice, helper)
    assert best([(choice, helper)]) is None
    evaluates = candidate(1, constant_bytes=8192)
    forward = choice_of({1: evaluates}, 1, [1])
    assert best([(choice, helper), (forward, evaluates)]) is forward
