"""What does an axis over DCN cost, and are the losses of two processes those of one?

    python -m benchmarks.dcn_sweep [--case dense_lm moe_lm pipeline] [--rounds 8] [--search]
    python -m benchmarks.dcn_sweep --network-gbit 1

Two agents on this machine, each with a process of four virtual CPU devices, are a gang with DCN
between them (`cpu:4*2`). Measured is every legal split of dp, fsdp and tp for
`examples/dense_lm.py`, with each of the three over DCN; dp, ep and tp for `moe_lm.py`, with dp or
ep over DCN; and a pipeline of two stages of `dense_lm.py`, with pp or dp over DCN. The first losses
of each plan are compared with those of the same mesh in one process of eight devices. Meshes of
equal sizes, which differ only in what lies over DCN, are visited side by side as a race does it;
their ratios have 95 % intervals over the rounds. `--search` runs
`automesh search examples/dense_lm.py --target 'cpu:4*2'` as well.

As soon as a program has several processes, XLA's collectives on CPUs are those of gloo, inside a
process as well: all of them use TCP, which inside a machine is about as fast as its memory. So an
axis costs nearly the same on either side. `--network-gbit` makes two hosts of the machine: each
agent has a network of its own, in which collectives are as fast as before, and a link to the other
that carries so much in each direction. It needs Linux with `unshare`, `nsenter`, `ip` and `tc`, and
the right to use them.

Everything is kept in `--folder`: the same command goes on where it was. Progress goes to stderr;
the last line on stdout is one JSON object. The exit code is 1 if a plan failed or has other losses,
an axis was never over DCN, tp over DCN was not shown to be slower than inside, or the search gave
no measured rule.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any

from automesh.errors import AutomeshError
from benchmarks.dcn_sweep.figures import summary
from benchmarks.dcn_sweep.hosts import is_inside, run_inside, two_hosts
from benchmarks.dcn_sweep.sweep import CASES, TARGET, Network, sweep
from benchmarks.support.compiles import say
from benchmarks.support.paths import ROOT
from benchmarks.support.search_process import SearchProcess

_SEARCH_S = 1800.0


def search(folder: Path, budget: str, network: Network) -> tuple[dict[str, Any], list[str]]:
    """Runs the search of the same target by its command; its figures, and what is wrong."""
    place = (folder / "search").absolute()
    place.mkdir(parents=True, exist_ok=True)
    rules = place / "mesh_rules.toml"
    rules.unlink(missing_ok=True)
    words = ["examples/dense_lm.py", "--target", TARGET, "--budget", budget, "--new", "--json"]
    if network.listen:
        words += ["--hosts", "2", "--listen", network.listen]
    say(" ".join(["automesh search", *words]))
    process = SearchProcess([*words, "--results", str(place), "--rules", str(rules)], ROOT)
    code = process.finish(_SEARCH_S)
    wall_s = time.monotonic() - process.began_s
    found: dict[str, Any] = tomllib.loads(rules.read_text()) if rules.exists() else {}
    rule: dict[str, Any] = next(iter(found.get("rule", ())), {})
    evidence = rule.get("evidence", {})
    figures = {
        "exit_code": code,
        "wall_s": round(wall_s, 1),
        "rule": {name: value for name, value in rule.items() if name != "evidence"},
        "evidence": evidence.get("kind"),
    }
    faults = [] if code == 0 else [f"the search ended with {code}: {process.words[-1000:]}"]
    if evidence.get("kind") != "measured":
        faults.append("the search gave no measured rule")
    return figures, faults


def run(
    given: argparse.Namespace, folder: Path, network: Network
) -> tuple[dict[str, Any], list[str]]:
    """Sweeps the cases; the figures of each, and what is not as it should be."""
    found, faults = dict[str, Any](), list[str]()
    for case in CASES:
        if case.name not in given.case:
            continue
        try:
            table = sweep(case, folder, network, rounds=given.rounds, meshes=given.mesh)
        except AutomeshError as error:  # The other cases may come to something.
            faults.append(f"{case.name}: {error}")
            continue
        found[case.name], wrong = summary(case, table, is_whole=not given.mesh)
        faults += [f"{case.name}: {text}" for text in wrong]
        say(json.dumps({case.name: found[case.name]}, indent=1))
    if given.search:
        found["search"], wrong = search(folder, given.budget, network)
        faults += wrong
        say(json.dumps({"search": found["search"]}, indent=1))
    return found, faults


def main(arguments: list[str]) -> int:
    """Sweeps the cases, and prints their figures; 1 if something is not as it should be."""
    about = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about[0],
        epilog=about[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--mesh", nargs="+", default=(), help="only these meshes, as `dcn.tp:2,dp:4`; default: all"
    )
    parser.add_argument("--rounds", type=int, default=8, help="visits to each plan (default: 8)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("results/dcn_sweep"),
        help="for records and logs (default: results/dcn_sweep)",
    )
    parser.add_argument("--search", action="store_true", help="run `automesh search`, too")
    parser.add_argument("--budget", default="5m", help="of that search (default: 5m)")
    parser.add_argument(
        "--network-gbit",
        type=float,
        help="between the agents, in 10^9 bit/s (default: what TCP inside a machine carries)",
    )
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error("--rounds: at least one round is needed")
    network_gbit: float | None = given.network_gbit
    if network_gbit is not None and not is_inside():
        if not 0.01 <= network_gbit <= 1000:
            parser.error("--network-gbit: a number from 0.01 to 1000 is needed")
        try:
            return run_inside(arguments)
        except AutomeshError as error:
            parser.error(str(error))
    folder, began_s = given.folder.absolute(), time.monotonic()
    if network_gbit is None:
        found, faults = run(given, folder, Network())
    else:
        folder /= f"{network_gbit:g}gbit"
        try:
            with two_hosts(network_gbit, folder / "hosts") as listen:
                found, faults = run(given, folder, Network(gbit=network_gbit, listen=listen))
        except AutomeshError as error:
            parser.error(f"--network-gbit: {error}")
    for text in faults:
        say(f"FAULT: {text}")
    seconds = round(time.monotonic() - began_s, 1)
    ended = {"faults": len(faults), "seconds": seconds}
    print(json.dumps({"target": TARGET, "network_gbit": network_gbit, **found, **ended}))
    return 1 if faults else 0
