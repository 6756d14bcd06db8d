"""What takes long to make, made by the first of pytest's worker processes that asks for it.

A fixture of a module is made again in every worker process that gets one of its tests, and a worker
that has nothing left to do takes over single tests of any module.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """Calls `make` in the first process of this run that asks for `name`; others wait for it.

    Args:
      name: what is made; one name for each value in a run.
      make: takes an empty folder, and returns a value that JSON can hold. If it raises, the next
        one that asks calls it again.

    Returns:
      The folder, which tests only read, and the value.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = shared / "made_once" / re.sub(r"[^\w.-]", "-", name)
    place.parent.mkdir(exist_ok=True)
    with FileLock(f"{place}.lock"):
        value = Path(f"{place}.json")
        if not value.exists():
            number = len(list(place.parent.glob(f"{place.name}.folder*")))
            folder = Path(f"{place}.folder{number}")
            folder.mkdir()
            made = make(folder)
            value.write_text(json.dumps({"folder": str(folder), "value": made}))
        found = json.loads(value.read_text())
    return Path(found["folder"]), found["value"]
