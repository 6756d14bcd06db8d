"""Changes of a trainer's configuration, in place."""

from axlearn.common.config import ClassConfig, config_for_function
from axlearn.common.gradient_accumulation import with_minibatch_steps


class GradientAccumulationModifier:
    def __init__(self, cfg):
        self.steps = cfg.grad_acc_steps

    @classmethod
    def default_config(cls):
        return ClassConfig(cls, grad_acc_steps=0)

    def __call__(self, cfg):
        transformation = config_for_function(with_minibatch_steps).set(steps=self.steps)
        cfg.learner.set(forward_fn_transformation=transformation)
        return cfg


class RematSpecModifier:
    def __init__(self, cfg):
        self.policies = cfg.remat_policies

    @classmethod
    def default_config(cls):
        return ClassConfig(cls, remat_policies={})

    def __call__(self, cfg):
        for path, spec in self.policies.items():
            cfg.set_recursively([*path.split("."), "remat_spec"], value=spec)
        return cfg
