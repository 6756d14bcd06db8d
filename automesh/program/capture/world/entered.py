"""Enters the environment in which a script is run, which is the same in every run (jax)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from automesh.program.absent.device_queries import showing
from automesh.program.capture.abstract.trace import in_this_thread
from automesh.program.capture.foreign.commands import commands_in_layer
from automesh.program.capture.foreign.files import led_to_layer
from automesh.program.capture.world import told
from automesh.program.capture.world.kept_apart import kept_apart
from automesh.program.capture.world.one_process import alone
from automesh.program.capture.world.put_back import taken_back
from automesh.program.capture.world.seeds import repeatable
from automesh.program.capture.world.side_effects import left_out
from automesh.program.capture.world.threads import ended_with_the_run
from automesh.program.capture.world.wishes import wishes_heard


@contextmanager
def world(
    *, is_late: bool, shown: int = 0, ends: tuple[type[BaseException], ...] = ()
) -> Generator[None]:
    """Gives the body, which runs the script, one process, the target's devices, files of its own
    and the same random numbers as in every run. Afterwards restores what the script leaves in
    force.

    Args:
      is_late: whether jax has its devices already.
      shown: how many devices the script sees; 0 for all.
      ends: errors that end the run, whichever thread of the script raises them.
    """
    told.forget()
    with ExitStack() as stack:
        stack.enter_context(taken_back())
        stack.enter_context(ended_with_the_run(modes=in_this_thread, ends=ends))
        stack.enter_context(repeatable())
        stack.enter_context(showing(shown))
        stack.enter_context(alone())
        stack.enter_context(wishes_heard(is_late=is_late))
        stack.enter_context(kept_apart())
        stack.enter_context(led_to_layer())
        stack.enter_context(commands_in_layer())
        stack.enter_context(left_out())
        yield
