"""What runs a search in Kubernetes: valid by schema, without secrets, with the right devices."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.launch.cluster import Cluster, spread
from automesh.launch.engines import jobset
from automesh.launch.engines.jobset import Placing, jobset_of, name_of, pods_of
from tests.support.cases import bad_inputs_run
from tests.support.paths import GOLDEN, ROOT

TARGETS = {
    "tpu-v5litepod-16": "jobset_tpu.yaml",
    "gpu-h100-16": "jobset_gpu.yaml",
    "cpu:4*2": "jobset_cpu.yaml",
}
SCRIPT = "def build(mesh): ...\n"
PLACE = ("--launch", "kubernetes", "--image", "registry/train:1", "--volume", "team:/work")


def check(found: dict[str, Any]) -> None:
    """As `kubectl apply --validate=strict` does: unknown fields are refused."""
    jsonschema: Any = pytest.importorskip("jsonschema", reason="it comes with the extra `test`")
    kubernetes: Any = pytest.importorskip("kubernetes_validate", reason="of the extra `test`")
    schema = json.loads((ROOT / "tests" / "data" / "jobset.schema.json").read_text())
    jsonschema.validate(found, schema)
    for group in found["spec"]["replicatedJobs"]:
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x", **group["template"].get("metadata", {})},
            "spec": group["template"]["spec"],
        }
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)


def written(folder: Path, target: str, *more: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    words = ["search", "train.py", "--target", target, "--budget", "30m", *PLACE]
    ran = bad_inputs_run.run([*words, "--write", "jobset.yaml", *more], folder)
    assert (ran.code, ran.stdout) == (0, ""), ran
    wanted = "jobset.yaml is written; start it: kubectl apply --filename jobset.yaml\n"
    assert ran.stderr == wanted
    return (folder / "jobset.yaml").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_as_it_was_looked_at_and_valid(target: str, tmp_path: Path) -> None:
    text = written(tmp_path, target, "--", "--data", "$(HOME)/x")
    kept = GOLDEN / "launch" / TARGETS[target]
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text)
        pytest.fail(f"{kept} was not there and is written now: read it")
    assert text == kept.read_text()
    check(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"replicas": "two"}, "'two' is not of type"),
        ({"replica": 2}, "'replica' was unexpected"),
        ({"template": {"spec": {"template": {"spec": {"container": []}}}}}, "container"),
    ],
)
def test_the_check_sees_what_is_wrong(change: dict[str, Any], word: str) -> None:
    found = jobset_of("a", ["search", "train.py"], pods("cpu:4*2"), PLACING)
    found["spec"]["replicatedJobs"][1].update(change)
    with pytest.raises(Exception, match=word):
        check(found)


PLACING = Placing(image="registry/train:1", claim="team", path="/work")


def pods(target: str, **cluster: Any) -> jobset.Pods:
    return pods_of(parse_target(target, {}), Cluster(**cluster))


@pytest.mark.parametrize(
    ("target", "jobs", "hosts", "resources", "topology"),
    [
        ("tpu-v5litepod-16", 1, 4, {"google.com/tpu": "4"}, "4x4"),
        ("tpu-v5litepod-16-2", 2, 4, {"google.com/tpu": "4"}, "4x4"),
        ("tpu-v5litepod-8-2", 2, 1, {"google.com/tpu": "8"}, "2x4"),
        ("tpu-v5p-128", 1, 16, {"google.com/tpu": "4"}, "4x4x4"),
        ("tpu-7x-16", 1, 2, {"google.com/tpu": "4"}, "2x2x2"),
        ("gpu-h100-16", 2, 1, {"nvidia.com/gpu": "8"}, ""),
    ],
)
def test_pods_have_what_a_host_has(
    target: str, jobs: int, hosts: int, resources: dict[str, str], topology: str
) -> None:
    found = pods(target)
    assert (found.jobs, found.hosts, found.resources) == (jobs, hosts, {"limits": resources})
    assert found.selector.get("cloud.google.com/gke-tpu-topology", "") == topology
    assert found.exclusive == (hosts > 1)


def test_virtual_devices_have_cores_and_are_named_in_the_pod() -> None:
    found = pods("cpu:4*4", hosts=2)
    assert (found.count, found.resources) == (2, {"requests": {"cpu": "8"}})


def test_the_command_in_the_pod_is_one_that_runs_there(tmp_path: Path) -> None:
    (text,) = (written(tmp_path, "tpu-v5litepod-16", "--top", "4"),)
    search, agents = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = search["template"]["spec"]["template"]["spec"]["containers"]
    words = [one.replace("$(POD_IP)", "10.0.0.1") for one in container["args"]]
    assert words == [
        *("search", "train.py", "--budget", "30m", "--top", "4"),
        *("--hosts", "4", "--listen", "10.0.0.1:8600", "--wait", "1h"),
    ]
    cluster = Cluster(hosts=4, listen="10.0.0.1:8600")
    assert spread(parse_target("local", {"JAX_PLATFORMS": "tpu"}), cluster).processes == 4
    (agent,) = agents["template"]["spec"]["template"]["spec"]["containers"]
    assert agent["args"][:2] == ["agent", "automesh-train-search-0-0.automesh-train:8600"]


def test_agents_in_pods_trust_what_the_search_names(tmp_path: Path) -> None:
    more = ("--certificate", "search.pem", "--key", "search.key", "--ca", "$(x)/ca.pem")
    text = written(tmp_path, "cpu:4*2", *more)
    check(yaml.safe_load(text))
    search, agents = (
        group["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        for group in yaml.safe_load(text)["spec"]["replicatedJobs"]
    )
    assert agents[-2:] == ["--ca", "$$(x)/ca.pem"]
    assert search[search.index("--certificate") :][:4] == [*more[:4]]


def test_no_secret_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMESH_TOKEN", "a" * 32)
    monkeypatch.setenv("AUTOMESH_STORAGE_PASSWORD", "b" * 32)
    text = written(tmp_path, "cpu:4*2", "--storage", "postgresql://me@host/db")
    assert "a" * 32 not in text
    assert "b" * 32 not in text
    for name in ("search", "agents"):
        group = {one["name"]: one for one in yaml.safe_load(text)["spec"]["replicatedJobs"]}[name]
        (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
        token = next(one for one in container["env"] if one["name"] == "AUTOMESH_TOKEN")
        reference = {"secretKeyRef": {"name": "automesh-token", "key": "token"}}
        assert token == {"name": "AUTOMESH_TOKEN", "valueFrom": reference}


@pytest.mark.parametrize("more", [("--apply",), ("--image", "x"), ("--volume", "x:/y")])
def test_what_is_for_kubernetes_alone_is_refused(more: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = bad_inputs_run.run(["search", "train.py", *more], tmp_path)
    assert ran.code == 2
    assert f"error: {more[0]} is for a search in a Kubernetes cluster\n" in ran.stderr


def test_a_name_that_kubernetes_takes() -> None:
    assert name_of("examples/dense_lm.py:build") == "automesh-dense-lm"
    assert name_of("Über-Training.py") == "automesh-ber-training"
    assert len(name_of("x" * 300)) <= 40


def kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A kubectl of ours, in front of any other."""
    one = folder / "bin" / "kubectl"
    one.parent.mkdir()
    one.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    one.chmod(one.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(one.parent), prepend=os.pathsep)


def test_apply_gives_the_file_to_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(tmp_path, monkeypatch, "print('created', sys.argv[1:])")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["search", "train.py", "--target", "cpu:4*2", *PLACE, "--write", "j.yaml", "--apply"]
    ran = bad_inputs_run.run(words, tmp_path)
    assert ran.code == 0
    assert ran.stderr.splitlines() == [
        "created ['apply', '--filename=j.yaml']",
        "follow it: kubectl logs --follow job/automesh-train-search-0",
    ]


def test_what_kubectl_refuses_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl(tmp_path, monkeypatch, "sys.exit('no matches for kind \"JobSet\"')")
    with pytest.raises(UsageError, match=r'refuses `x\.yaml`: no matches for kind "JobSet"'):
        jobset.apply(Path("x.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="`kubectl` is not installed here"):
        jobset.apply(Path("x.yaml"))


def test_the_guide_shows_what_is_written() -> None:
    guide = (ROOT / "docs" / "clusters.md").read_text()
    example = guide.partition("```yaml\n")[2].partition("```")[0]
    kept = (GOLDEN / "launch" / TARGETS["tpu-v5litepod-16"]).read_text()
    for block in re.split(r"(?=^ +nodeSelector)", example, flags=re.MULTILINE):
        assert block in kept
