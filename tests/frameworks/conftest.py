"""The adapters of frameworks set options of jax, as the frameworks do."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _options_of_jax_come_back() -> Iterator[None]:
    before = dict(jax.config.values)
    yield
    for name, value in jax.config.values.items():
        if value != before[name]:
            jax.config.update(name, before[name])
