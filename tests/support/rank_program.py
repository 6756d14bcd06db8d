"""A search without jax, started several times alike: number 0 runs a gang of all, and prints."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from automesh.hardware import parse_target
from automesh.launch.agent import serve_search
from automesh.launch.cluster import Cluster, ranked, spread, workers_of
from automesh.launch.ranks import find_rank
from automesh.report.progress import Silent
from automesh.worker.pool import Pool
from tests.support.worker_jobs import answer_of, job, surroundings

LIMIT_BYTES = 400 * 2**20


@dataclass(frozen=True)
class Request:
    cluster: Cluster
    memory_limit_bytes: int = LIMIT_BYTES


def main() -> None:
    rank = find_rank(os.environ)
    assert rank is not None
    cluster = ranked(Cluster(listen=sys.argv[1] if sys.argv[1:] else ""), rank)
    target = spread(parse_target(f"cpu:1*{rank.count}", os.environ), cluster)
    if rank.number:
        serve_search(cluster.listen, wait_s=60)
        return
    with (
        workers_of(Request(cluster), target, Silent()) as start,
        tempfile.TemporaryDirectory() as folder,
        Pool(
            size=1,
            surroundings=surroundings(),
            log_dir=Path(folder),
            memory_limit_bytes=LIMIT_BYTES,
            handler="tests.support.handlers.in_gang",
            start=start,
        ) as pool,
    ):
        found = answer_of(pool.run(job("agree", "all"), 60))
        sys.stdout.write(f"fingerprint {found.fingerprint}\n")


if __name__ == "__main__":
    main()
