"""How long it takes to rank every legal mesh: the command itself, timed, and pricing on its own.

Three examples on 512 chips of TPU v5p in 4 granules, five axes that may all cross DCN, at the
default knobs; then what each further value of a knob adds; then a million plans of one step.
The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
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
SPACE = """\
[axes]
dp = { dcn = true }
fsdp = { dcn = true }
ep = { dcn = true }
tp = { dcn = true }
sp = { dcn = true }

[constraints]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One of the shipped scripts, with the constraints of its shipped space.

    Attributes:
      limit_s: what the search may take on two cores.
      knobs: default value first, then values that make another program.
    """

    name: str
    size: str
    constraints: str
    limit_s: float
    knobs: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @property
    def script(self) -> Path:
        return EXAMPLES / f"{self.name}.py"


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
    limit_s=60.0,
)
LONG = Example(name="long_context", size="8b-128k", constraints=DENSE.constraints, limit_s=60.0)


def main(
    knobs: Annotated[bool, typer.Option(help="Time further values of knobs, too.")] = True,
) -> None:
    """Times the dry run of three examples, and pricing."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        dense = ranked(DENSE, folder)
        answer: dict[str, Any] = {
            **dense,
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
    space = spaced(example, folder, knobs)
    search = SearchProcess(
        [
            *(str(example.script), "--target", TARGET, "--space", str(space)),
            *("--results", str(folder / "results"), "--dry-run", "--json"),
            *("--", "--size", example.size),
        ],
        ROOT,
    )
    code = search.finish(TIMEOUT_S)
    if code != 0:
        raise RuntimeError(f"{example.name} ended with {code}:\n{search.words}")
    took_s = time.monotonic() - search.began_s
    listed_s = search.said_at_s("enumerate") or took_s
    moments_s = [moment_s for moment_s, line in search.said if line.startswith("estimate")]
    estimated_s = max(moments_s) - search.began_s
    result = search.result()
    funnel = result["funnel"]
    answer = {
        "enumerated": funnel["enumerated"],
        "ruled_out": sum(one["count"] for one in funnel["ruled_out"]),
        "ranked": funnel["estimated"],
        "ranked_s": round(took_s, 2),
        "phases_s": {
            "start_inspect_enumerate": round(listed_s, 2),
            "propagate": round(estimated_s - listed_s, 2),
            "price_rank_print": round(took_s - estimated_s, 2),
        },
        "notices": result["notices"],
    }
    print(
        f"{example.name} {example.size}{' ' + knobs.split()[1] if knobs else ''}: "
        f"{answer['ranked']} of {funnel['legal']} legal plans ranked in {took_s:.1f} s "
        f"(limit {example.limit_s:.0f} s)",
        file=sys.stderr,
        flush=True,
    )
    return answer
