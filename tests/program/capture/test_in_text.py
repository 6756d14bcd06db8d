"""What the text of a script promises of its later lines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from automesh.program.capture import in_text
from automesh.program.capture.in_text import jitted_trainers, mesh_in_text, takes_gradients
from automesh.program.nouns import Entry


def entry(path: Path, text: str) -> Entry:
    path.write_text(text)
    return Entry(kind="script", location=str(path))


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Only the script itself is the user's."""
    monkeypatch.setattr(in_text, "sys", SimpleNamespace(modules={}))


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("step = jax.jit(jax.value_and_grad(loss))\n", True),
        ("from jax import grad\ng = grad(loss)\n", True),
        ("@eqx.filter_value_and_grad\ndef loss(model): ...\n", True),
        ("state = state.apply_gradients(grads=grads)\n", True),
        ("# takes no grad\nx = model.gradual(1)\n", False),
        ("grad = back(x)\nw = w - 0.1 * grad\n", False),
        ("@grad\ndef loss(w): ...\n", True),
        ("this is no Python", False),
    ],
)
def test_names_of_gradients_are_found(tmp_path: Path, text: str, takes: bool) -> None:
    assert takes_gradients(entry(tmp_path / "train.py", text)) is takes


def test_cells_of_a_notebook_are_read(tmp_path: Path) -> None:
    cells = ["%matplotlib inline", "x = 1\nmesh = jax.make_mesh((8,), ('data',))", "jax.grad(f)(x)"]
    found = [{"cell_type": "code", "source": text, "outputs": []} for text in cells]
    notebook = entry(tmp_path / "train.ipynb", json.dumps({"cells": found, "nbformat": 4}))
    assert takes_gradients(notebook)
    place = mesh_in_text(notebook)
    assert place is not None
    assert (place.line, "cell 2" in place.file) == (2, True)


def test_modules_that_the_script_has_imported_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library.py"
    library.write_text("step = value_and_grad(loss)")
    modules = {"library": SimpleNamespace(__file__=str(library)), "builtins": SimpleNamespace()}
    monkeypatch.setattr(in_text, "sys", SimpleNamespace(modules=modules))
    assert takes_gradients(entry(tmp_path / "train.py", "import library"))


def test_functions_that_are_jitted_and_take_gradients_are_found(tmp_path: Path) -> None:
    text = """
@jax.jit
def warmup(w): return jax.grad(loss)(w)
@partial(jax.jit, static_argnums=0)
def train(self, w): return value_and_grad(loss)(w)
def later(w): return jax.grad(loss)(w)
@eqx.filter_jit
def with_equinox(model): return eqx.filter_grad(loss)(model)
@jax.jit
def evaluate(w): return loss(w)
def never(w): return jax.grad(loss)(w)
step = jax.jit(later, donate_argnums=0)
@jax.jit
def gradients(w): return jax.grad(loss)(w)
def helper(w): return gradients(w)
@jax.jit
def whole(w): return w - helper(w)
@jax.jit
def reads(state): return state.train + state.whole
@wrapped
@jax.jit
def renamed(w): return jax.grad(loss)(w)
"""
    found = jitted_trainers(entry(tmp_path / "train.py", text))
    assert {name: line.line for name, line in found.items()} == {
        "warmup": 3, "train": 5, "later": 6, "with_equinox": 8, "whole": 17,
    }  # fmt: skip
