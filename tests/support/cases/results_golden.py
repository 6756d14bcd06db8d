"""What the golden files in tests/golden/results hold, by name."""

from collections.abc import Callable
from functools import partial
from io import StringIO

from rich.console import Console

from automesh.answers import Results
from automesh.report.blocks.terminal import render
from automesh.report.pages.several import Several, Sought
from automesh.report.progress import DisplayState, PlainProgress, frame, with_phase
from automesh.report.table import report_of
from tests.support.paths import GOLDEN
from tests.support.samples import results_samples

FOLDER = GOLDEN / "results"
WIDTHS = (60, 80, 120)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def table(sample: Callable[[], object], *, width: int, colour: bool = False) -> str:
    return render(report_of(sample(), top=5), width=width, colour=colour)


def several(*, width: int) -> str:
    """A summary of three targets, of which one has no answer."""
    searches = (
        Sought(target="tpu-v5p-1024-4", result=results_samples.predicted_search()),
        Sought(target="cpu:8", result=results_samples.measured_search()),
        Sought(
            target="gpu-h100-16",
            result=results_samples.empty_search(),
            reason="no plan was compiled that fits: 3 plans: 3 out of memory",
            hint="search for more devices",
        ),
    )
    return Results(found=Several(searches=searches)).text(width=width, colour=False)


def running_state() -> DisplayState:
    """A search in the middle of compiling; 40 s old."""
    state = DisplayState(
        started_s=1000.0, now="dp:2,tp:4 remat=none, compiling for 7 s (2 workers)"
    )
    report = partial(with_phase, took_s=0.0, lanes=1, now_s=1000.0)
    state = report(state, "enumerate", total=315, done=315, note="120 legal")
    for done, took_s in enumerate((9.0, 8.0, 40.0, 9.5), start=27):
        state = with_phase(
            state,
            "compile",
            total=120,
            done=done,
            note="20 duplicates, 2 failed",
            took_s=took_s,
            lanes=2,
            now_s=1038.0,
        )
    state = report(state, "measure", total=9, done=0, note="starts when compile ends")
    return DisplayState(
        started_s=state.started_s,
        phases=state.phases,
        now=state.now,
        best="dp:4,tp:2 remat=dots, 12.3 ms predicted, not measured",
    )


def live(*, width: int, colour: bool = False) -> str:
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        _environ={},
    )
    console.print(frame(running_state(), now_s=1040.0, width=width))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def plain() -> str:
    """A whole search on a pipe: 12 compiles of 2 s on 2 workers, then a long measurement."""
    out, clock = StringIO(), Clock()
    with PlainProgress(out, clock=clock) as progress:
        progress.phase("enumerate", total=315, done=315, note="120 legal")
        progress.notice("axis ep is never used by the step")
        progress.phase("compile", total=12, lanes=2)
        for done in range(1, 13):
            progress.now(f"plan {done}")
            clock.now_s += 1.0
            if done == 4:
                progress.best("dp:2,tp:4 12.3 ms predicted")
            progress.phase("compile", total=12, done=done, took_s=2.0, lanes=2)
        progress.phase("measure", total=3)
        progress.now("dp:8, round 1 of 9")
        for _ in range(130):
            clock.now_s += 1.0
            progress.tick()
        progress.phase("measure", total=3, done=3, took_s=130.0)
        progress.log("the log of worker 1 is results/x/logs/1.txt")
    return out.getvalue()


CASES: dict[str, Callable[[], str]] = {
    **{
        f"{name}_{width}": partial(table, sample, width=width)
        for width in WIDTHS
        for name, sample in (
            ("measured", results_samples.measured_search),
            ("compiled", results_samples.compiled_search),
            ("predicted", results_samples.predicted_search),
            ("nothing", results_samples.empty_search),
        )
    },
    "measured_80_colour": partial(table, results_samples.measured_search, width=80, colour=True),
    **{f"several_{width}": partial(several, width=width) for width in WIDTHS},
    **{f"live_{width}": partial(live, width=width) for width in WIDTHS},
    "live_80_colour": partial(live, width=80, colour=True),
    "plain": plain,
}
