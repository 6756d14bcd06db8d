"""Accumulation: as a function, what it makes is how many parts a batch has."""


def with_minibatch_steps(steps, metric_accumulator=None, grad_dtype=None):
    del metric_accumulator, grad_dtype
    return steps
