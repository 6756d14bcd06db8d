"""How long it takes to rank every legal mesh: the command itself, timed, and pricing on its own.

README's dry run up to its table; then three examples on 512 chips of TPU v5p in 4 granules, five
axes that may all cross DCN, at the default knobs; then what each further value of a knob adds; then
a million plans of one step. The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from automesh.report.progress import PlainProgress
from benchmarks.scoring.plans import measured
from benchmarks.support.paths import EXAMPLES, ROOT
from benchmarks.support.search_process import SearchProcess

TARGET = "tpu-v5p-256-4"
TIMEOUT_S = 900.0
PLANS_PER_S = 1.5e6  # that are to be priced at least
SPACE = """\
[axes]
dp = { dcn = true }
fsdp = { dcn = true }
ep = { dcn = true }
tp = { dcn = true }
sp = { dcn = true }

[constraints]
"""


_TRIED = re.compile(
    r"^tried +(\d+) plans?(?:: (\d+) ruled out,)? (\d+) estimated only", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One of the shipped scripts.

    Attributes:
      limit_s: what the search may take on two cores.
      constraints: of its shipped space; empty: the shipped space itself is searched.
      knobs: default value first, then values that make another program.
    """

    name: str
    size: str
    limit_s: float
    constraints: str = ""
    knobs: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @property
    def script(self) -> Path:
        return EXAMPLES / f"{self.name}.py"


# As README has it: all knobs of the shipped space.
README = Example(name="dense_lm", size="8b", limit_s=12.0)
DENSE = Example(
    name="dense_lm",
    size="8b",
    constraints="""\
"dp*fsdp" = { divides = "batch" }
fsdp = { divides = "d_model" }
tp = { divides = "num_kv_heads" }
sp = { divides = "seq" }
""",
    limit_s=10.0,
    knobs=(("remat", '"full"', ('"dots"', '"none"')), ("microbatches", "1", ("2",))),
)
MOE = Example(
    name="moe_lm",
    size="8x7b",
    constraints="""\
"dp*fsdp*ep" = { divides = "batch" }
fsdp = { divides = "d_model" }
ep = { divides = "num_experts" }
tp = { divides = "num_kv_heads" }
""",
    limit_s=15.0,
)
LONG = Example(name="long_context", size="8b-128k", constraints=DENSE.constraints, limit_s=15.0)


def main(
    knobs: Annotated[bool, typer.Option(help="Time further values of knobs, too.")] = True,
) -> None:
    """Times the dry run of three examples, and pricing."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        readme = ranked(README, folder)
        dense = ranked(DENSE, folder)
        answer: dict[str, Any] = {
            **dense,
            "readme": readme,
            "moe_lm": ranked(MOE, folder),
            "long_context": ranked(LONG, folder),
        }
        if knobs:
            again = ranked(DENSE, folder)  # beside the others: the first run warmed the file cache
            answer["knob_values_s"] = {
                f"{knob}={value}": round(
                    ranked(DENSE, folder, f"[knobs]\n{knob} = [{usual}, {value}]\n")["ranked_s"]
                    - again["ranked_s"],
                    2,
                )
                for knob, usual, values in DENSE.knobs
                for value in values
            }
        space = spaced(DENSE, folder, "")
        with PlainProgress(sys.stderr) as progress:
            plans = measured(DENSE.script, ("--size", DENSE.size), TARGET, space, progress)
    print(
        f"pricing: {plans['plans_per_s']:,} of {plans['plans']:,} plans a second "
        f"(at least {PLANS_PER_S:,.0f})",
        file=sys.stderr,
        flush=True,
    )
    answer |= {"plans_per_s": plans["plans_per_s"], "pricing": plans}
    print(json.dumps(answer))


def spaced(example: Example, folder: Path, knobs: str) -> Path:
    """Writes the search space of an example."""
    path = folder / f"{example.name}.toml"
    path.write_text(SPACE + example.constraints + knobs)
    return path


def ranked(example: Example, folder: Path, knobs: str = "") -> dict[str, Any]:
    """Runs the command on one example.

    Raises:
      RuntimeError: it failed.
    """
    as_table = not example.constraints
    space = example.name if as_table else str(spaced(example, folder, knobs))
    search = SearchProcess(
        [
            *(str(example.script), "--target", TARGET, "--space", space),
            *("--results", str(folder / "results"), "--dry-run"),
            *(() if as_table else ("--json",)),
            *("--", "--size", example.size),
        ],
        ROOT,
    )
    code = search.finish(TIMEOUT_S)
    if code != 0:
        raise RuntimeError(f"{example.name} ended with {code}:\n{search.words}")
    took_s = time.monotonic() - search.began_s
    phases_s = phases(search.said, search.began_s, took_s)
    counted = read_table(search.printed) if as_table else read_result(search.result())
    answer = {
        **counted,
        "ranked_s": round(took_s, 2),
        "limit_s": example.limit_s,
        "phases_s": {name: round(seconds, 2) for name, seconds in phases_s.items()},
    }
    what = "README's dry run" if as_table else f"{example.name} {example.size}"
    parts = ", ".join(f"{name.replace('_', ' ')} {s:.1f} s" for name, s in phases_s.items())
    print(
        f"{what}{' ' + knobs.split()[1] if knobs else ''}: {answer['ranked']} of "
        f"{answer['enumerated']} plans ranked in {took_s:.1f} s (limit {example.limit_s:.0f} s): "
        f"{parts}",
        file=sys.stderr,
        flush=True,
    )
    return answer


def phases(said: Sequence[tuple[float, str]], began_s: float, took_s: float) -> Mapping[str, float]:
    """Seconds of the parts of a search, by the lines that it said; they add up to the whole.

    Args:
      said: lines with the time of the clock at which they came.
      began_s: of the same clock.
    """

    def first_s(start: str, otherwise: float) -> float:
        found = (moment - began_s for moment, line in said if line.startswith(start))
        return next(found, otherwise)

    listed_s = first_s("enumerate", took_s)
    propagated_s = max(
        (moment - began_s for moment, line in said if line.startswith("estimate ")),
        default=listed_s,
    )
    return {
        "start_inspect_enumerate": listed_s,
        "propagate_price": propagated_s - listed_s,
        "build_rank_print": took_s - propagated_s,
    }


def read_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a search counts in its JSON."""
    funnel = result["funnel"]
    return {
        "enumerated": funnel["enumerated"],
        "ruled_out": sum(one["count"] for one in funnel["ruled_out"]),
        "ranked": funnel["estimated"],
        "notices": result["notices"],
    }


def read_table(printed: str) -> dict[str, Any]:
    """The same below a table.

    Raises:
      RuntimeError: there is no such line.
    """
    found = _TRIED.search(printed)
    if found is None:
        raise RuntimeError(f"the search printed no table:\n{printed}")
    enumerated, ruled_out, ranked = (int(one or 0) for one in found.groups())
    return {"enumerated": enumerated, "ruled_out": ruled_out, "ranked": ranked}
