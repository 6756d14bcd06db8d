"""A dry run that says when it has what to show: a process of its own, run as a script.

It reads its search from its first argument, JSON, and prints a line of JSON for each table and one
at its end, with the time of the clock that all processes share. It runs with older versions of
automesh as well, which have told the first plan alone.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import automesh
from automesh.outcomes import Estimated
from automesh.report.progress import Silent


def say(**said: Any) -> None:
    print(json.dumps({"at": time.time(), **said}), flush=True)


class Watched(Silent):
    """Says of each table which plans it has."""

    def leader(self, text: str) -> None:
        """What older versions tell in the place of a table."""
        say(rows=[text.partition(" first of ")[0]], is_table=False)

    def ranking(self, so_far: Any) -> None:
        plans = [str(row.plan) for row in so_far.rows if not row.is_baseline]
        say(
            rows=plans,
            is_table=True,
            estimated=so_far.estimated,
            plans=so_far.plans,
            is_settled=getattr(so_far, "is_settled", False),
        )


def main() -> None:
    wanted = json.loads(sys.argv[1])
    found = automesh.search(wanted.pop("script"), dry_run=True, progress=Watched(), **wanted).found
    rows = [str(one.plan) for one in found.candidates if not one.is_baseline]
    estimates = {
        str(one.plan): one.outcome.step_s
        for one in found.candidates
        if isinstance(one.outcome, Estimated)
    }
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    say(
        rows=rows,
        is_table=True,
        is_end=True,
        estimates=estimates,
        cpu_s=sum(one.ru_utime + one.ru_stime for one in used),
        peak_mib=max(one.ru_maxrss for one in used) // 1024,
    )


if __name__ == "__main__":
    main()
