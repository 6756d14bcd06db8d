"""Certificates that a test makes for itself, with the command `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = "DNS:localhost,IP:127.0.0.1"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, PEM files."""

    certificate: Path
    key: Path


def authority(folder: Path, name: str = "authority") -> Pair:
    """A certificate that signs others; skips the test where there is no `openssl`."""
    pair = Pair(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    subject = ("-days", "2", "-subj", f"/CN={name}")
    out = ("-keyout", str(pair.key), "-out", str(pair.certificate))
    _openssl("req", "-x509", *_NEW_KEY, *out, *subject)
    return pair


def signed(by: Pair, name: str = "search", *, names: str = HERE, days: int = 2) -> Pair:
    """A certificate that an authority has signed.

    Args:
      names: that it is for, as `subjectAltName` has them.
      days: that it is valid; -1 for one that has expired.
    """
    folder = by.certificate.parent
    pair = Pair(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    request, extension = folder / f"{name}.csr", folder / f"{name}.ext"
    extension.write_text(f"subjectAltName={names}")
    _openssl(
        *("req", *_NEW_KEY, "-keyout", str(pair.key), "-out", str(request)),
        *("-subj", f"/CN={name}"),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-out", str(pair.certificate)),
        *("-CA", str(by.certificate), "-CAkey", str(by.key), "-CAcreateserial"),
        *("-days", str(days), "-extfile", str(extension)),
    )
    return pair


def _openssl(*words: str) -> None:
    try:
        subprocess.run(["openssl", *words], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no openssl to make a certificate with: {error}")
