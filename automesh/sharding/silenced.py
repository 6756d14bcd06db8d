"""Removes findings that a comment at their line silences (no jax).

    x = x.reshape(4, -1, 512)  # automesh: allow microbatch-reshape

`# automesh: ignore[microbatch-reshape]` is the same. Several rules are separated by commas; without
any all findings of the line are silenced.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable

from automesh.cost.terms import Finding
from automesh.sharding.mlir.locations import files_called

_NAME = r"[a-z0-9]+(?:-[a-z0-9]+)+"
_COMMENT = re.compile(
    rf"#\s*automesh:\s*(?:ignore|allow)(?:\s*\[([^\]]*)\]|\s+({_NAME}(?:\s*,\s*{_NAME})*))?"
)


def not_silenced(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings that no comment at their line silences."""
    return tuple(finding for finding in findings if not _is_silenced(finding))


def _is_silenced(finding: Finding) -> bool:
    name, _, number = finding.source.rpartition(":")
    if not name or not number.isdecimal():
        return False
    lines = (linecache.getline(file, int(number)) for file in files_called(name))
    return any(silences(line, finding.rule) for line in lines)


def silences(line: str, rule: str) -> bool:
    """Whether a line of code has a comment that silences a rule.

    >>> silences("x = f(x)  # automesh: allow padding-waste, lost-donation", "lost-donation")
    True
    >>> silences("x = f(x)  # automesh: ignore[padding-waste]", "lost-donation")
    False
    """
    found = _COMMENT.search(line)
    if found is None:
        return False
    named = found.group(1) if found.group(1) is not None else found.group(2)
    return named is None or rule in (one.strip() for one in named.split(","))
