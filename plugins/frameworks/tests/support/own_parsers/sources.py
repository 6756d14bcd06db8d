"""Single files and single definitions of an installed framework."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def file_of(package: str, path: str) -> Path | None:
    """A file of an installed package; None if there is none. Nothing is imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(folder) / path).is_file():
            return found
    return None


def module_of(package: str, path: str) -> ModuleType:
    """A file as a module of its own, without the `__init__` of the packages above it.

    Raises:
      LookupError: it is not installed.
    """
    file = file_of(package, path)
    if file is None:
        raise LookupError(f"{package} has no {path}")
    name = ".".join([package, *Path(path).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def parts_of(
    package: str, path: str, names: Iterable[str], known: dict[str, Any], *, lazy: bool = True
) -> SimpleNamespace:
    """Definitions of a file alone: a function, a class, or methods of a class as `Class.method`.

    Args:
      known: what the definitions take from their module's imports.
      lazy: annotations are not evaluated, so that `known` need not have them.

    Raises:
      LookupError: the file has no such definition.
    """
    file = file_of(package, path)
    if file is None:
        raise LookupError(f"{package} has no {path}")
    wanted = set(names)
    kept: list[ast.stmt] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
            wanted.discard(node.name)
            kept.append(node)
        elif isinstance(node, ast.ClassDef):
            methods = [
                one
                for one in node.body
                if isinstance(one, ast.FunctionDef) and f"{node.name}.{one.name}" in wanted
            ]
            if methods:
                wanted -= {f"{node.name}.{one.name}" for one in methods}
                # Its bases would bring in the whole of the framework.
                node.bases, node.decorator_list, node.body = [], [], list(methods)
                kept.append(node)
    if wanted:
        raise LookupError(f"{file} has no {', '.join(sorted(wanted))}")
    if lazy:
        kept.insert(0, ast.parse("from __future__ import annotations").body[0])
    found = dict(known)
    exec(compile(ast.Module(kept, []), str(file), "exec", dont_inherit=True), found)
    return SimpleNamespace(**{name: value for name, value in found.items() if name.isidentifier()})


class Devices:
    """As many devices as are said, of which one for each granule exists."""

    def __init__(self, count: int, granules: int) -> None:
        self._count = count
        self._firsts = [SimpleNamespace(slice_index=index) for index in range(granules)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> SimpleNamespace:
        return self._firsts[index]

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self._firsts)


def jax_with(devices: Devices) -> Any:
    """What a framework asks jax for before it makes a mesh, on devices that are not there."""
    return SimpleNamespace(
        devices=lambda backend=None: devices,
        device_count=lambda backend=None: len(devices),
        local_device_count=lambda backend=None: len(devices),
        process_count=lambda: 1,
        default_backend=lambda: "tpu",
    )
