"""Every test sees 16 virtual CPU devices; set before anything can import jax."""

import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.paths import ROOT, TESTS
from tests.support.plugins import WITHOUT, is_installed

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ.pop("XLA_FLAGS", None)
# What somebody has calibrated on this machine is none of a test's business.
os.environ["AUTOMESH_PROFILES"] = str(TESTS / "no-profiles")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several processes of these tests compile for TPUs that are not here, which is no use of one.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for any command in the background: what the tests start would ignore their Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast an example runs says nothing on a machine that does other work: speed is a benchmark's.
settings.register_profile("automesh", settings(), deadline=None)
settings.load_profile("automesh")

# What compiles for devices that are not here, by the marker of the tests that need it.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a compiler or a plug-in that is not here; makes cases slow."""
    _mark_later_cases_slow(items)
    for marker, modules in _COMPILERS.items():
        if not any(map(importlib.util.find_spec, modules)):
            skip = pytest.mark.skip(reason=f"needs `pip install 'jax-automesh[{marker}]'`")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)
    for item in items:
        for mark in item.iter_markers("plugin"):
            if not is_installed(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=WITHOUT[mark.args[0]]))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The tests of a plug-in that is not installed cannot be imported."""
    of_plugin = collection_path.parent == ROOT / "plugins" and collection_path.name in WITHOUT
    return True if of_plugin and not is_installed(collection_path.name) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says whose tests were left out."""
    for name, why in WITHOUT.items():
        if not is_installed(name):
            terminalreporter.write_line(f"left out: the tests of plugins/{name}; {why}")


def _mark_later_cases_slow(items: list[pytest.Item]) -> None:
    """Runs before pytest selects by `-m`, so that `slow` selects what it marks here."""
    cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("slow_after")
        if marker is None or item.get_closest_marker("long"):
            continue
        test, _, _ = item.nodeid.partition("[")
        if cases[test] >= marker.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[test] += 1


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What somebody has compiled on this machine is none of a test's business either."""
    os.environ["AUTOMESH_CACHE"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def _options_of_jax_come_back() -> Iterator[None]:
    """What a test sets for the whole process, or a framework that it runs, holds for no other.

    A module imports jax before its tests, so that what it was set to is known.
    """
    before = _options_of_jax()
    yield
    for name, value in _options_of_jax().items():
        if value != before.get(name, value):
            sys.modules["jax"].config.update(name, before[name])


def _options_of_jax() -> dict[str, Any]:
    """Nothing before jax is imported."""
    jax: Any = sys.modules.get("jax")
    return dict(jax.config.values) if jax is not None else {}
