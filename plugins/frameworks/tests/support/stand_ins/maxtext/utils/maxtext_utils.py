"""The step as a function of state and batch alone."""

import functools


def get_functional_train_with_signature(step, data, state, model, config, params=None):
    function = functools.partial(step, model, config, state, params)
    function.__name__ = "train_step"
    return function, (state, data), (state, None), (), 0
