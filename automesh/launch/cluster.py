"""The hosts of a search: which agents it needs, who starts them, and workers that are gangs."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.launch.wire import check_address
from automesh.worker.process import Process, StartWorker

LAUNCHERS = ("local", "kubernetes")
_WAIT_LOCAL_S = 120.0  # They import half of automesh, on a machine that may be busy.
_WAIT_S = 300.0  # People start agents by hand, and engines queue them.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """On which hosts a search runs, as the user says it.

    Attributes:
      launch: what starts the agents, one of `LAUNCHERS`; empty for nothing, or what is usual.
      hosts: agents; 0 for one, or as many as the target has processes.
      listen: address, with or without a port, that agents dial; empty for this host alone.
      wait_s: for the agents to come; 0 for what is usual.
    """

    launch: str = ""
    hosts: int = 0
    listen: str = ""
    wait_s: float = 0.0

    def __post_init__(self) -> None:
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
        """Whether the user has asked for hosts at all."""
        return bool(self.launch or self.hosts or self.listen)


ALONE = Cluster()


def spread(target: Target, cluster: Cluster) -> Target:
    """The target with the processes that its devices belong to.

    Raises:
      UsageError: the hosts do not go with the target.
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
        return target
    if target.selector:  # Its devices are named: virtual ones of this host, or some not here.
        raise UsageError(
            f"target `{target.name}` is searched on this host alone",
            hint="several hosts measure `--target local`, or `cpu:4*2` for virtual devices",
        )
    if cluster.hosts < 2:
        raise UsageError(
            f"a search on several hosts needs their number, got --hosts {cluster.hosts}",
            hint="give 2 or more; the attached devices of one host need no agents",
        )
    if cluster.launch == "local" and target.platforms != "cpu":
        raise UsageError(
            "several agents on this host would each want all of its accelerators",
            hint="search them without `--launch`, in one process",
        )
    return replace(target, processes=cluster.hosts)


def hosts_for(target: Target, cluster: Cluster) -> int:
    """Over how many hosts the processes of a target are spread.

    Raises:
      UsageError: they cannot be spread evenly.
    """
    hosts = cluster.hosts or target.processes
    if hosts < 1 or hosts > target.processes or target.processes % hosts:
        raise UsageError(
            f"{target.processes} processes of target `{target.name}` cannot be spread evenly "
            f"over {hosts} hosts",
            hint=f"give a divisor of {target.processes} with --hosts",
        )
    return hosts


class Tells(Protocol):
    """Whom the user is told by; `automesh.report.progress.Progress` fits."""

    def notice(self, text: str) -> None: ...
    def now(self, text: str) -> None: ...
    def tick(self) -> None: ...


class Asked(Protocol):
    """Of a request, what this concerns; `automesh.tuner.request.SearchRequest` fits."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def memory_limit_bytes(self) -> int: ...


@contextmanager
def workers_of(request: Asked, target: Target, progress: Tells) -> Generator[StartWorker]:
    """What starts the workers that have the devices of a target: processes here, or gangs.

    While the body runs, agents are connected; they end with it.

    Raises:
      UsageError: the agents do not come.
    """
    if target.processes == 1:
        yield Process
        return
    # gRPC takes a third of a second to import, which other searches do without.
    from automesh.launch.fleet import Fleet
    from automesh.launch.local import local_launcher
    from automesh.launch.secret import new_token, read_token

    cluster = request.cluster
    with ExitStack() as stack:
        hosts = cluster.hosts or target.processes
        if cluster.listen:
            launcher, token, limit_s = None, read_token(os.environ), _WAIT_S
        else:
            launcher, token = stack.enter_context(local_launcher()), new_token()
            limit_s = _WAIT_LOCAL_S
        fleet = stack.enter_context(
            Fleet(
                token=token,
                listen=check_address(cluster.listen or _LOOPBACK, port_needed=False),
                hosts=hosts,
                processes=target.processes,
                launcher=launcher,
                memory_limit_bytes=request.memory_limit_bytes,
                notice=progress.notice,
            )
        )
        if launcher is None:
            progress.notice(
                f"run `automesh agent {fleet.address}` on each of {hosts} hosts, with the token of "
                "this search"
            )
        progress.now(f"waiting for {hosts} agents")
        fleet.wait(cluster.wait_s or limit_s, progress.tick)
        yield fleet.start_gang
