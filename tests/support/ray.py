"""A real Ray cluster of two nodes on this host: started and stopped by whoever uses it.

`pip install ray` is enough. It runs in a process of its own: Ray leaves threads, and warnings that
would be errors in a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from tests.support.worker_jobs import ROOT, TEST_MARK

IS_MISSING = find_spec("ray") is None
WHY_NOT = "Ray is not installed here: pip install 'jax-automesh[ray]'"
_END_S = 60.0
# The head is where the search runs; a line on stdin has the other node die, with all that it runs,
# and another one come.
_PROGRAM = """
import contextlib, sys
import psutil
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
for line in sys.stdin:
    lost = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for one in lost:
        with contextlib.suppress(psutil.Error):
            one.kill()
    print("gone", flush=True)
    node = cluster.add_node(num_cpus=1)
cluster.shutdown()
"""


class RayCluster:
    """A cluster that runs.

    Args:
      process: that has started it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line()

    def replace_node(self) -> None:
        """Kills the second node; returns once it is gone, while another one is being started."""
        assert self._process.stdin is not None
        self._process.stdin.write("replace\n")
        self._process.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise OSError("the Ray cluster does not start, or has ended")
        return line


@contextmanager
def ray_cluster() -> Generator[RayCluster]:
    """While the body runs, so do two nodes with one core each.

    Raises:
      OSError: they cannot be started.
    """
    environ = {**os.environ, "PYTHONPATH": ROOT, "RAY_USAGE_STATS_ENABLED": "0"}
    environ.pop(TEST_MARK, None)  # Its processes are not those of a test.
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        try:
            yield RayCluster(process)
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
