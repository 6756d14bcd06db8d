"""Sizes of a mesh inside and between slices, and what is split by its axes."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

DEFAULT_ICI_AXIS_SPEC = {"data": -1, "replica": 1, "model": 1}
DEFAULT_DCN_AXIS_SPEC = {"replica_dcn": -1}
_SHARED = {"mlp": "model", "heads": "model"}


@dataclass(frozen=True)
class MeshConfig:
    axes: dict = dataclasses.field(default_factory=lambda: dict(DEFAULT_ICI_AXIS_SPEC))
    dcn_axes: dict = dataclasses.field(default_factory=lambda: dict(DEFAULT_DCN_AXIS_SPEC))
    compute_mapping: dict = dataclasses.field(default_factory=dict)
    param_mapping: dict = dataclasses.field(default_factory=lambda: {"embed": "data"})

    @cached_property
    def resolved_compute_mapping(self):
        rows = {"batch": ("replica_dcn", "replica", "data")}
        return {**_SHARED, **rows, **_tuples(self.compute_mapping)}

    @cached_property
    def resolved_param_mapping(self):
        return {**_SHARED, **_tuples(self.param_mapping)}

    def axis_shapes(self, num_devices, num_slices):
        axes = {**DEFAULT_ICI_AXIS_SPEC, **self.axes}
        dcn_axes = {**DEFAULT_DCN_AXIS_SPEC, **self.dcn_axes}
        for sizes, whole in ((axes, num_devices // num_slices), (dcn_axes, num_slices)):
            known = math.prod(size for size in sizes.values() if size != -1)
            for name, size in sizes.items():
                sizes[name] = whole // known if size == -1 else size
            if math.prod(sizes.values()) != whole:
                raise ValueError(f"{sizes} must multiply to {whole}")
        return axes, dcn_axes


def _tuples(mapping):
    return {name: tuple(one) if isinstance(one, list) else one for name, one in mapping.items()}
