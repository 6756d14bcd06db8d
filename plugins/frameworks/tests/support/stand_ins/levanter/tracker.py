"""Where a training tells what it does: a global, which a context manager sets."""

import contextlib

_current = None


class NoopTracker:
    pass


def current_tracker(tracker=None):
    if tracker is not None:
        return _as_current(tracker)
    if _current is None:
        raise RuntimeError("No global tracker set")
    return _current


@contextlib.contextmanager
def _as_current(tracker):
    global _current
    before, _current = _current, tracker
    try:
        yield
    finally:
        _current = before
