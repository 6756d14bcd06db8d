"""Does one thing that a script with jax should not do: `hostile_jax.py HABIT`."""

import builtins
import gc
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh import Workload

HABIT = sys.argv[1]


def clock_of(seconds):
    return lambda *args: seconds


def replaced(*args, **kwargs):
    raise RuntimeError("replaced by the script")


def config(name, value):
    return lambda: jax.config.update(name, value)


def puts(owner, name, value):
    return lambda: setattr(owner, name, value)


def stops_clocks():
    for name in ("perf_counter", "time", "monotonic"):
        setattr(time, name, clock_of(7.0))


def starts_jax_with_others():
    jax.config.update("jax_num_cpu_devices", 5)
    jax.devices()


def sets_device_flags():
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=6"


def deletes_itself():
    os.remove(__file__)  # noqa: PTH107


AT_IMPORT = {
    "stops_clocks": stops_clocks,
    "wants_devices": config("jax_num_cpu_devices", 5),
    "wants_devices_by_flags": sets_device_flags,
    "starts_jax_with_others": starts_jax_with_others,
    "wants_no_platform": config("jax_platforms", "nonsense"),
    "hides_devices": puts(jax, "devices", clock_of([])),
    "debugs_nans": config("jax_debug_nans", True),
    "disables_jit": config("jax_disable_jit", True),
    "forbids_transfers": config("jax_transfer_guard", "disallow"),
    "enables_x64": config("jax_enable_x64", True),
    "replaces_jit": puts(jax, "jit", replaced),
    "replaces_waiting": puts(jax, "block_until_ready", clock_of(None)),
    "replaces_tree": puts(jax.tree, "leaves", replaced),
    "replaces_len": puts(builtins, "len", replaced),
    "replaces_isinstance": puts(builtins, "isinstance", replaced),
    "replaces_collect": puts(gc, "collect", replaced),
    "deletes_itself": deletes_itself,
}
AT_BUILD = {
    "clears_backends": lambda: __import__("jax.extend.backend").extend.backend.clear_backends(),
    "clears_caches": jax.clear_caches,
    "kills_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "replaces_numpy": puts(np, "asarray", replaced),
}
AT_IMPORT.get(HABIT, lambda: None)()


def called_back(x):
    match HABIT:
        case "raises_in_callback":
            raise ValueError("no such batch")
        case "exits_in_callback":
            os._exit(4)
        case "hangs_in_callback":
            time.sleep(1000)
        case "stops_clocks_in_callback":
            stops_clocks()
        case "crashes_in_callback":
            os.abort()
    return x


def raises(error):
    raise error


def called(weight, loss):
    loss = jax.pure_callback(called_back, jax.ShapeDtypeStruct((), jnp.float32), loss)
    return weight, loss


def leaks(weight, loss):
    KEPT.append(loss)
    return weight, loss


def uses_a_leak(weight, loss):
    given = loss + KEPT[-1] if KEPT else loss
    KEPT.append(loss)
    return weight, given


def loops(weight, loss):
    return weight, jax.lax.while_loop(lambda x: x > -1, lambda x: x * 0 + 1, loss)


def allocates(weight, loss):
    return weight, loss, jax.lax.broadcasted_iota(jnp.float32, (2**19, 2**12), 0) * loss


# What the step gives, of its new weight and its loss.
IN_STEP = {
    "raises_in_step": lambda weight, loss: raises(ValueError("no such layer")),
    "exits_in_step": lambda weight, loss: sys.exit(3),
    "gives_nan": lambda weight, loss: (weight, loss * jnp.nan),
    "gives_a_string": lambda weight, loss: (weight, "loss"),
    "gives_an_object": lambda weight, loss: (weight, object()),
    "gives_another_shape": lambda weight, loss: (jnp.zeros((3, 3)), loss),
    "gives_another_type": lambda weight, loss: (weight.astype(jnp.int8), loss),
    "gives_a_tracer_away": leaks,
    "uses_what_was_given_away": uses_a_leak,
    "loops_without_end": loops,
    "allocates_on_the_device": allocates,
    "debugs_nans": lambda weight, loss: (weight, loss * jnp.nan),
}


def step(weight, batch):
    loss = jnp.mean((batch @ weight) ** 2)
    usual = called if HABIT.endswith("_in_callback") else lambda weight, loss: (weight, loss)
    return IN_STEP.get(HABIT, usual)(weight - 0.01, loss)


def deleted(args):
    made = tuple(jax.device_put(np.ones(one.shape, one.dtype), one.sharding) for one in args)
    for one in made:
        one.delete()
    return made


# What `build` returns, of the arguments.
RETURNS = {
    "gives_none": lambda args: None,
    "gives_a_number": lambda args: 42,
    "gives_one": lambda args: (jax.jit(step),),
    "gives_text": lambda args: "step",
    "is_not_jitted": lambda args: (step, args),
    "gives_away_all": lambda args: (jax.jit(step, donate_argnums=(0, 1)), args),
    "gives_away_what_is_not_there": lambda args: (jax.jit(step, donate_argnums=(0, 7)), args),
    "deletes_its_arrays": lambda args: Workload(
        jax.jit(step), args, init=lambda mesh: deleted(args)
    ),
    "starts_with_another_shape": lambda args: Workload(
        jax.jit(step), args, init=lambda mesh: (jnp.ones(3), jnp.ones(4))
    ),
    "exits_at_init": lambda args: Workload(jax.jit(step), args, init=lambda mesh: sys.exit(6)),
    "advances_to_nothing": lambda args: Workload(
        jax.jit(step), args, advance=lambda outputs, args: None
    ),
    "raises_in_advance": lambda args: Workload(jax.jit(step), args, advance=replaced),
}


def build(mesh):
    AT_BUILD.get(HABIT, lambda: None)()
    args = (
        jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P())),
        jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp"))),
    )
    return RETURNS.get(HABIT, lambda args: (jax.jit(step), args))(args)


KEPT = []
