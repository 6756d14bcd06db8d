"""What the installed MaxText takes, read from its files: importing it would import jax."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from automesh.errors import UsageError

_KEY = re.compile(r"^([A-Za-z]\w*):", re.MULTILINE)
_FIELD = re.compile(r"^  (\w+): [^\n]*= Field\(", re.MULTILINE)
_PACKAGES = ("maxtext", "jax", "libtpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A MaxText.

    Attributes:
      keys: of its configuration.
      models: whose sizes it has.
      versions: of packages that make the program.
    """

    keys: frozenset[str]
    models: frozenset[str]
    versions: dict[str, str]


def find_installed() -> Installed:
    """Looks at the MaxText of this environment.

    Raises:
      UsageError: there is none, or it is laid out otherwise.
    """
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "MaxText is not installed in this environment",
            hint="install it as the head of plugins/frameworks/tests/steps/test_real_maxtext.py "
            "says, or take "
            "`--summary` for the figures of what is kept",
        )
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return read_installed(Path(spec.submodule_search_locations[0]) / "configs", versions)


def read_installed(configs: Path, versions: dict[str, str]) -> Installed:
    """Reads MaxText's folder of configurations.

    Raises:
      UsageError: there is no `base.yml` in it.
    """
    base = configs / "base.yml"
    if not base.is_file():
        raise UsageError(
            f"`{base}` is not there: this MaxText is laid out otherwise",
            hint="install maxtext 0.2.5, with which the adapter was tried",
        )
    keys = set(_KEY.findall(base.read_text("utf-8")))
    if (types := configs / "types.py").is_file():
        keys.update(_FIELD.findall(types.read_text("utf-8")))
    models = {path.stem for path in (configs / "models").rglob("*.yml")}
    return Installed(keys=frozenset(keys), models=frozenset(models), versions=versions)
