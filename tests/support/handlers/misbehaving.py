"""A stand-in for `worker.handlers.jobs`: the job's function names what to do, its argv how."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.outcomes import OutOfMemory
from automesh.program.nouns import Lowered, VisitAnswer
from automesh.worker.blame import OutcomeError
from automesh.worker.messages import Job

Emit = Callable[[dict[str, Any]], dict[str, Any]]


def handle(job: Job, emit: Emit) -> object:
    emit({"event": "stage", "stage": "build"})
    return globals()[job.step.entry.function](emit, *job.step.entry.argv)


def answer(emit: Emit, text: str = "") -> VisitAnswer:
    return VisitAnswer(
        samples_s=(0.5, float("inf")),
        losses=(float("nan"), 2.0),
        loss_dtype="float32",
        values="synthetic",
        setup_s=0.1,
        peak_bytes=os.getpid(),
        fingerprint=text,
    )


def variables(emit: Emit, *names: str) -> VisitAnswer:
    return answer(emit, "|".join(os.environ.get(name, "unset") for name in names))


def where(emit: Emit) -> VisitAnswer:
    private = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if int(fd.name) > 2]
    inheritable = [fd for fd in private if _is_open(fd) and os.get_inheritable(fd)]
    return answer(emit, f"{Path.cwd()} {sys.stdin.read()!r} {inheritable}")


def _is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


def ask(emit: Emit, size: str = "0") -> VisitAnswer:
    reply = emit({"event": "lowered", "fingerprint": "f" * int(size), "reply": True})
    return answer(emit, str(reply))


def sleep(emit: Emit, seconds: str) -> VisitAnswer:
    time.sleep(float(seconds))
    return answer(emit)


def compute(emit: Emit, core: str, seconds: str) -> VisitAnswer:
    """Needs so much time of one core, which others may have, too."""
    os.sched_setaffinity(0, {int(core)})
    until_s = time.process_time() + float(seconds)
    while time.process_time() < until_s:
        pass
    return answer(emit)


def wrong_noun(emit: Emit) -> Lowered:
    return Lowered(fingerprint="x")


def garbage(emit: Emit) -> object:
    return {"losses": object()}


def wrong_inside(emit: Emit) -> VisitAnswer:
    return VisitAnswer(
        samples_s="fast",  # type: ignore[arg-type]
        losses=(),
        loss_dtype="float32",
        values="synthetic",
        setup_s=0.1,
        peak_bytes=0,
        fingerprint="",
    )


def raises(emit: Emit) -> None:
    print("before")
    try:
        {}["batch"]
    except KeyError as error:
        raise ValueError("batch 3 is not\ndivisible by 2") from error


def raises_unprintable(emit: Emit) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    raise Odd


def usage_error(emit: Emit) -> None:
    raise UsageError("no `build`", hint="write one")


def outcome(emit: Emit) -> None:
    raise OutcomeError(OutOfMemory(stage="run", needed_bytes=9, limit_bytes=8, detail="HBM"))


def memory_error(emit: Emit) -> None:
    emit({"event": "stage", "stage": "materialize"})
    raise MemoryError


def exits(emit: Emit, code: str) -> None:
    print("usage: train.py", file=sys.stderr)
    sys.exit(int(code) if code.isdigit() else code)


def interrupt(emit: Emit) -> None:
    raise KeyboardInterrupt


def hard_exit(emit: Emit, code: str) -> None:
    print("leaving")
    os._exit(int(code))


def abort(emit: Emit) -> None:
    emit({"event": "stage", "stage": "compile"})
    os.abort()


def segfault(emit: Emit) -> None:
    emit({"event": "stage", "stage": "compile"})
    ctypes.string_at(0)


def suicide(emit: Emit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(emit: Emit, number: str) -> VisitAnswer:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, int(number))
    time.sleep(0.2)
    return answer(emit, "survived")


def hang(emit: Emit) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("hanging")
    while True:
        time.sleep(100)


def hang_holding_gil(emit: Emit) -> None:
    # PyDLL keeps the interpreter's lock while the C function runs.
    ctypes.PyDLL(None).sleep(100)


def allocate(emit: Emit) -> None:
    held: list[bytes] = []
    while True:
        held.append(b"x" * 2**22)
        time.sleep(0.002)


def allocate_in_children(emit: Emit) -> None:
    for _ in range(2):
        if os.fork() == 0:
            allocate(emit)
    time.sleep(100)


def share_memory_with_forks(emit: Emit) -> VisitAnswer:
    held = b"x" * (100 * 2**20)
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(100)
    time.sleep(2.5)
    return answer(emit, str(len(held)))


def flood(emit: Emit, megabytes: str) -> VisitAnswer:
    print("the beginning")
    line = "x" * 1023 + "\n"
    for _ in range(int(megabytes) * 1024):
        os.write(1, line.encode())
    print("the end", flush=True)
    return answer(emit)


def flood_and_crash(emit: Emit, megabytes: str) -> None:
    flood(emit, megabytes)
    os.abort()


def break_streams(emit: Emit) -> VisitAnswer:
    sys.stdout.close()
    sys.stderr = None
    sys.__stdout__ = None
    os.close(1)
    os.close(2)
    return answer(emit)


def replace_stdout(emit: Emit) -> VisitAnswer:
    class Silent:
        def write(self, text: str) -> int:
            raise OSError("no")

        flush = isatty = fileno = None

    sys.stdout = Silent()  # type: ignore[assignment]
    return answer(emit)


def say(emit: Emit, text: str) -> None:
    print(text)
    os.abort()


def say_and_refuse(emit: Emit, text: str) -> None:
    print(text)
    raise UsageError("no `build`", hint="write one")


def progress(emit: Emit) -> None:
    print("\r1%\r\x1b[32m100%\x1b[0m\x07")
    os.abort()


def close_all(emit: Emit, log: str) -> VisitAnswer:
    os.closerange(3, 4096)
    for _ in range(300):
        os.open(log, os.O_RDWR | os.O_CREAT)
    return answer(emit)


def fork_and_return(emit: Emit) -> VisitAnswer:
    os.fork()
    return answer(emit)


def fork_and_raise(emit: Emit) -> VisitAnswer:
    if os.fork() == 0:
        raise ValueError("in the copy")
    time.sleep(0.3)
    return answer(emit)


def leave_children(emit: Emit, then: str, seconds: str) -> object:
    """Leaves a plain child, one in its own session, a daemon, a daemon with no environment."""
    subprocess.Popen(["sleep", seconds])
    subprocess.Popen(["sleep", seconds], start_new_session=True)
    daemon = f"(setsid sleep {seconds} >/dev/null 2>&1 &)"
    subprocess.run(["sh", "-c", daemon], check=True)
    subprocess.run(["env", "-i", "sh", "-c", daemon], check=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    if then == "crash":
        os.abort()
    if then == "kill group":
        os.killpg(0, signal.SIGKILL)
    if then != "return":
        emit({"event": "hanging"})
        time.sleep(1000)
    return answer(emit)


def odd_habits(emit: Emit) -> VisitAnswer:
    os.chdir("/")
    os.setsid()
    threading.Thread(target=time.sleep, args=(1000,)).start()
    atexit.register(time.sleep, 1000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os.abort())
    signal.alarm(1)
    os.environ.clear()
    return answer(emit)


def die_later(emit: Emit) -> VisitAnswer:
    threading.Timer(0.3, os.abort).start()
    return answer(emit)


def start_again(emit: Emit, seconds: str) -> VisitAnswer:
    emit({"event": "stage", "stage": "start"})
    time.sleep(float(seconds))
    emit({"event": "stage", "stage": "build"})
    return answer(emit)


def start_again_and_hang(emit: Emit) -> None:
    start_again(emit, "0")
    hang(emit)


def abort_at_first_start(emit: Emit, mark: str) -> VisitAnswer:
    emit({"event": "stage", "stage": "start"})
    if not Path(mark).exists():
        Path(mark).touch()
        os.abort()
    return answer(emit)
