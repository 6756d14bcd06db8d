"""Configurations: named values, some of them configurations too, copied when they are set."""

import copy
import importlib
import inspect


class _Required:
    def __bool__(self):
        return False

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return "REQUIRED"


REQUIRED = _Required()


class ConfigBase:
    def __init__(self, **values):
        self.__dict__.update(values)

    def keys(self):
        return list(self.__dict__)

    def set(self, **values):
        for key, value in values.items():
            if key not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no field '{key}'")
            setattr(self, key, copy.deepcopy(value))
        return self

    def clone(self, **values):
        return copy.deepcopy(self).set(**values)

    def get_recursively(self, path):
        found = self
        for key in path:
            found = getattr(found, key)
        return found

    def set_recursively(self, path, *, value):
        self.get_recursively(path[:-1]).set(**{path[-1]: value})

    def visit(self, visit_fn, prefix=""):
        for key, value in self.__dict__.items():
            path = f"{prefix}.{key}" if prefix else key
            if isinstance(value, ConfigBase):
                value.visit(visit_fn, path)
            elif isinstance(value, list):
                for at, one in enumerate(value):
                    one.visit(visit_fn, f"{path}[{at}]")
            else:
                visit_fn(path, value)


class ClassConfig(ConfigBase):
    """A class and what it is made with."""

    def __init__(self, klass, **values):
        super().__init__(**values)
        self.klass = klass

    def instantiate(self, **more):
        return self.klass(self, **more)


class FunctionConfig(ConfigBase):
    """A function and its arguments."""

    def __init__(self, fn):
        parameters = inspect.signature(fn).parameters.values()
        super().__init__(
            **{
                one.name: REQUIRED if one.default is one.empty else one.default
                for one in parameters
            }
        )
        self.fn = fn

    def instantiate(self):
        return self.fn(**{key: value for key, value in self.__dict__.items() if key != "fn"})


def config_for_function(fn):
    return FunctionConfig(fn)


def maybe_instantiate(value):
    return value.instantiate() if hasattr(value, "instantiate") else value


def get_named_trainer_config(config_name, *, config_module):
    found = importlib.import_module(config_module).named_trainer_configs()
    if config_name not in found:
        raise KeyError(f"Unrecognized config {config_name} under {config_module}")
    return found[config_name]
