"""What a platform is: the nouns of `cpu`, `gpu` and `tpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.collectives import CollectiveName

PlatformName = Literal["cpu", "gpu", "tpu"]
Options = tuple[tuple[str, bool | int | float | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What a compiler does with collectives.

    Attributes:
      hides: kinds that it runs beside compute.
      has_slots: True if a collective runs beside one slot of its block, see `ir.terms`, rather
        than beside all of it.
      combined_kinds: kinds of which it makes several one.
      combined_bytes: of several that become one, at most; 0: none do.
      widens: True if 16-bit floats travel in 32 bits.
      whole_sum_cost: how much longer a sum that is scattered over every device of the mesh takes
        than its kind says.
      window_option: compiler option that says from which size on, in MiB, a multiplication is
        windowed, see `cost.windowed`; empty where none is.
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
    """What compiles for a platform without its devices.

    Attributes:
      module: that Python finds if it is installed.
      packages: all that must be installed, the one with the version first.
    """

    module: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One kind of devices.

    Attributes:
      name: as jax has it, and as specs and stored figures have it.
      devices: plural noun for messages: `TPUs`.
      one_device: what one is, and how it is linked to others.
      backends: names that user code may know it by (`jax.jit(backend=)`, Pallas).
      lowered_for: `lowering_platforms` of jax.
      scheduling: what its compiler does with collectives.
      quick_options: for a program that is never run.
      needed_options: without which programs cannot be compiled, or not well, without devices.
      low_effort_options: that give a verdict on memory in a fraction of the time; empty where the
        compiler is quick at its default effort.
      plugins: that compile without devices; none: nothing does.
      compiler: its name for messages.
      jax_extra: the extra of jax that names the versions of the plugins.
      package_prefix: with which the names of all packages begin that only it needs.
      worker_variables: environment of a worker that compiles without devices.
      link_latency_s: of a hop, for chips of a user's own that do not say; see data/chips.json.
      fabric: how the devices of a granule are linked: see `hardware.fabric.fabric.Fabric`.
      library_operations: of StableHLO, done by a library: what they read and write lies in memory,
        as it is.
      sends_at_once: True if a device sends to all others of an all-to-all at the same time.
      slower_bits: of number types that the data sheet leaves out, (bits, how many times longer a
        multiplication takes than in bf16).
      reserve_bytes, reserve_share: of a device, what is kept free where nobody says.
      share_variables: environment that says which share of a device jax takes instead.
      library_variable: environment that names a compiler which is no package.
      cluster_keys: what a cluster of a user's own may state, beside its chip.
      needed_cluster_keys: of these, what it must.
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
    slower_bits: tuple[tuple[int, float], ...] = ()
    reserve_bytes: int = 0
    reserve_share: float = 0.0
    share_variables: tuple[str, ...] = ()
    library_variable: str = ""
    cluster_keys: tuple[str, ...] = ()
    needed_cluster_keys: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions decide what is compiled."""
        return tuple(plugin.packages[0] for plugin in self.plugins)

    @property
    def install(self) -> str:
        """What to do where no plugin is installed: the beginning of a hint."""
        return f"run `pip install 'jax-automesh[{self.name}]'`"
