"""A program is the same wherever the source files of its kernels lie, and another with others."""

from __future__ import annotations

import importlib
import runpy
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.program.absent.device_queries import answering
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.kernels.identity import forget_places
from automesh.program.lower.lowered import canonical_text, fingerprint, walk

_SCRIPT = """{gap}
import jax
from jax.experimental import pallas as pl
{imports}

def kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] {operation} 2.0


@jax.jit
def step(x):
    return pl.pallas_call(
        kernel, grid=(2,), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        {options}
    )(x)
"""
_TRITON = {
    "imports": "from jax.experimental.pallas import triton as plgpu",
    "options": "compiler_params=plgpu.CompilerParams(num_warps=4),",
}
_MOSAIC = {"imports": "", "options": ""}
X = jax.ShapeDtypeStruct((16, 128), jnp.float32)


def lowered(file: Path, platform: str, *, operation: str = "*", gap: str = "") -> Any:
    file.parent.mkdir(parents=True, exist_ok=True)
    more = _MOSAIC if platform == "tpu" else _TRITON
    file.write_text(_SCRIPT.format(operation=operation, gap=gap, **more), encoding="utf-8")
    step: Any = runpy.run_path(str(file))["step"]
    if platform == "tpu":
        return step.trace(X).lower(lowering_platforms=(platform,))
    target = parse_target("gpu-h100-8", {}).absent
    assert target is not None
    absent = absent_devices_of(target)  # Pallas asks which GPU it is.
    with (
        warnings.catch_warnings(),
        answering(absent, lambda: fake_devices(absent), in_meshes=False),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        return step.trace(X).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_folder_of_a_kernel_is_no_part_of_a_fingerprint(tmp_path: Path, platform: str) -> None:
    programs = [
        lowered(tmp_path / "one/step.py", platform),
        lowered(tmp_path / "another/folder/further/down/step.py", platform, gap="\n\n"),
        lowered(tmp_path / "one/other.py", platform, operation="+"),
    ]
    assert "custom_call" in canonical_text(programs[0])
    same, elsewhere, other = (
        fingerprint(one, device_ids=[0], compiler_options=(), platform=platform) for one in programs
    )
    assert same == elsewhere != other


def test_what_cannot_be_read_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from automesh.program.kernels import identity
    from automesh.program.kernels.mosaic import UnreadableKernel

    def refuse(_: str) -> str:
        raise UnreadableKernel("of another day")

    program = lowered(tmp_path / "step.py", "tpu")
    known = canonical_text(program)
    monkeypatch.setattr(identity, "kernel_text", refuse)
    assert len(canonical_text(program)) > len(known)


_OF_ANOTHER_KIND = """
func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @tpu_custom_call(%x) {api_version = 4 : i32, backend_config = {a = 1 : i32}} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @tpu_custom_call(%0) {backend_config = "no JSON"} : (tensor<8xf32>) -> tensor<8xf32>
  %2 = stablehlo.custom_call @__gpu$xla.gpu.triton(%1) {mhlo.backend_config = "a text"} : (tensor<8xf32>) -> tensor<8xf32>
  return %2 : tensor<8xf32>
}
"""  # noqa: E501


def test_kernels_that_are_written_in_another_way_stay_as_they_are(tmp_path: Path) -> None:
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    module: Any = lowered(tmp_path / "step.py", "tpu").compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        other = ir.Module.parse(_OF_ANOTHER_KIND)
        before = str(other)
        forget_places(walk(ir, other), ir)
        assert str(other) == before
