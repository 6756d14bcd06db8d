"""Kubernetes: writes a search and its agents as a JobSet into a file, and applies it on request.

A JobSet (jobset.sigs.k8s.io) is a group of Jobs that start, fail and end together. The search is
one Job of one pod; the agents are one Job for each slice or node, with one pod for each host, as
GKE requires for TPUs. Kubernetes places, restarts and cancels the pods; all pods mount the volume
that holds the study, so a restarted search goes on.

Fields and their meaning: `jobset.x-k8s.io/v1alpha2`, kubernetes-sigs/jobset at 08dfbdf (2026-08);
labels and resources of TPUs: Google's pages on TPUs in GKE; the annotation for one slice to a node
pool: jobset's own documentation.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from automesh.errors import UsageError, unwritable
from automesh.files import write_whole
from automesh.hardware import Absent, Target
from automesh.hardware.slices import generation_called
from automesh.launch.cluster import Cluster, hosts_for
from automesh.texts.terminal import clean
from automesh.worker.environment import TOKEN

PORT = 8600
TOKEN_SECRET = ("automesh-token", "token")
"""Name and key of the Secret that holds the token of search and agents."""
PASSWORD_SECRET = ("automesh-storage", "password")
"""Name and key of the Secret that may hold the password of --storage."""
_PASSWORD = "AUTOMESH_STORAGE_PASSWORD"
_WAIT = "1h"  # The cloud may have to add and boot nodes first.
_RESTARTS = 3
_KUBECTL_S = 120.0
_MOST_NAME_CHARS = 40  # Names have 63 at most: JobSet adds the name of the job, and two numbers.
# A reference to an image: registry, path, tag or digest (distribution's grammar, without spaces).
_IMAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:@-]{0,510}[A-Za-z0-9])?")
_CLAIM = re.compile(
    r"(?P<claim>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[^\0-\x1f:]{0,200})"
)
# Exit codes of a search that would fail again if it were restarted.
_FINAL_CODES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods that have the devices of a target.

    Attributes:
      jobs: number of slices or nodes, one Job each.
      hosts: hosts of each job, one pod each.
      resources: `limits` and `requests` of one pod.
      selector: labels of the nodes that the pods run on.
      shared_memory: whether they need more than the 64 MB that a pod has by default.
      exclusive: whether each job must have a node pool of its own.
    """

    jobs: int
    hosts: int
    resources: Mapping[str, Mapping[str, str]]
    selector: Mapping[str, str]
    shared_memory: bool = False
    exclusive: bool = False

    @property
    def count(self) -> int:
        """Number of all pods."""
        return self.jobs * self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The place where the pods of a JobSet run: image and volume, as the user gives them.

    Attributes:
      image: container image with Python, automesh, jax and all that the script imports.
      claim: PersistentVolumeClaim that all pods mount.
      path: where it is mounted; the pods' working folder, with the script and the results.
    """

    image: str
    claim: str
    path: str


def read_placing(image: str, volume: str) -> Placing:
    """Reads `--image` and `--volume CLAIM:PATH`.

    Raises:
      UsageError: one is missing or malformed.
    """
    if not image:
        raise UsageError(
            "a JobSet needs an image for its pods",
            hint="name one that has automesh and what the script imports: --image IMAGE",
        )
    if not _IMAGE.fullmatch(image):
        raise UsageError(
            f"--image: `{image}` is not the name of an image",
            hint="write for example `europe-docker.pkg.dev/me/repo/train:2026-11`",
        )
    if not volume:
        raise UsageError(
            "a JobSet needs a volume that all its pods mount: without one the study is lost with "
            "its pod",
            hint="name a PersistentVolumeClaim and where the pods mount it: --volume team:/work",
        )
    found = _CLAIM.fullmatch(volume)
    if found is None:
        raise UsageError(
            f"--volume: `{volume}` is not the name of a claim and a path",
            hint="write for example `--volume team:/work`",
        )
    return Placing(image=image, claim=found["claim"], path=found["path"])


def pods_of(target: Target, cluster: Cluster) -> Pods:
    """Returns the pods that a target needs.

    Raises:
      UsageError: the target does not name its devices, or has a single host.
    """
    if target.absent is not None:
        pods = _pods_of_devices(target.absent)
        if cluster.hosts not in (0, pods.count):
            raise UsageError(
                f"target `{target.name}` is {pods.count} hosts, and --hosts says {cluster.hosts}",
                hint="leave `--hosts` out",
            )
    elif target.selector:
        hosts = hosts_for(target, cluster)
        cores = str(target.cpu_devices * target.processes // hosts)
        pods = Pods(jobs=hosts, hosts=1, resources={"requests": {"cpu": cores}}, selector={})
    else:
        raise UsageError(
            "`local` does not say which nodes of the cluster are meant",
            hint="name the devices: `--target tpu-v5litepod-16`, `--target gpu-h100-16`",
        )
    if pods.count < 2:
        raise UsageError(
            f"target `{target.name}` is one host, which a pod with `automesh search` serves alone",
            hint="name a larger one, such as `tpu-v5litepod-16`, `gpu-h100-16` or `cpu:4*2`",
        )
    return pods


def _pods_of_devices(absent: Absent) -> Pods:
    fabric = absent.fabric
    jobs = fabric.num_granules
    hosts = max(absent.num_hosts // jobs, 1)
    chips = fabric.granule_devices // fabric.devices_per_chip // hosts
    if absent.platform == "gpu":
        maker = "amd.com" if fabric.chip.name.startswith("AMD") else "nvidia.com"
        limits = {f"{maker}/gpu": str(chips)}
        return Pods(
            jobs=jobs, hosts=hosts, resources={"limits": limits}, selector={}, shared_memory=True
        )
    generation = generation_called(fabric.chip.slug)
    if generation is None:
        raise UsageError(
            f"the name of nodes with {fabric.chip.name} in GKE is not known",
            hint="name a TPU of `automesh targets tpu`",
        )
    return Pods(
        jobs=jobs,
        hosts=hosts,
        resources={"limits": {"google.com/tpu": str(chips)}},
        selector={
            "cloud.google.com/gke-tpu-accelerator": generation.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, fabric.torus)),
        },
        exclusive=hosts > 1,
    )


def name_of(script: str) -> str:
    """Returns a name that Kubernetes takes: `automesh-train` for `some/train.py:build`."""
    stem = Path(script.partition(":")[0]).stem or "search"
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "search"
    return f"automesh-{plain}"[:_MOST_NAME_CHARS].rstrip("-")


def jobset_of(
    name: str, words: Sequence[str], pods: Pods, placing: Placing, *, ca: str = ""
) -> dict[str, Any]:
    """Returns the JobSet of a search.

    Args:
      name: name of the JobSet; see `name_of`.
      words: the words after `automesh` in the search command, without the options about hosts.
      ca: file in the pods with the certificates that agents trust; empty for no encryption.
    """
    place = ["--hosts", str(pods.count), "--listen", f"$(POD_IP):{PORT}", "--wait", _WAIT]
    # Before `--`: all words after it belong to the script.
    at = words.index("--") if "--" in words else len(words)
    search_args = [*map(_plain, words[:at]), *place, *map(_plain, words[at:])]
    search = _container(
        "search",
        search_args,
        placing,
        {"requests": {"cpu": "2", "memory": "4Gi"}},
        env=[
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": _PASSWORD, "valueFrom": _secret(PASSWORD_SECRET, optional=True)},
        ],
    )
    search["ports"] = [{"containerPort": PORT, "name": "agents"}]
    address = f"{name}-search-0-0.{name}:{PORT}"
    trust = ["--ca", _plain(ca)] if ca else []
    agent_args = ["agent", address, "--wait", _WAIT, *trust]
    agent = _container("agent", agent_args, placing, pods.resources)
    agent_pod = _pod(agent, placing)
    if pods.selector:
        agent_pod["nodeSelector"] = dict(pods.selector)
    if pods.shared_memory:
        agent["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
        memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        agent_pod["volumes"].append(memory)
    agents: dict[str, Any] = {"spec": _job(pods.hosts, agent_pod)}
    if pods.exclusive:
        pool = "cloud.google.com/gke-nodepool"
        agents["metadata"] = {"annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": pool}}
    final = {"containerName": "search", "operator": "In", "values": list(_FINAL_CODES)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "automesh"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["search"]},
            "failurePolicy": {
                "maxRestarts": _RESTARTS,
                "rules": [
                    {
                        "name": "refused",
                        "action": "FailJobSet",
                        "targetReplicatedJobs": ["search"],
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": "search",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            **_job(1, _pod(search, placing)),
                            "podFailurePolicy": {
                                "rules": [{"action": "FailJob", "onExitCodes": final}]
                            },
                        }
                    },
                },
                {"name": "agents", "replicas": pods.jobs, "template": agents},
            ],
        },
    }


def _plain(word: str) -> str:
    """Returns a word escaped so that Kubernetes passes it on unchanged: it would expand
    `$(NAME)`."""
    return word.replace("$(", "$$(")


def _secret(of: tuple[str, str], *, optional: bool = False) -> dict[str, Any]:
    name, key = of
    found: dict[str, Any] = {"name": name, "key": key}
    return {"secretKeyRef": {**found, "optional": True} if optional else found}


def _container(
    name: str,
    args: Sequence[str],
    placing: Placing,
    resources: Mapping[str, Mapping[str, str]],
    *,
    env: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    return {
        "name": name,
        "image": placing.image,
        "command": ["automesh"],
        "args": list(args),
        "workingDir": placing.path,
        "env": [{"name": TOKEN, "valueFrom": _secret(TOKEN_SECRET)}, *env],
        "resources": {kind: dict(values) for kind, values in resources.items()},
        "volumeMounts": [{"name": "work", "mountPath": placing.path}],
    }


def _pod(container: dict[str, Any], placing: Placing) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        # Nothing here calls Kubernetes, so the user's script gets no access to it.
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": placing.claim}},
        ],
    }


def _job(hosts: int, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # Only the JobSet as a whole is restarted.
        "template": {"spec": pod},
    }


def text_of(jobset: dict[str, Any]) -> str:
    """Renders a JobSet as YAML."""
    secret, key = TOKEN_SECRET
    head = (
        "# A search by automesh, and its agents (docs/clusters.md). The token is a Secret:\n"
        f"#   openssl rand -hex 32 > token\n"
        f"#   kubectl create secret generic {secret} --from-file={key}=token\n"
    )
    return head + yaml.safe_dump(jobset, sort_keys=False, width=1000)


def write(jobset: dict[str, Any], path: Path) -> None:
    """Writes a JobSet into a file.

    Raises:
      UsageError: it cannot be written.
    """
    try:
        write_whole(path, text_of(jobset))
    except OSError as error:
        raise unwritable(path, error, hint="name another file with --write") from None


def apply(path: Path) -> str:
    """Runs `kubectl apply` on a file.

    Returns:
      Its output.

    Raises:
      UsageError: there is no kubectl, or it fails.
    """
    try:
        done = subprocess.run(
            ["kubectl", "apply", f"--filename={path}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_KUBECTL_S,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            "`kubectl` is not installed here",
            hint=f"leave `--apply` out, and run `kubectl apply -f {path}` where it is",
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"`kubectl apply` has not ended within {_KUBECTL_S:.0f} s") from None
    said = [clean(line) for line in (done.stdout + done.stderr).strip().splitlines()]
    if done.returncode:
        last = said[-1] if said else "it does not say why"
        raise UsageError(
            f"`kubectl apply` refuses `{path}`: {last}",
            hint="`kubectl config current-context` says which cluster it speaks to",
        )
    return "\n".join(said)
