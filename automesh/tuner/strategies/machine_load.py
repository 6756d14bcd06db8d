"""Measures how busy this machine is, for the sentence about uncertain times."""

from __future__ import annotations

import os
import time

import psutil

_LOOK_S = 0.3
_BUSY_PERCENT = 25.0  # of a core
_MOST_NAMED = 3


def load_words() -> str:
    """Returns words such as `the machine was busy (load 7.9 on 2 cores; beside this search: ffmpeg
    98 %)`.

    The load is that of the last minute, with the search's own part; the other processes are those
    that are busy now. Takes 0.3 seconds.
    """
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    figures = f"load {load:.1f} on {cores or 1} {'core' if cores == 1 else 'cores'}"
    others = _others()
    if others:
        figures += f"; beside this search: {', '.join(others)}"
    is_busy = load > (cores or 1) or bool(others)
    return f"the machine was {'busy' if is_busy else 'not busy otherwise'} ({figures})"


def _others() -> list[str]:
    """Returns the busiest processes that do not belong to this search, with their share of a
    core."""
    me = psutil.Process()
    mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
    seen: list[tuple[psutil.Process, str]] = []
    for process in psutil.process_iter(["name"]):
        if process.pid not in mine:
            process.cpu_percent()
            seen.append((process, str(process.info["name"])))
    time.sleep(_LOOK_S)
    busy: list[tuple[float, str]] = []
    for process, name in seen:
        try:
            percent = process.cpu_percent()
        except psutil.Error:  # It has ended.
            continue
        if percent >= _BUSY_PERCENT:
            busy.append((percent, name))
    busy.sort(reverse=True)
    return [f"{name} {percent:.0f} %" for percent, name in busy[:_MOST_NAMED]]
