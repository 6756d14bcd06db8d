"""Fetches the JavaScript that the HTML report carries, as npm has it, unchanged.

    python -m tests.regenerate.vendor_scripts [--check]

It needs `npm` and a connection. With `--check` nothing is written, and a file that differs is an
error. To take newer versions, change `PACKAGES`, and the table in the folder's README.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

FOLDER = ROOT / "automesh" / "report" / "html" / "static" / "vendor"
PACKAGES = (("vega", "6.4.0"), ("vega-lite", "6.4.3"), ("vega-embed", "7.3.0"))


def published(package: str, version: str) -> bytes:
    """The minified file of a package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as opened:
            member = opened.extractfile(f"package/build/{package}.min.js")
            assert member is not None
            return member.read()


def main() -> None:
    differing: list[str] = []
    for package, version in PACKAGES:
        path, content = FOLDER / f"{package}.min.js", published(package, version)
        if path.read_bytes() != content:
            differing.append(path.name)
        if "--check" not in sys.argv[1:]:
            path.write_bytes(content)
    if differing and "--check" in sys.argv[1:]:
        sys.exit(f"not as published: {', '.join(differing)}")


if __name__ == "__main__":
    main()
