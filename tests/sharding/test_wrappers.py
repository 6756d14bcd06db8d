"""Functions of the user's code that only constrain what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.sharding.mlir.wrappers import is_in_a_wrapper

TEXT = '''
import jax
from jax.lax import with_sharding_constraint as constrain

def plain(x, sharding):
    """A wrapper."""
    return jax.lax.with_sharding_constraint(x, sharding)  # yes

class Layout:
    def split(self, x, *names):
        sharding = self.of(names)
        if sharding is None:
            return x
        return jax.lax.with_sharding_constraint(  # yes
            x,
            sharding,  # yes
        )

short = lambda x: jax.lax.with_sharding_constraint(x, None)  # yes

def layer(x, w, sharding):
    x = x @ w
    return jax.lax.with_sharding_constraint(x, sharding)  # no

def other(x, sharding):
    return jax.lax.with_sharding_constraint(x * 2, sharding)  # no

def step(x, sharding):
    h = jax.lax.with_sharding_constraint(x, sharding)  # no
    return h + 1
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrappers") / "script.py"
    path.write_text(TEXT)
    return path


def test_the_constraint_of_a_wrapper_is_told_from_others(script: Path) -> None:
    for number, line in enumerate(TEXT.splitlines(), start=1):
        if "# yes" in line or "# no" in line:
            assert is_in_a_wrapper(str(script), number) is ("# yes" in line), line


def test_a_file_that_is_no_python_has_no_wrappers(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert not is_in_a_wrapper(str(tmp_path / "broken.py"), 1)
    assert not is_in_a_wrapper(str(tmp_path / "absent.py"), 1)
