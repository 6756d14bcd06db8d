"""The nouns of a platform, for `cpu`, `gpu` and `tpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.collectives import CollectiveName

PlatformName = Literal["cpu", "gpu", "tpu"]
Options = tuple[tuple[str, bool | int | float | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The way in which a compiler schedules collectives.

    Attributes:
      hides: kinds that it overlaps with compute.
      has_slots: True if a collective overlaps with one slot of its block only, see `ir.terms`.
      combined_kinds: kinds of which it combines several into one.
      combined_bytes: limit for a combined collective; 0: none are combined.
      widens: True if 16-bit floats are sent in 32 bits.
      whole_sum_cost: factor by which a reduce-scatter over every device of the mesh is slower than
        its kind.
      window_option: compiler option with the minimum size, in MiB, of a windowed multiplication,
        see `cost.windowed`; empty if there is none.
      source: where that is known from.
    """

    hides: frozenset[CollectiveName] = frozenset()
    has_slots: bool = False
    combined_kinds: frozenset[CollectiveName] = frozenset()
    combined_bytes: float = 0.0
    widens: bool = False
    whole_sum_cost: float = 1.0
    window_option: str = ""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A compiler for a platform that needs no devices.

    Attributes:
      module: importable module if it is installed.
      packages: all that must be installed, the one with the version first.
    """

    module: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One kind of devices.

    Attributes:
      name: as in jax, in specs and in stored figures.
      devices: plural noun for messages: `TPUs`.
      one_device: what one is, and how it is linked to others.
      backends: names in user code (`jax.jit(backend=)`, Pallas).
      lowered_for: `lowering_platforms` of jax.
      scheduling: how its compiler schedules collectives.
      quick_options: options for a program that is never run.
      needed_options: options that compiling without devices needs, or needs for good programs.
      low_effort_options: options with which the compiler decides about memory in a fraction of the
        time; empty if it is fast anyway.
      plugins: compilers without devices; may be empty.
      compiler: its name for messages.
      jax_extra: the extra of jax with the versions of the plugins.
      package_prefix: prefix of the packages that only this platform needs.
      worker_variables: environment of a worker that compiles without devices.
      link_latency_s: of a hop, for users' chips without this figure; see data/chips.json.
      fabric: how the devices of a granule are linked: see `hardware.fabric.fabric.Fabric`.
      library_operations: operations of StableHLO that a library does: their operands and results
        are in memory.
      least_joined: elements of the last dimension from which on a concatenation along it is a
        kernel of its own, whose operands and result are in memory; 0: all are fused.
      most_evaluations: how often a kernel computes an element of a value at most before the value
        gets a buffer; 0: not known.
      sends_at_once: True if a device sends to all others of an all-to-all at the same time.
      slower_bits: for number types without a figure, (bits, time of a multiplication divided by
        that in bf16).
      reserve_bytes, reserve_share: default reserve of a device.
      share_variables: environment variables that set the share of a device for jax.
      library_variable: environment variable with the path of a compiler that is no package.
      cluster_keys: keys of a user's cluster, other than its chip.
      needed_cluster_keys: those of them that are required.
    """

    name: PlatformName
    devices: str
    one_device: str = ""
    backends: tuple[str, ...]
    lowered_for: tuple[str, ...]
    scheduling: Scheduling
    quick_options: Options = ()
    needed_options: Options = ()
    low_effort_options: Options = ()
    plugins: tuple[Plugin, ...] = ()
    compiler: str = ""
    jax_extra: str = ""
    package_prefix: str = ""
    worker_variables: tuple[tuple[str, str], ...] = ()
    link_latency_s: float = 0.0
    fabric: Literal["torus", "switch", "shared"]
    sends_at_once: bool = False
    library_operations: frozenset[str] = frozenset()
    least_joined: int = 0
    most_evaluations: int = 0
    slower_bits: tuple[tuple[int, float], ...] = ()
    reserve_bytes: int = 0
    reserve_share: float = 0.0
    share_variables: tuple[str, ...] = ()
    library_variable: str = ""
    cluster_keys: tuple[str, ...] = ()
    needed_cluster_keys: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Returns the packages whose versions change what is compiled."""
        return tuple(plugin.packages[0] for plugin in self.plugins)

    @property
    def install(self) -> str:
        """Returns how to install a plugin: the beginning of a hint."""
        return f"run `pip install 'jax-automesh[{self.name}]'`"
