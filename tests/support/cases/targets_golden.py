"""What the golden files in tests/golden/targets hold, by name."""

from collections.abc import Callable
from functools import partial

from automesh.hardware.catalogue import find_targets
from automesh.hardware.compilers import Compiler
from automesh.report.blocks.terminal import render
from automesh.report.pages.targets import report_of
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "targets"
WIDTHS = (60, 80, 120)
COMPILERS = (
    Compiler(platform="tpu", name="libtpu", version="0.0.42.1", install=""),
    Compiler(
        platform="gpu",
        name="the CUDA plugin of jax",
        version="",
        install="run `pip install 'jax-automesh[gpu]'`",
    ),
)
CLUSTERS = """\
[clusters.lab]
chip = "h100-nvl"
nodes = 16
devices_per_node = 8
network_bytes_per_s = 400e9
source = "the invoice of March"
[clusters.pod]
chip = "t1"
torus = [6, 4]
wraps = [true, false]
host = [2, 2]
[chips.h100-nvl]
like = "h100"
hbm_bytes = 94e9
[chips.t1]
platform = "tpu"
flops_per_s = { bf16 = 1e15 }
hbm_bytes = 64e9
hbm_bytes_per_s = 4e12
link_bytes_per_s = 100e9
"""


def table(pattern: str, *, width: int, colour: bool = False) -> str:
    report = report_of(find_targets(pattern), pattern=pattern, compilers=COMPILERS)
    return render(report, width=width, colour=colour)


CASES: dict[str, Callable[[], str]] = {
    **{
        f"{name}_{width}": partial(table, pattern, width=width)
        for width in WIDTHS
        for name, pattern in (
            ("all", ""),
            ("v6e", "v6e"),
            ("slices", "tpu-v5litepod-256-4"),
            ("h100", "h100"),
        )
    },
    "all_80_colour": partial(table, "", width=80, colour=True),
    "shape_80": partial(table, "v5e:4x8", width=80),
    "gpus_80": partial(table, "gpu-h100-64", width=80),
    "two_devices_a_chip_80": partial(table, "tpu-7x-128", width=80),
    "no_compiler_80": partial(table, "gpu-mi300x-8", width=80),
    "several_kinds_80": partial(table, "tpu-*-8", width=80),
}
