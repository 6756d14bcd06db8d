"""Which of several processes this one is: as jax itself would say, for each engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.launch import ranks
from automesh.launch.cluster import Cluster, ranked
from automesh.launch.ranks import Rank, devices_of, find_rank
from tests.support.cases import bad_inputs_run

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[001-015],host2",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_VERSION": "4.1.5",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "localhost,host-b"}
SLICES = {
    **TPU,
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "slurm": SLURM,
    "slurm, one name": {**SLURM, "SLURM_STEP_NODELIST": "node001"},
    "slurm, two names": {**SLURM, "SLURM_STEP_NODELIST": "node001,host2"},
    "slurm, numbers apart": {**SLURM, "SLURM_STEP_NODELIST": "node[001,007-015]"},
    "slurm, a port": {**SLURM, "JAX_COORDINATOR_PORT": "1234"},
    "mpi": MPI,
    "mpi, ipv6": {**MPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620::2]:43"},
    "tpu": TPU,
    "tpu, addresses": {"TPU_WORKER_ID": "0", "TPU_PROCESS_ADDRESSES": "localhost,host-b,host-c"},
    "tpu, slices": SLICES,
}
NAMES = sorted({name for one in ENVIRONMENTS.values() for name in one})
# What jax's own detection says of each; on a machine without TPUs it has to be told that it is one.
ASKS_JAX = """
import json, os, sys
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster, cluster
found = {}
cloud_tpu_cluster.get_tpu_env_value = lambda key: os.environ.get(key)
cloud_tpu_cluster.GceTpuCluster.is_env_present = classmethod(lambda cls: False)
for name, environ in json.load(sys.stdin).items():
    os.environ.update(environ)
    cloud_tpu_cluster.running_in_cloud_tpu_vm = name.startswith("tpu")
    cluster.running_in_cloud_tpu_vm = name.startswith("tpu")
    found[name] = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, 5)
    for key in environ:
        del os.environ[key]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def by_jax() -> dict[str, Any]:
    asked = subprocess.run(
        [sys.executable, "-c", ASKS_JAX],
        input=json.dumps(ENVIRONMENTS),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(asked.stdout)


def test_each_is_as_jax_detects_it(by_jax: dict[str, Any]) -> None:
    for name, environ in ENVIRONMENTS.items():
        rank = find_rank(environ)
        assert rank is not None
        local = None if rank.local is None else [rank.local]
        said = [f"{rank.host}:{rank.port}", rank.count, rank.number, local]
        assert said == by_jax[name], name


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {key: SLURM[key] for key in SLURM if key != "SLURM_STEP_NODELIST"},  # A batch script.
        {**SLURM, "SLURM_NTASKS": "x"},
        {**SLURM, "SLURM_NTASKS": "9" * 5000},
        {**SLURM, "SLURM_JOB_ID": ""},
        {**SLURM, "SLURM_STEP_NODELIST": ""},
        {**SLURM, "SLURM_PROCID": "16"},
        {**MPI, "OMPI_MCA_orte_hnp_uri": "x"},
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_ID": "x", "TPU_WORKER_HOSTNAMES": "a,b"},
        {"JAX_COORDINATOR_ADDRESS": "host:1"},
    ],
    ids=str,
)
def test_who_is_alone_or_cannot_be_told_is_none(environ: dict[str, str]) -> None:
    assert find_rank(environ) is None


def test_variables_of_jax_set_by_hand() -> None:
    environ = {
        "JAX_COORDINATOR_ADDRESS": "[fd00::1]:8476",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    }
    rank = find_rank(environ)
    assert rank is not None
    assert rank == Rank(number=3, count=4, host="fd00::1", port=8476)
    assert ranked(Cluster(), rank).listen == "[fd00::1]:8476"


class Metadata(BaseHTTPRequestHandler):
    """Of a TPU VM, as Google serves it."""

    values: Mapping[str, str] = {}

    def do_GET(self) -> None:
        value = self.values.get(self.path.rpartition("/")[2])
        is_right = self.headers["Metadata-Flavor"] == "Google" and value is not None
        self.send_response(200 if is_right else 404)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(ranks, "_has_chips", lambda: True)
        yield {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        server.shutdown()


@pytest.mark.parametrize("endpoints", ["host-a,host-b", "x:1:host-a,x:2:host-b"])
def test_a_tpu_vm_is_asked_for_its_number(
    metadata: dict[str, str], endpoints: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"agent-worker-number": "1", "worker-network-endpoints": endpoints}
    monkeypatch.setattr(Metadata, "values", values)
    assert find_rank(metadata) == Rank(number=1, count=2, host="host-a", port=8482)
    monkeypatch.setattr(
        Metadata,
        "values",
        {**values, "tpu-env": "A: 'b'\nMEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '2'\n"},
    )
    rank = find_rank(metadata)
    assert rank is not None
    assert (rank.number, rank.count) == (5, 6)
    assert find_rank({**metadata, "TPU_SKIP_MDS_QUERY": "1"}) is None
    monkeypatch.setattr(Metadata, "values", {})
    assert find_rank(metadata) is None


def test_each_takes_the_device_that_jax_would_give_it() -> None:
    rank = find_rank(SLURM)
    assert rank is not None
    assert devices_of(rank, {}) == {"JAX_LOCAL_DEVICE_IDS": "1"}
    assert devices_of(rank, {"JAX_LOCAL_DEVICE_IDS": "0,1"}) == {}
    alone = find_rank(TPU)
    assert alone is not None
    assert devices_of(alone, {}) == {}


def test_the_hosts_are_those_that_were_started() -> None:
    rank = find_rank(SLURM)
    assert rank is not None
    cluster = ranked(Cluster(listen="10.0.0.1:8600"), rank)
    assert (cluster.hosts, cluster.listen, cluster.is_everywhere) == (16, "10.0.0.1:8600", True)
    with pytest.raises(UsageError, match="process 3 of 16 that were started, and --hosts says 2"):
        ranked(Cluster(hosts=2), rank)


@pytest.mark.parametrize(("number", "target"), [(0, "cpu:4"), (1, "cpu:4"), (1, "cpu:4*3")])
def test_all_refuse_alike_what_cannot_be_searched(number: int, target: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(mesh): ...\n")
    variables = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": str(number)}
    ran = bad_inputs_run.run(["search", "train.py", "--target", target], tmp_path, variables)
    assert ran.code == 2
    wanted = {
        "cpu:4": "error: target `cpu:4` is searched on this host alone\n",
        "cpu:4*3": "error: 3 processes of target `cpu:4*3` cannot be spread evenly over 2 hosts\n",
    }
    assert ran.stderr.startswith(wanted[target])


@pytest.mark.parametrize("number", [0, 1])
def test_a_calibration_is_joined_as_a_search_is(number: int, tmp_path: Path) -> None:
    variables = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": str(number)}
    ran = bad_inputs_run.run(["calibrate", "--target", "cpu:4*3"], tmp_path, variables)
    assert ran.code == 2
    assert ran.stderr.startswith("error: 3 processes of target `cpu:4*3` cannot be spread evenly")
    ran = bad_inputs_run.run(["calibrate", "--target", "cpu:4*2"], tmp_path, variables)
    assert ran.code == 2
    assert ran.stderr.startswith("error: no token is set, and a search needs one\n")


def test_without_a_token_nobody_serves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(mesh): ...\n")
    variables = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    ran = bad_inputs_run.run(["search", "train.py", "--target", "cpu:4*2"], tmp_path, variables)
    assert ran.code == 2
    assert ran.stderr.startswith("error: no token is set, and a search needs one\n")
