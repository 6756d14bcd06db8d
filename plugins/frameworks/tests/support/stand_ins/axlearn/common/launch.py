"""The flags of the training command; importing it sets what libtpu starts with, as in AXLearn."""

import os

FLAG_NAMES = {"data_dir": None, "jax_backend": None, "module": None, "config": None}
FLAG_NAMES |= {"trainer_dir": None, "mesh_selector": None, "trainer_prng_seed": 0}


class _Flags:
    """As much of absl's flags as is used."""

    def __init__(self):
        self._known = dict(FLAG_NAMES)

    def __contains__(self, name):
        return name in self._known

    def define(self, name):
        if name in self._known:
            raise ValueError(f"The flag '{name}' is defined twice")
        self._known[name] = None

    def __call__(self, argv):
        values, others = dict(self._known), [argv[0]]
        for one in argv[1:]:
            name, equals, value = one.removeprefix("--").partition("=")
            if not one.startswith("--"):
                others.append(one)
            elif name not in values:
                raise ValueError(f"Unknown command line flag '{name}'")
            elif not equals:
                raise ValueError(f"Missing value for flag {one}")
            else:
                values[name] = value
        for name in ("module", "config"):
            if values[name] is None:
                raise ValueError(f"Flag --{name} must have a value other than None.")
        self.__dict__.update(values)
        return others


FLAGS = _Flags()
os.environ["LIBTPU_INIT_ARGS"] = "--xla_of_a_stand_in=true"
