"""The hosts of a search: how many agents it needs, what starts them, and how its workers start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.hlo.store import ModuleStore, default_store
from automesh.launch.facts import joined_address
from automesh.launch.launcher import Launcher
from automesh.launch.ranks import Rank
from automesh.launch.wire import check_address
from automesh.options.option import read_values
from automesh.options.table import HOSTS
from automesh.worker.process import Process, StartWorker

if TYPE_CHECKING:
    from automesh.launch.fleet import Fleet
    from automesh.launch.lending import Lender

LAUNCHERS = ("local", "slurm", "ray", "kubernetes")
ENGINES = ("slurm", "ray")
"""Names of the launchers that start agents on other hosts while the search runs on this one."""
_WAIT_LOCAL_S = 120.0  # Local agents: they import half of automesh, maybe on a busy machine.
_WAIT_S = 300.0  # People start the agents by hand.
_WAIT_ENGINE_S = 86400.0  # The job may wait in a queue.
_LOOPBACK = "127.0.0.1"
MAX_PROCESSES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The user's choice of the hosts that a search runs on.

    Attributes:
      launch: what starts the agents, one of `LAUNCHERS`; empty if nothing or the usual one does.
      hosts: agents; 0 for one, or as many as the target has processes.
      processes_per_host: how many processes the agent of a host starts, each with its share of the
        devices; 0 for one, or for the target's processes divided by the hosts.
      listen: address, with or without a port, that agents dial; empty for this host alone.
      wait_s: how long to wait for the agents; 0 for the usual time.
      is_everywhere: the same command runs on every host; see `automesh.launch.ranks`.
      certificate, key: PEM files of the search, for an encrypted channel; empty for none.
      ca: PEM file with the certificates that the agents trust; it has this path on all hosts.
    """

    launch: str = ""
    hosts: int = 0
    processes_per_host: int = 0
    listen: str = ""
    wait_s: float = 0.0
    is_everywhere: bool = False
    certificate: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise UsageError(
                "--certificate and --key are given together, or neither of them",
                hint="both are PEM files of this search: its certificate, and the key to it",
            )
        if self.ca and not self.certificate:
            raise UsageError(
                "--ca says which certificates agents trust, and this search has no --certificate",
                hint="give --certificate and --key as well; or leave --ca out",
            )
        is_by_hand = self.listen and not self.launch and not self.is_everywhere
        if self.certificate and not self.ca and not is_by_hand:
            raise UsageError(
                "the agents of this search are started for you, and need a --ca to trust its "
                "--certificate",
                hint="give the certificate that signed it, or that certificate itself",
            )
        if self.launch and self.launch not in LAUNCHERS:
            raise UsageError(
                f"--launch: `{self.launch}` is not a launcher",
                hint=f"there is: {', '.join(LAUNCHERS)}",
            )
        if self.listen:
            check_address(self.listen, port_needed=False)
        if self.launch in ("local", "kubernetes") and self.listen:
            raise UsageError(
                f"`--launch {self.launch}` knows where the agents reach the search, and --listen "
                "was given",
                hint="leave `--listen` out; or leave `--launch` out and start `automesh agent` on "
                "each host",
            )

    @property
    def is_asked(self) -> bool:
        """Whether the user has given any option about hosts."""
        return bool(self.launch or self.hosts or self.processes_per_host or self.listen)


ALONE = Cluster()


class ClusterOptions(TypedDict, total=False):
    """The fields of a `Cluster` as options of the command line and of the Python interface."""

    launch: str
    hosts: int
    processes_per_host: int
    listen: str
    wait: str
    certificate: str | Path
    key: str | Path
    ca: str | Path


def cluster_of(options: ClusterOptions, spelled: Callable[[str], str] = str) -> Cluster:
    """Checks the hosts that a user asks for.

    Args:
      spelled: gives the user's spelling of an option: `--wait` for `wait`.

    Raises:
      UsageError: an option is wrong, or two options contradict each other.
    """
    return Cluster(**read_values(HOSTS, options, spelled))


def spread(target: Target, cluster: Cluster) -> Target:
    """Returns the target with the number of processes that share its devices.

    Raises:
      UsageError: the target cannot be searched on these hosts.
    """
    if cluster.launch == "kubernetes":
        raise UsageError(
            "`kubernetes` runs a search in the cluster, not one on this host",
            hint="`automesh search` writes it: --launch kubernetes --image IMAGE "
            "--volume CLAIM:PATH --write FILE",
        )
    if target.processes > 1:
        hosts_for(target, cluster)
        return target
    if not cluster.is_asked:
        if cluster.certificate:
            raise UsageError(
                "--certificate encrypts the channel between a search and its agents, and a search "
                "on this host alone has no agents",
                hint="leave --certificate and --key out; several hosts: see docs/clusters.md",
            )
        return target
    if target.absent is not None:  # All hosts compile for it, none runs it.
        if cluster.processes_per_host:
            raise UsageError(
                f"to compile for `{target.name}`, each host starts as many processes as it has "
                f"room for, and --processes-per-host says {cluster.processes_per_host}",
                hint="leave `--processes-per-host` out",
            )
        if cluster.hosts < 1:
            raise UsageError(
                f"to compile for `{target.name}` on several hosts, their number is needed",
                hint="give it with --hosts",
            )
        return target
    if target.selector:  # It names its devices: virtual ones of this host, or absent ones.
        raise UsageError(
            f"target `{target.name}` is searched on this host alone",
            hint="several hosts measure `--target local`, or `cpu:4*2` for virtual devices",
        )
    processes = cluster.hosts * max(cluster.processes_per_host, 1)
    if cluster.hosts < 1 or processes < 2:
        each = cluster.processes_per_host
        raise UsageError(
            f"a search on several hosts needs their number, got --hosts {cluster.hosts}"
            + (f" and --processes-per-host {each}" if each else ""),
            hint="give 2 or more; the attached devices of one host need no agents, unless several "
            "processes are to share them: --hosts 1 --processes-per-host 8",
        )
    if processes > MAX_PROCESSES:
        raise UsageError(
            f"--hosts {cluster.hosts} and --processes-per-host {cluster.processes_per_host} are "
            f"{processes} processes; {MAX_PROCESSES} are the most",
            hint="give smaller numbers",
        )
    if cluster.launch == "local" and cluster.hosts > 1 and target.platforms != "cpu":
        raise UsageError(
            "several agents on this host would each take all of its accelerators",
            hint="let one agent share them among several processes: --hosts 1 "
            "--processes-per-host N; or search them without `--launch`, in one process",
        )
    return replace(target, processes=processes)


def ranked(cluster: Cluster, rank: Rank) -> Cluster:
    """Returns the hosts of a search whose command an engine has started on every host.

    Raises:
      UsageError: the user asks for another number of hosts or processes.
    """
    if cluster.processes_per_host > 1:
        raise UsageError(
            f"this is process {rank.number} of {rank.count} that were started, and "
            f"--processes-per-host says {cluster.processes_per_host}",
            hint="leave `--processes-per-host` out: an engine starts as many on a host as it was "
            "told; or add `--launch`, by which one agent on each host starts them",
        )
    if cluster.hosts not in (0, rank.count):
        raise UsageError(
            f"this is process {rank.number} of {rank.count} that were started, and --hosts says "
            f"{cluster.hosts}",
            hint="leave `--hosts` out",
        )
    return replace(
        cluster,
        hosts=rank.count,
        listen=cluster.listen or joined_address(rank.host, rank.port),
        is_everywhere=True,
    )


def hosts_for(target: Target, cluster: Cluster) -> int:
    """Returns the number of hosts over which the processes of a target are spread.

    Raises:
      UsageError: they cannot be spread evenly.
    """
    each = cluster.processes_per_host
    if each and target.processes % each:
        raise UsageError(
            f"{target.processes} processes of target `{target.name}` cannot be spread over hosts "
            f"with {each} on each",
            hint=f"give a divisor of {target.processes} with --processes-per-host",
        )
    if each and cluster.hosts and cluster.hosts * each != target.processes:
        raise UsageError(
            f"target `{target.name}` is {target.processes} processes, and --hosts {cluster.hosts} "
            f"with --processes-per-host {each} are {cluster.hosts * each}",
            hint="leave one of the two out",
        )
    hosts = cluster.hosts or target.processes // max(each, 1)
    if hosts < 1 or hosts > target.processes or target.processes % hosts:
        raise UsageError(
            f"{target.processes} processes of target `{target.name}` cannot be spread evenly "
            f"over {hosts} hosts",
            hint=f"give a divisor of {target.processes} with --hosts",
        )
    return hosts


class Tells(Protocol):
    """Shows messages to the user; `automesh.report.progress.Progress` does."""

    def notice(self, text: str) -> None: ...
    def now(self, text: str) -> None: ...
    def tick(self) -> None: ...


class HostsRequest(Protocol):
    """The part of a `automesh.tuner.request.SearchRequest` that says where the search runs."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def memory_limit_bytes(self) -> int: ...


@contextmanager
def workers_of(request: HostsRequest, target: Target, progress: Tells) -> Generator[StartWorker]:
    """Gives the function that starts workers on a target's devices: processes here, or gangs.

    Agents are connected while the body runs, and end with it.

    Raises:
      UsageError: the agents do not connect.
    """
    if target.processes == 1:
        yield Process
        return
    hosts = hosts_for(target, request.cluster)
    with _fleet_of(
        request, hosts, progress, processes=target.processes, is_virtual=target.cpu_devices > 0
    ) as fleet:
        yield fleet.start_gang


@contextmanager
def lent_workers(
    request: HostsRequest, target: Target, progress: Tells, *, needed_bytes: int
) -> Generator[Lender | None]:
    """Gives the workers of other hosts that compile for absent devices; None if there are none.

    Their compiled programs are stored on this host.

    Args:
      needed_bytes: memory that one compile needs.

    Raises:
      UsageError: the agents do not connect.
    """
    if target.absent is None or not request.cluster.is_asked:
        yield None
        return
    from automesh.launch.lending import Lender

    store = default_store(os.environ)
    with _fleet_of(request, request.cluster.hosts, progress, store=store) as fleet:
        yield Lender(
            fleet,
            needed_bytes=request.memory_limit_bytes or needed_bytes,
            notice=progress.notice,
        )


@contextmanager
def _fleet_of(
    request: HostsRequest,
    hosts: int,
    progress: Tells,
    *,
    processes: int = 0,
    is_virtual: bool = True,
    store: ModuleStore | None = None,
) -> Generator[Fleet]:
    """Gives the agents of a search once all have connected; the arguments are those of `Fleet`."""
    # Imported here: gRPC takes a third of a second, and other searches do not need it.
    from automesh.launch.certificates import read_identity
    from automesh.launch.fleet import Fleet

    cluster = request.cluster
    with ExitStack() as stack:
        start = _start_of(cluster, stack)
        listen = check_address(start.listen, port_needed=False)
        certificates = None
        if cluster.certificate:
            # Agents that people start may dial another name than the address that is bound.
            dialled = listen[0].strip("[]") if start.launcher is not None else ""
            certificates = read_identity(cluster.certificate, cluster.key, cluster.ca, host=dialled)
        fleet = stack.enter_context(
            Fleet(
                token=start.token,
                listen=listen,
                hosts=hosts,
                processes=processes,
                is_virtual=is_virtual,
                launcher=start.launcher,
                memory_limit_bytes=request.memory_limit_bytes,
                certificates=certificates,
                ca=cluster.ca,
                notice=progress.notice,
                store=store,
            )
        )
        if start.launcher is None:
            progress.notice(
                f"run `{fleet.agent_words}` on each of {hosts} hosts, with the token of this search"
            )
        progress.now(f"waiting for {hosts} agents")
        fleet.wait(cluster.wait_s or start.wait_s, progress.tick)
        yield fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The way in which the agents of a search are started.

    Attributes:
      launcher: starts them; None if the user does.
      wait_s: how long the search usually waits for them.
    """

    token: str
    listen: str
    wait_s: float
    launcher: Launcher | None = None


def _start_of(cluster: Cluster, stack: ExitStack) -> _Start:
    """Makes the launcher; `stack` closes it.

    Raises:
      UsageError: there is no token, or other hosts cannot reach this one at any address.
    """
    from automesh.launch.local import local_launcher
    from automesh.launch.secret import new_token, read_token

    if cluster.is_everywhere:
        token = read_token(os.environ)
        own = stack.enter_context(local_launcher(is_one=True))
        return _Start(token=token, listen=cluster.listen, wait_s=_WAIT_S, launcher=own)
    if cluster.launch in ENGINES:
        launcher = stack.enter_context(engine_called(cluster.launch))
        listen = cluster.listen or own_address()
        return _Start(token=new_token(), listen=listen, wait_s=_WAIT_ENGINE_S, launcher=launcher)
    if cluster.listen:
        return _Start(token=read_token(os.environ), listen=cluster.listen, wait_s=_WAIT_S)
    local = stack.enter_context(local_launcher())
    return _Start(token=new_token(), listen=_LOOPBACK, wait_s=_WAIT_LOCAL_S, launcher=local)


def engine_called(name: str) -> AbstractContextManager[Launcher]:
    """Makes the launcher of an engine; its agents have ended when the body ends."""
    if name == "slurm":
        from automesh.launch.engines.slurm import slurm_launcher

        return slurm_launcher()
    from automesh.launch.engines.ray import ray_launcher

    return ray_launcher()


def own_address() -> str:
    """Returns the address of this host, found by its name, at which other hosts reach it.

    Raises:
      UsageError: the name only gives an address for use on this host itself.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        raise UsageError(
            f"the address at which other hosts reach this one, `{name}`, is not known",
            hint="give it: --listen 10.0.0.1",
        )
    return address
