"""Does one thing that a script should not do: `hostile.py HABIT PLACE`, and the place is `import`,
`build` or `step`. Starts no jax."""

# As scripts are written that do such things:
# ruff: noqa: B003, PTH106, PTH107, PTH115, PTH123, PTH208, SIM115

import asyncio
import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import mmap
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HABIT, PLACE = sys.argv[1], sys.argv[2]
SLEEP_S = sys.argv[3] if len(sys.argv) > 3 else "1000"


# Ends and exceptions.


def exits():
    sys.exit(0)


def exits_with_text():
    sys.exit("the batch is bad")


class Unprintable:
    def __repr__(self):
        sys.exit("from repr")


def exits_unprintably():
    sys.exit(Unprintable())


def exits_by_signal_handler():
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)


def hard_exits():
    os._exit(0)


def hard_exits_with_code():
    os._exit(3)


def hard_exits_in_thread():
    threading.Thread(target=os._exit, args=(5,)).start()
    time.sleep(1000)


def raises():
    raise ValueError("there is no such layer")


class Stop(BaseException):
    pass


def raises_base():
    raise Stop("at once")


def raises_keyboard_interrupt():
    raise KeyboardInterrupt


def raises_generator_exit():
    raise GeneratorExit("now")


def raises_stop_iteration():
    raise StopIteration("now")


def raises_asyncio_cancelled():
    raise asyncio.CancelledError("now")


class Odd(Exception):
    def __init__(self, speak):
        self.speak = speak

    def __str__(self):
        return self.speak()


class IndivisibleError(Odd):
    """A namesake of jax's, whose message is looked into."""


def raises_unprintable():
    raise Odd(lambda: 1 / 0)


def raises_what_exits_when_printed():
    raise Odd(lambda: sys.exit("from str"))


def raises_what_interrupts_when_printed():
    def speak():
        raise KeyboardInterrupt

    raise IndivisibleError(speak)


def raises_what_is_no_text():
    raise Odd(lambda: 3)


def raises_what_hangs_when_printed():
    raise Odd(lambda: time.sleep(1000))


def raises_endless_text():
    raise Odd(lambda: "x" * 30_000_000)


def raises_surrogates():
    raise ValueError("half a pair \ud800")


def raises_control_characters():
    raise ValueError("\x1b[31mred\x00\x07")


def raises_a_cycle():
    error = ValueError("round")
    error.__cause__ = KeyError("and round")
    error.__cause__.__cause__ = error
    raise error


def raises_a_chain():
    error = ValueError("the first")
    for number in range(3000):
        following = ValueError(f"number {number}")
        following.__cause__ = error
        error = following
    raise error


def raises_a_group():
    raise ExceptionGroup("several", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])])


def raises_a_deep_group():
    error = ValueError("inside")
    for _ in range(2000):
        error = ExceptionGroup("more", [error])
    raise error


class Nameless(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Nameless):
    pass


def raises_nameless():
    raise NamelessError("x")


def raises_memory_error():
    raise MemoryError(Unprintable())


def raises_os_error():
    raise OSError(28, "No space left on device")


def raises_and_closes_the_streams():
    for number in (0, 1, 2):
        os.close(number)
    raise ValueError("unheard")


def recurses():
    recurses()


def recurses_without_limit():
    sys.setrecursionlimit(10**9)
    recurses()


def lowers_the_recursion_limit():
    depth = len(traceback.extract_stack())
    sys.setrecursionlimit(depth + 12)


# Signals and crashes.


def segfaults():
    ctypes.string_at(0)


def segfaults_unheard():
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


def aborts():
    os.abort()


def aborts_in_thread():
    threading.Thread(target=os.abort).start()
    time.sleep(1000)


def touches_a_truncated_mapping():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def sends(number):
    return lambda: (signal.signal(number, signal.SIG_DFL), os.kill(os.getpid(), number))


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def is_interrupted():
    os.kill(os.getpid(), signal.SIGINT)


def breaks_a_pipe():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")


def spends_its_processor_time():
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    while True:
        pass


def leaves_an_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.4)


def sets_an_alarm():
    leaves_an_alarm()
    time.sleep(1000)


def ignores_its_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    subprocess.run(["true"], check=False)


def kills_its_group():
    os.killpg(0, signal.SIGKILL)


def kills_its_guardian():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def kills_its_deputy():
    with open(f"/proc/{os.getppid()}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(1000)


def stops_its_guardian():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


# Waiting without end.


def sleeps():
    time.sleep(1000)


def spins():
    while True:
        pass


def holds_the_gil():
    ctypes.PyDLL(None).sleep(1000)


def deadlocks():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_queue():
    queue.Queue().get()


def waits_for_a_pipe():
    os.read(os.pipe()[0], 1)


def waits_for_a_child():
    subprocess.run(["sleep", SLEEP_S], check=False)


def runs_an_event_loop():
    asyncio.new_event_loop().run_forever()


def backtracks():
    re.match("(a+)+$", "a" * 60 + "b")


def raises_to_a_power():
    pow(3, 10**8)


def blocks_all_signals():
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def starves_the_main_thread():
    sys.setswitchinterval(1000)
    threading.Thread(target=spins, daemon=True).start()
    time.sleep(0.01)
    sum(range(10**6))


def reads_its_input():
    return input()


def sets_a_breakpoint():
    breakpoint()


# Memory.


def allocates():
    kept = []
    while True:
        kept.append(b"x" * 2**23)
        time.sleep(0.002)


def allocates_in_children():
    for _ in range(3):
        if os.fork() == 0:
            allocates()
    time.sleep(1000)


def allocates_at_once():
    return len(bytearray(2**60))


def limits_its_memory():
    resource.setrlimit(resource.RLIMIT_AS, (2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return len(bytearray(2**26))


# Processes and threads.


def thread_exits():
    threading.Thread(target=sys.exit, args=(3,)).start()


def thread_raises():
    threading.Thread(target=raises).start()
    time.sleep(0.05)


def thread_outlives():
    threading.Thread(target=time.sleep, args=(1000,)).start()


def starts_many_threads():
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def hangs_at_exit():
    atexit.register(time.sleep, 1000)
    threading._register_atexit(time.sleep, 1000)


def fork_returns():
    os.fork()


def fork_raises():
    if os.fork() == 0:
        raise ValueError("in the copy")
    time.sleep(0.1)


def fork_exits():
    if os.fork() == 0:
        sys.exit(9)
    time.sleep(0.1)


def leaves_copies():
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)


def forks_a_tree():
    for _ in range(4):
        os.fork()
    if os.getpid() != MAIN:
        time.sleep(1000)
        os._exit(0)


def leaves_a_program():
    subprocess.Popen(["sleep", SLEEP_S])
    subprocess.Popen(["sleep", SLEEP_S], start_new_session=True)


def leaves_a_daemon():
    subprocess.run(["sh", "-c", f"(setsid sleep {SLEEP_S} >/dev/null 2>&1 &)"], check=True)
    subprocess.run(["env", "-i", "sh", "-c", f"(setsid sleep {SLEEP_S} &) >/dev/null"], check=True)


def leaves_a_deaf_child():
    if os.fork() == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        time.sleep(1000)
        os._exit(0)


def leaves_a_stopped_child():
    child = subprocess.Popen(["sleep", SLEEP_S])
    child.send_signal(signal.SIGSTOP)


def leaves_multiprocessing():
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(1000,)).start()


def leaves_zombies():
    for _ in range(20):
        if os.fork() == 0:
            os._exit(0)


def leaves_a_daemon_and_crashes():
    leaves_a_daemon()
    leaves_a_deaf_child()
    os.abort()


def becomes_another_program():
    os.execv("/bin/true", ["true"])


def becomes_a_program_that_stays():
    os.execv(shutil.which("sleep"), ["sleep", SLEEP_S])


# Descriptors, streams, files.


def channel():
    """The descriptor that leads to the parent."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) >= 200 and target.startswith("socket:"):
                return int(name)
    raise AssertionError("no channel")


def closes_descriptors():
    os.closerange(3, 4096)


def closes_everything():
    os.closerange(0, 4096)


def closes_and_opens():
    os.closerange(3, 4096)
    for _ in range(300):
        os.open(os.devnull, os.O_RDWR)


def replaces_the_channel():
    os.dup2(os.open(os.devnull, os.O_RDWR), channel())


def shuts_the_channel():
    socket.socket(fileno=os.dup(channel())).shutdown(socket.SHUT_RDWR)


def writes_garbage_to_the_channel():
    time.sleep(0.2)  # What the worker has told of its stage is then read before.
    os.write(channel(), b"\xff" * 64)
    time.sleep(1000)


def writes_no_json_to_the_channel():
    time.sleep(0.2)
    os.write(channel(), struct.pack(">I", 4) + b"{no}")
    time.sleep(1000)


def writes_a_long_message_to_the_channel():
    time.sleep(0.2)
    os.write(channel(), struct.pack(">I", 65 * 2**20) + b"{")
    time.sleep(1000)


def writes_an_order_to_the_channel():
    body = json.dumps({"answer": {"samples_s": "fast"}}).encode()
    os.write(channel(), struct.pack(">I", len(body)) + body)
    time.sleep(1000)


def floods():
    for _ in range(300):
        os.write(1, b"y" * 99_999 + b"\n")


def floods_one_line():
    os.write(2, b"z" * 20_000_000)


def writes_bytes():
    os.write(1, bytes(range(256)) * 4000)


def prints_surrogates():
    print("\ud800")


def exhausts_descriptors():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    kept = []
    while True:
        kept.append(open(os.devnull))


def removes_its_streams():
    sys.stdout = sys.stderr = sys.stdin = sys.__stdout__ = None


def replaces_its_streams():
    sys.stdout = sys.stderr = 42


def closes_its_streams():
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)


class Trap:
    def __getattr__(self, name):
        sys.exit(f"asked for {name}")


def traps_its_streams():
    sys.stdout = sys.stderr = Trap()


def changes_to_no_folder():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def masks_all_permissions():
    os.umask(0o777)


def clears_the_environment():
    os.environ.clear()


def removes_the_environment():
    os.environ = None


def deletes_itself():
    os.remove(__file__)


def overwrites_itself():
    with open(__file__, "w") as file:
        file.write("\x00 this is no Python")


def removes_its_log():
    os.remove(os.readlink(f"/proc/{os.getppid()}/fd/1"))  # of the guardian
    raise ValueError("the log is gone")


def limits_files():
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0 if kind != resource.RLIMIT_NOFILE else 64, 64))


# What other code calls.


def replaces(*places, by=None):
    """Puts something else in the places of functions that all other code calls."""

    def replace():
        for owner, name in places:
            setattr(owner, name, by or nothing)

    return replace


def nothing(*args, **kwargs):
    raise RuntimeError("replaced by the script")


def stands_still(*args):
    return 0.0


def clears_builtins():
    names = dict(vars(builtins))
    vars(builtins).clear()
    vars(builtins)["__build_class__"] = names["__build_class__"]


def clears_modules():
    sys.modules.clear()


def hides_modules():
    for name in ("json", "struct", "traceback", "dataclasses", "pydantic"):
        sys.modules[name] = None


def breaks_the_path():
    sys.path = None


class Hook:
    def find_spec(self, name, path=None, target=None):
        os.abort()


def hooks_imports():
    sys.meta_path.insert(0, Hook())


def traces():
    sys.settrace(nothing)


def profiles():
    sys.setprofile(nothing)


def collects_loudly():
    gc.callbacks.append(nothing)
    gc.collect()


def stops_collecting():
    gc.disable()
    gc.freeze()
    gc.set_threshold(0)


def patches_the_worker():
    for name, module in list(sys.modules.items()):
        if name in ("automesh.worker.blame", "automesh.program.notes"):
            for inside in list(vars(module)):
                if callable(getattr(module, inside)):
                    setattr(module, inside, nothing)
    raise ValueError("who tells?")


def warns_loudly():
    import warnings

    warnings.simplefilter("error")
    warnings.warn("as an error", stacklevel=1)


# What a step may give.


class Exits:
    def __float__(self):
        sys.exit("from float")


class Lies:
    """Says that it is something else."""

    __class__ = str


MAIN = os.getpid()
HABITS = {
    name: value for name, value in list(globals().items()) if callable(value) and name.islower()
} | {
    "sends_sigterm": sends(signal.SIGTERM),
    "sends_sighup": sends(signal.SIGHUP),
    "sends_sigfpe": sends(signal.SIGFPE),
    "sends_sigill": sends(signal.SIGILL),
    "sends_sigint": sends(signal.SIGINT),
    "replaces_clocks": replaces(
        (time, "perf_counter"), (time, "time"), (time, "monotonic"), by=stands_still
    ),
    "replaces_exit": replaces((os, "_exit"), (sys, "exit"), by=stands_still),
    "replaces_json": replaces((json, "dumps"), (json, "loads"), (json, "JSONEncoder")),
    "replaces_os": replaces((os, "write"), (os, "read"), (os, "close"), (os, "fstat")),
    "replaces_signals": replaces((signal, "signal"), (signal, "setitimer"), (os, "kill")),
    "replaces_traceback": replaces((traceback, "format_exception"), (traceback, "print_exc")),
    "replaces_sockets": replaces((socket, "socket"), (struct, "pack"), (struct, "Struct")),
    "replaces_len": replaces((builtins, "len"), (builtins, "isinstance")),
    "replaces_import": replaces((builtins, "__import__"), (builtins, "open")),
    "replaces_print": replaces((builtins, "print"), by=stands_still),
    "replaces_exceptions": replaces(
        (builtins, "Exception"), (builtins, "BaseException"), (builtins, "OSError"), by=42
    ),
    "gives_nothing": lambda: {}["gone"],
    "gives_nan": lambda: float("nan"),
    "gives_an_object": object,
    "gives_a_huge_integer": lambda: 10**5000,
    "gives_what_exits": Exits,
    "gives_a_liar": Lies,
    "gives_surrogates": lambda: "half a pair \ud800",
    "is_well": lambda: None,
}


def at(place):
    return HABITS[HABIT]() if place == PLACE else None


at("import")


def build(mesh):
    at("build")

    def step():
        given = at("step")
        return 0.5 if given is None else given

    return step, ()
