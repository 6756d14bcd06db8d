"""Which function of a script is its training step: by the flow of state."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.program.capture.test_run_script import captured, environment
from tests.support.made_once import made_once
from tests.support.paths import ROOT

PREAMBLE = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"), (AxisType.Auto,) * 2)
def at(*spec):
    return NamedSharding(mesh, P(*spec))
def batch(step, rows=16):
    data = np.random.default_rng(step).normal(size=(rows, 32)).astype(np.float32)
    return jax.device_put(data, at("data"))
def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)
params = {
    "up": jax.device_put(jnp.full((32, 64), 0.01, jnp.float32), at(None, "model")),
    "down": jax.device_put(jnp.full((64, 32), 0.01, jnp.float32), at("model")),
}
zeros = jax.tree.map(jnp.zeros_like, params)
def momentum(w, m, g):
    m = jax.tree.map(lambda a, b: 0.9 * a + b, m, g)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, m), m
def train(w, m, x):
    loss, g = jax.value_and_grad(loss_fn)(w, x)
    return *momentum(w, m, g), loss
"""
# Each is a script of its own, after the lines above.
SCRIPTS = {
    "grad_then_apply": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        apply_fn = jax.jit(momentum)
        moments = zeros
        for step in range(10**6):
            loss, grads = grad_fn(params, batch(step))
            params, moments = apply_fn(params, moments, grads)
    """,
    "two_iterations": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        apply_fn = jax.jit(momentum, donate_argnums=(0, 1))
        moments = zeros
        for step in range(2):
            loss, grads = grad_fn(params, batch(step))
            params, moments = apply_fn(params, moments, grads)
    """,
    "called_once": """
        train_step, evaluate = jax.jit(train, donate_argnums=(0, 1)), jax.jit(loss_fn)
        params, moments, loss = train_step(params, zeros, batch(0))
        print([float(evaluate(params, batch(step, rows=512))) for step in range(3)])
    """,
    "counts_in_its_structure": """
        import dataclasses
        @functools.partial(
            jax.tree_util.register_dataclass, data_fields=["w", "m"], meta_fields=["step"]
        )
        @dataclasses.dataclass
        class State:
            w: dict
            m: dict
            step: int
        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(state, x):
            w, m, loss = train(state.w, state.m, x)
            return State(w, m, state.step + 1), loss
        state = State(params, zeros, 0)
        for step in range(6):
            state, loss = train_step(state, batch(step))
    """,
    "clipped_between": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        apply_fn = jax.jit(momentum)
        moments = zeros
        for step in range(10**6):
            loss, grads = grad_fn(params, batch(step))
            grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
            params, moments = apply_fn(params, moments, grads)
    """,
    "two_players": """
        @functools.partial(jax.jit, donate_argnums=0)
        def first_step(mine, other, x):
            loss, g = jax.value_and_grad(lambda w: loss_fn(w, x) + loss_fn(other, x))(mine)
            return jax.tree.map(lambda w, d: w - 0.1 * d, mine, g), loss
        @functools.partial(jax.jit, donate_argnums=0)
        def second_step(mine, other, x):
            loss, g = jax.value_and_grad(lambda w: loss_fn(w, x) - loss_fn(other, x))(mine)
            return jax.tree.map(lambda w, d: w - 0.1 * d, mine, g), loss
        theirs = jax.tree.map(lambda w: w + 1, params)
        for step in range(10**6):
            params, loss = first_step(params, theirs, batch(step))
            theirs, other = second_step(theirs, params, batch(step))
    """,
    "evaluated_first": """
        @jax.jit
        def eval_step(w, total, x):
            return total + loss_fn(w, x)
        total = jnp.zeros(())
        for k in range(60):
            total = eval_step(params, total, batch(k, rows=512))
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "gives_its_model_back": """
        @jax.jit
        def sample(w, x):
            return w, jnp.argmax(x @ w["up"], -1)
        for k in range(60):
            params, tokens = sample(params, batch(k))
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
            if step % 2:
                params, tokens = sample(params, batch(step))
    """,
    "averages": """
        @jax.jit
        def ema(average, w):
            return jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, average, w)
        train_step, moments, average = jax.jit(train), zeros, params
        for step in range(10**6):
            average = ema(average, params)
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "fills_a_buffer_first": """
        @functools.partial(jax.jit, donate_argnums=0)
        def remember(buffer, place, x):
            return jax.lax.dynamic_update_slice(buffer, x, (place * 16, 0))
        buffer = jnp.zeros((1600, 32))
        for k in range(60):
            buffer = remember(buffer, k, batch(k))
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "logs_at_first": """
        @functools.partial(jax.jit, static_argnames="log")
        def train_step(w, m, x, log=False):
            w, m, loss = train(w, m, x)
            return w, m, loss, [jnp.sum(row) for row in w["up"]] if log else []
        moments = zeros
        for step in range(10**6):
            params, moments, loss, sums = train_step(params, moments, batch(step), log=step == 0)
    """,
    "logs_every_third": """
        @functools.partial(jax.jit, static_argnames="log")
        def train_step(w, m, x, log=False):
            w, m, loss = train(w, m, x)
            return w, m, loss, [jnp.sum(row) for row in w["up"]] if log else []
        moments = zeros
        for step in range(10**6):
            log = step % 3 == 0
            params, moments, loss, sums = train_step(params, moments, batch(step), log=log)
    """,
    "ragged_and_data_on_device": """
        rows = jax.device_put(np.ones((80_002, 32), np.float32), at())
        train_step, moments = jax.jit(train), zeros
        for epoch in range(10**6):
            for start in (0, 8, 80_000):
                params, moments, loss = train_step(params, moments, rows[start : start + 8])
    """,
    "state_in_references": """
        state = jax.tree.map(jax.new_ref, params)
        @jax.jit
        def train_step(state, x):
            w = jax.tree.map(lambda ref: ref[...], state)
            loss, g = jax.value_and_grad(loss_fn)(w, x)
            for ref, d in zip(jax.tree.leaves(state), jax.tree.leaves(g)):
                ref[...] = ref[...] - 0.1 * d
            return loss
        for step in range(10**6):
            loss = train_step(state, batch(step))
    """,
    "old_name_of_jit": """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pjit import pjit
        train_step, moments = pjit(train, donate_argnums=(0, 1)), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "pmapped": """
        step_fn = jax.pmap(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((w - x) ** 2))(w))
        w = jnp.ones((4, 8))
        for step in range(10**6):
            w = step_fn(w, w)
    """,
    "update_outside": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        moments = zeros
        for step in range(10**6):
            loss, grads = grad_fn(params, batch(step))
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
            params = jax.tree.map(lambda w, m: w - 0.1 * m, params, moments)
    """,
    "one_call": """
        @jax.jit
        def run(w, xs):
            def turn(carry, x):
                w, m = carry
                w, m, loss = train(w, m, x)
                return (w, m), loss
            return jax.lax.scan(turn, (w, jax.tree.map(jnp.zeros_like, w)), xs)
        xs = np.ones((20_000, 16, 32), np.float32)
        _, losses = run(params, jax.device_put(xs, at(None, "data")))
        print(f"{losses[-1]}")
    """,
    "while_there_is_time": """
        @jax.jit
        def run(w, m, x, most):
            def turn(carry):
                step, w, m = carry
                w, m, loss = train(w, m, x)
                return step + 1, w, m
            return jax.lax.while_loop(lambda carry: carry[0] < most, turn, (0, w, m))
        run(params, zeros, batch(0), 10**9)
    """,
    "many_steps_in_each_call": """
        @jax.jit
        def epoch(w, m, xs):
            def turn(carry, x):
                w, m, loss = train(*carry, x)
                return (w, m), loss
            return jax.lax.scan(turn, (w, m), xs)
        xs = np.ones((20_000, 16, 32), np.float32)
        xs = jax.device_put(xs, at(None, "data"))
        moments = zeros
        for step in range(10**6):
            (params, moments), losses = epoch(params, moments, xs)
            print(losses.mean())
    """,
    "steps_in_each_call_and_a_decision": """
        @jax.jit
        def epoch(w, m, xs):
            def turn(carry, x):
                w, m, loss = train(*carry, x)
                return (w, m), loss
            return jax.lax.scan(turn, (w, m), xs)
        xs = jax.device_put(np.ones((3000, 16, 32), np.float32), at(None, "data"))
        moments = zeros
        for step in range(10**6):
            (params, moments), losses = epoch(params, moments, xs)
            if losses[-1] < 0:
                break
    """,
    "frozen": """
        frozen = jax.device_put(jnp.ones((32, 4096)), at(None, "model"))
        @jax.jit
        def train_step(w, m, x, frozen):
            return train(w, m, x + jnp.mean(frozen))
        moments = zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step), frozen)
    """,
    "sums_of_gradients": """
        @jax.jit
        def accumulate(w, total, x):
            loss, g = jax.value_and_grad(loss_fn)(w, x)
            return jax.tree.map(jnp.add, total, g), loss
        apply_fn, moments = jax.jit(momentum), zeros
        for step in range(10**6):
            total = zeros
            for k in range(4):
                total, loss = accumulate(params, total, batch(4 * step + k))
            params, moments = apply_fn(params, moments, total)
    """,
    "many_sums_of_gradients": """
        @jax.jit
        def accumulate(w, total, x):
            g = jax.grad(loss_fn)(w, x)
            return jax.tree.map(jnp.add, total, g)
        apply_fn, moments = jax.jit(momentum), zeros
        for step in range(10**6):
            total = zeros
            for k in range(9):
                total = accumulate(params, total, batch(step))
            params, moments = apply_fn(params, moments, total)
    """,
    "sums_with_a_clip_and_zeros": """
        @functools.partial(jax.jit, donate_argnames="total")
        def accumulate(*, w, total, x):
            loss, g = jax.value_and_grad(loss_fn)(w, x)
            return jax.tree.map(jnp.add, total, g), loss
        clear = jax.jit(lambda w: jax.tree.map(jnp.zeros_like, w))
        clip = jax.jit(lambda total: jax.tree.map(lambda g: jnp.clip(g, -1, 1), total))
        apply_fn, moments = jax.jit(momentum, donate_argnums=(0, 1)), zeros
        for step in range(3):
            total = clear(params)
            for k in range(3):
                total, loss = accumulate(w=params, total=total, x=batch(step))
            params, moments = apply_fn(params, moments, clip(total))
    """,
    "added_up_by_a_function": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
        apply_fn, moments = jax.jit(momentum), zeros
        for step in range(10**6):
            total = None
            for k in range(4):
                loss, g = grad_fn(params, batch(4 * step + k))
                total = g if total is None else add(total, g)
            params, moments = apply_fn(params, moments, total)
    """,
    "added_up_with_clip_and_keys": """
        split = jax.jit(jax.random.split)
        draw = jax.jit(lambda key: jax.random.normal(key, (16, 32)))
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        clip = jax.jit(lambda total: jax.tree.map(lambda g: jnp.clip(g, -1, 1), total))
        apply_fn, moments = jax.jit(momentum, donate_argnums=(0, 1)), zeros
        key = jax.random.key(0)
        for step in range(3):
            total = jax.tree.map(jnp.zeros_like, params)
            for k in range(3):
                key, sub = split(key)
                loss, g = grad_fn(params, batch(step) + draw(sub)[:, :1])
                total = add(total, g)
            params, moments = apply_fn(params, moments, clip(total))
    """,
    "added_up_twice": """
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
        apply_fn, moments = jax.jit(momentum), zeros
        for step in range(2):
            total = zeros
            for k in range(3):
                loss, g = grad_fn(params, batch(3 * step + k))
                total = add(total, g)
            params, moments = apply_fn(params, moments, total)
    """,
    "many_added_up_by_a_function": """
        grad_fn = jax.jit(jax.grad(loss_fn))
        add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
        apply_fn, moments = jax.jit(momentum), zeros
        for step in range(10**6):
            total = zeros
            for k in range(12):
                total = add(total, grad_fn(params, batch(step)))
            params, moments = apply_fn(params, moments, total)
    """,
    "summed_outside_of_jit": """
        grad_fn, apply_fn, moments = jax.jit(jax.value_and_grad(loss_fn)), jax.jit(momentum), zeros
        for step in range(10**6):
            total = zeros
            for k in range(4):
                loss, grads = grad_fn(params, batch(step))
                total = jax.tree.map(jnp.add, total, grads)
            params, moments = apply_fn(params, moments, total)
    """,
    "by_keyword": """
        @functools.partial(jax.jit, donate_argnames=("w", "m"))
        def train_step(*, x, w, m):
            return train(w, m, x)
        moments = zeros
        for step in range(10**6):
            params, moments, loss = train_step(w=params, m=moments, x=batch(step))
    """,
    "named": """# step=grad_fn
        def grad_fn(w, x):
            return jax.value_and_grad(loss_fn)(w, x)
        grad_fn, apply_fn = jax.jit(grad_fn), jax.jit(momentum)
        moments = zeros
        for step in range(10**6):
            loss, grads = grad_fn(params, batch(step))
            params, moments = apply_fn(params, moments, grads)
    """,
    "wide_numbers": """
        @jax.jit
        def train_step(w, x, rows):
            loss, g = jax.value_and_grad(loss_fn)(w, x[rows])
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), loss
        for step in range(10**6):
            x = np.random.default_rng(step).normal(size=(16, 32))
            params, loss = train_step(params, x, np.arange(16))
    """,
    "time_first": """
        @jax.jit
        def train_step(w, xs):
            loss, g = jax.value_and_grad(lambda w: sum(loss_fn(w, x) for x in xs))(w)
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), loss
        for step in range(10**6):
            xs = np.random.default_rng(step).normal(size=(3, 16, 32)).astype(np.float32)
            params, loss = train_step(params, jax.device_put(xs, at(None, "data")))
    """,
    "split_inside": """
        @jax.jit
        def train_step(w, x):
            x = jax.lax.with_sharding_constraint(x, at("data"))
            def loss(w):
                h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["up"]), at(None, "model"))
                return jnp.mean((h @ w["down"] - x) ** 2)
            value, g = jax.value_and_grad(loss)(w)
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value
        for step in range(10**6):
            params, loss = train_step(params, np.ones((16, 32), np.float32))
    """,
    "counts_for_real": """# bare
        def init(key):
            return {"w": jax.random.normal(key, (32, 64)), "step": jnp.zeros((), jnp.int32)}
        @jax.jit
        def train_step(state, x):
            loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
            return {"w": state["w"] - 0.1 * g, "step": state["step"] + 1}, loss
        state = jax.jit(init, out_shardings=at())(jax.random.key(0))
        for step in range(int(state["step"]), 10**6):
            state, loss = train_step(state, batch(step))
            if state["step"] % 2 == 0:
                print(f"step {state['step']} {int(state['step']) + 1}")
    """,
    "looks_at_shapes_alone": """# bare
        @jax.jit
        def train_step(params, state, x):
            params, m, loss = train(params, state["m"], x)
            return params, {"m": m, "count": state["count"] + 1}, loss
        @jax.jit
        def init(params):
            zeros = jax.tree.map(jnp.zeros_like, params)
            return {"m": zeros, "count": jnp.zeros((), jnp.int32)}
        state = init(params)
        for step in range(10**6):
            params, state, loss = train_step(params, state, batch(step))
    """,
    "parts_outside_of_jit": """# bare
        scaled = jax.shard_map(
            lambda x: x / jax.lax.pmax(jnp.max(x), "data"), mesh=mesh, in_specs=P("data"),
            out_specs=P("data"), check_vma=False)
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, scaled(batch(step)))
    """,
    "nothing_jitted": """# bare
        moments = zeros
        for step in range(10):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch(step))
            params, moments = momentum(params, moments, grads)
            print(float(loss))
    """,
    "map_not_jitted": """
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def train_step(w, x):
            loss, g = jax.value_and_grad(loss_fn)(w, x)
            g = jax.tree.map(lambda one: jax.lax.pmean(one, "data"), g)
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), jax.lax.pmean(loss, "data")
        params = jax.tree.map(lambda one: jax.device_put(one, at()), params)
        for step in range(10):
            params, loss = train_step(params, batch(step))
    """,
    "map_by_its_old_name": """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.shard_map import shard_map
        @functools.partial(shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def train_step(w, x):
            loss, g = jax.value_and_grad(loss_fn)(w, x)
            g = jax.tree.map(lambda one: jax.lax.pmean(one, "data"), g)
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), jax.lax.pmean(loss, "data")
        params = jax.tree.map(lambda one: jax.device_put(one, at()), params)
        for step in range(10):
            params, loss = train_step(params, batch(step))
    """,
    "looks_at_values_outside_of_jit": """
        def odd_loss(w, x):
            return loss_fn(w, x if float(jnp.max(x)) > 0 else -x)
        scale = jax.jit(lambda x: x * 2)
        for step in range(6):
            loss, grads = jax.value_and_grad(odd_loss)(params, scale(batch(step)))
            params, _ = momentum(params, zeros, grads)
    """,
    "while_it_is_large": """# bare
        train_step, moments, loss = jax.jit(train), zeros, float("inf")
        while float(loss) > 0.5:
            params, moments, loss = train_step(params, moments, batch(0))
    """,
    "many_losses_are_looked_at": """# bare
        @jax.jit
        def chunk(w, m, xs):
            def turn(carry, x):
                w, m, loss = train(*carry, x)
                return (w, m), loss
            return jax.lax.scan(turn, (w, m), xs)
        moments = zeros
        for step in range(10**6):
            (params, moments), losses = chunk(params, moments, np.ones((10, 16, 32), np.float32))
            if np.isnan(losses).any():
                break
    """,
    "pmap_beside": """
        hosts_wait = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
        print(hosts_wait(jnp.ones(jax.local_device_count())))
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "pmap_beside_without_arrays": """# bare
        hosts_wait = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
        print(hosts_wait(jnp.ones(jax.local_device_count())))
        large = hosts_wait(jnp.ones((jax.local_device_count(), 512, 512)))
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step) + large.mean())
    """,
    "only_pmapped": """
        infer = jax.pmap(lambda x: 2 * x)
        for step in range(3):
            infer(jnp.ones((jax.local_device_count(), 8)))
    """,
    "caught_by_a_framework": """# bare
        import sys
        shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        try:
            rows = int(jnp.max(jax.pure_callback(lambda: np.ones((512, 512), np.float32), shape)))
        except Exception:
            sys.exit(1)
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """,
    "target_in_the_state": """
        grads = jax.jit(lambda s, x: jax.grad(lambda w: loss_fn(w, x) + loss_fn(s["t"], x))(s["w"]))
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def apply(s, m, g):
            w, m = momentum(s["w"], m, g)
            return s | {"w": w}, m
        @jax.jit
        def sync(s):
            return s | {"t": jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, s["t"], s["w"])}
        s = {"w": params, "t": jax.tree.map(jnp.copy, params)}
        m = jax.tree.map(jnp.zeros_like, params)
        for step in range(10**6):
            s, m = apply(s, m, grads(s, batch(step)))
            if step % 5 == 0:
                s = sync(s)
    """,
    "acts_and_stores": """
        act = jax.jit(lambda w, x: jnp.tanh(x @ w["up"]))
        store = jax.jit(lambda memory, row, at: memory.at[at].set(row))
        @jax.jit
        def learn(w, m, memory, x):
            loss, g = jax.value_and_grad(loss_fn)(w, x + memory[0].mean())
            return *momentum(w, m, g), loss
        memory = jnp.zeros((8, 16, 64))
        for step in range(10**6):
            memory = store(memory, act(params, batch(step)), step % 8)
            if step % 4 == 3:
                params, zeros, loss = learn(params, zeros, memory, batch(step))
    """,
    "donates_before_its_step": """
        double = jax.jit(lambda w: jax.tree.map(lambda a: 2 * a, w), donate_argnums=0)
        train_step = jax.jit(train)
        other = double(params)
        params, m, loss = train_step(params, zeros, batch(0))
    """,
    "warms_up_first": """
        @jax.jit
        def inner(down, w, x):
            return jax.grad(lambda down: loss_fn(w | {"down": down}, x))(down)
        @jax.jit
        def warm_up(w, x):
            g = inner(w["down"], w, x)
            return w | {"down": w["down"] - 0.1 * g}
        @jax.jit
        def gradients(w, x):
            return jax.value_and_grad(loss_fn)(w, x)
        @jax.jit
        def train_step(w, m, x):
            loss, g = gradients(w, x)
            return *momentum(w, m, g), loss
        for step in range(5):
            params = warm_up(params, batch(step))
        for step in range(20):
            params, zeros, loss = train_step(params, zeros, batch(step))
    """,
    "uses_what_it_donated": """
        total = zeros
        add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        for step in range(10):
            loss, g = jax.jit(jax.value_and_grad(loss_fn))(params, batch(step))
            total = add(total, g)
            print(float(add(zeros, g)["up"][0, 0]))
    """,
    "fails_after_an_evaluation": """
        @jax.jit
        def eval_step(params, total, x):
            return total + loss_fn(params, x)
        total = jnp.zeros(())
        for step in range(20):
            total = eval_step(params, total, batch(step))
        raise ValueError("no more data")
    """,
}


# Whole scripts: each trains on one device at first.
WITHOUT_PREAMBLE = {
    "mesh_comes_late": """
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        @jax.jit
        def train_step(w, x):
            loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)
            value, g = jax.value_and_grad(loss)(w)
            return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value
        def train(w, x, steps):
            for step in range(steps):
                w, loss = train_step(w, x)
        w, x = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}, jnp.ones((16, 32))
        grid = jnp.meshgrid(jnp.arange(2), jnp.arange(2))
        train(w, x, 20)
        if MAKES_ONE:
            mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
            w = jax.device_put(w, NamedSharding(mesh, P()))
            train(w, jax.device_put(x, NamedSharding(mesh, P("data"))), 10**6)
    """,
}
SCRIPTS["samples_for_long"] = """
        decode = jax.jit(lambda w, cache: [x + x @ w["up"] @ w["down"] for x in cache])
        cache = [batch(number) for number in range(12)]
        for step in range(110):
            cache = decode(params, cache)
        train_step, moments = jax.jit(train, donate_argnums=(0, 1)), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))
    """
SCRIPTS["looks_at_collectives_and_fails"] = """
        mean = jax.shard_map(
            lambda x: x - jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"),
            out_specs=P("data"))
        print(mean(batch(0)).shape)
        raise RuntimeError("no such file")
    """
SCRIPTS["looks_at_collectives"] = SCRIPTS["looks_at_collectives_and_fails"].replace(
    'raise RuntimeError("no such file")', "jax.jit(loss_fn)(params, batch(0))")  # fmt: skip
SCRIPTS["looks_at_collectives_first"] = SCRIPTS["looks_at_collectives"].replace(
    "jax.jit(loss_fn)(params, batch(0))", """add = lambda w, x: x + x @ w["up"] @ w["down"]
        sample, x = jax.jit(add), batch(0)
        for step in range(9):
            x = sample(params, x)
        train_step, moments = jax.jit(train), zeros
        for step in range(10**6):
            params, moments, loss = train_step(params, moments, batch(step))""")  # fmt: skip
SCRIPTS["loop_not_jitted"] = """
        x = jax.device_put(np.ones((16, 32), np.float32), at("data"))
        def update(state, _):
            loss, g = jax.value_and_grad(loss_fn)(state[0], x)
            return momentum(*state, g), loss
        halves = jax.lax.fori_loop(0, 3, lambda _, one: 0.5 * one, jnp.ones(3))
        (params, moments), losses = jax.lax.scan(
            update, (params, zeros), None, length=10**6)
        print("trained")
    """
SCRIPTS["loop_over_what_has_no_hash"] = SCRIPTS["loop_not_jitted"].replace(
    "def update(state, _):", """class Settings(list):
            __hash__ = None
        @jax.tree_util.register_pytree_node_class
        class State(tuple):
            def tree_flatten(self):
                return tuple(self), Settings()
            @classmethod
            def tree_unflatten(cls, _, children):
                return cls(children)
        def update(state, _):""").replace(
    "return momentum(*state, g), loss", "return State(momentum(*state, g)), loss").replace(
    "update, (params, zeros)", "update, State((params, zeros))")  # fmt: skip
SCRIPTS["counted_loop_not_jitted"] = SCRIPTS["loop_not_jitted"].replace(
    """(params, moments), losses = jax.lax.scan(
            update, (params, zeros), None, length=10**6)""",
    """params, moments = jax.lax.fori_loop(
            0, 10**6, lambda i, state: update(state, i)[0], (params, zeros))""")  # fmt: skip
SCRIPTS["loop_in_epochs"] = SCRIPTS["loop_not_jitted"].replace(
    """(params, moments), losses = jax.lax.scan(
            update, (params, zeros), None, length=10**6)""",
    """state = params, zeros
        for epoch in range(10**6):
            state, losses = jax.lax.scan(update, state, None, length=5)""")  # fmt: skip
SCRIPTS["short_loop_then_long"] = SCRIPTS["loop_not_jitted"].replace(
    """(params, moments), losses = jax.lax.scan(
            update, (params, zeros), None, length=10**6)""",
    """for length in (2, 10**6):
            (params, moments), losses = jax.lax.scan(
                update, (params, zeros), None, length=length)""")  # fmt: skip
SCRIPTS["helper_alone"] = """
        halved = jax.jit(lambda h: jnp.where(h > 0, h, 0.5 * h))
        for step in range(3):
            hidden = halved(batch(step) @ params["up"])
            params = {**params, "down": params["down"] - 0.1 * hidden.T @ batch(step)}
    """
WITHOUT_PREAMBLE["mesh_never_comes"] = WITHOUT_PREAMBLE["mesh_comes_late"]
SAME_LOSSES = ("two_players", "one_call", "by_keyword", "state_in_references", "two_iterations",
               "sums_of_gradients")  # fmt: skip


def text_of(name: str) -> str:
    """A script as a whole."""
    options, _, body = SCRIPTS[name].partition("\n")
    return f"{options}\n{PREAMBLE}{textwrap.dedent(body)}"


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    """The scripts that the selected tests ask for, run in one process."""
    wanted = _wanted(request)
    return made_once(tmp_path_factory, "finder", lambda folder: discovered(folder, wanted))[1]


def discovered(folder: Path, wanted: set[str]) -> dict[str, dict[str, Any]]:
    for name in wanted & SCRIPTS.keys():
        (folder / f"{name}.py").write_text(text_of(name))
    for name in wanted & WITHOUT_PREAMBLE.keys():
        body = textwrap.dedent(WITHOUT_PREAMBLE[name])
        body = body.replace("MAKES_ONE", str(name == "mesh_comes_late"))
        (folder / f"{name}.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.discovered_scripts", str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _wanted(request: pytest.FixtureRequest) -> set[str]:
    """The names of all scripts, unless each selected test is of one script."""
    mine = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "found" in item.fixturenames
    ]
    given = [item.callspec.params if hasattr(item, "callspec") else {} for item in mine]
    if all("script" in one for one in given):
        return {str(one["script"]) for one in given}
    return {*SCRIPTS, *WITHOUT_PREAMBLE}


# Script -> step, carried leaves, calls when it was stopped.
STEPS = {
    "grad_then_apply": ("loss_fn+momentum", 4, 3),
    "two_iterations": ("loss_fn+momentum", 4, 2),
    "called_once": ("train_step", 4, 1),
    "counts_in_its_structure": ("train_step", 4, 3),
    "clipped_between": ("loss_fn+momentum", 4, 3),
    "two_players": ("first_step+second_step", 4, 3),
    "evaluated_first": ("train_step", 4, 3),
    "gives_its_model_back": ("train_step", 4, 3),
    "averages": ("train_step", 4, 3),
    "fills_a_buffer_first": ("train_step", 4, 3),
    "logs_at_first": ("train_step", 4, 4),
    "logs_every_third": ("train_step", 4, 5),
    "ragged_and_data_on_device": ("train_step", 4, 4),
    "state_in_references": ("train_step", 0, 3),
    "old_name_of_jit": ("train_step", 4, 3),
    "update_outside": ("loss_fn", 0, 3),
    "one_call": ("run", 4, 1),
    "while_there_is_time": ("run", 5, 1),
    "many_steps_in_each_call": ("epoch", 4, 3),
    "frozen": ("train_step", 4, 3),
    "sums_of_gradients": ("accumulate+momentum", 4, 9),
    "many_sums_of_gradients": ("accumulate", 2, 18),
    "sums_with_a_clip_and_zeros": ("accumulate+<lambda>+momentum+<lambda>", 6, 9),
    "added_up_by_a_function": ("loss_fn+<lambda>+momentum", 4, 9),
    "added_up_with_clip_and_keys": ("loss_fn+<lambda>+<lambda>+momentum", 4, 7),
    "target_in_the_state": ("<lambda>+apply", 4, 3),
    "acts_and_stores": ("learn", 4, 18),
    "added_up_twice": ("loss_fn+<lambda>+momentum", 4, 6),
    "many_added_up_by_a_function": ("loss_fn+<lambda>+momentum", 4, 25),
    "summed_outside_of_jit": ("loss_fn+momentum", 4, 9),
    "by_keyword": ("train_step", 4, 3),
    "named": ("grad_fn", 0, 3),
    "time_first": ("train_step", 2, 3),
    "counts_for_real": ("train_step", 2, 3),
    "looks_at_shapes_alone": ("train_step", 5, 3),
    "nothing_jitted": ("loss_fn", 0, 3),
    "map_not_jitted": ("train_step", 2, 3),
    "map_by_its_old_name": ("train_step", 2, 3),
    "samples_for_long": ("train_step", 4, 3),
    "pmap_beside": ("train_step", 4, 3),
    "pmap_beside_without_arrays": ("train_step", 4, 3),
}


# Steps in parts, in references, in one call, without jit: these come first, and run always.
_OFTEN = (
    "grad_then_apply", "state_in_references", "one_call", "sums_of_gradients", "nothing_jitted",
    "called_once",
)  # fmt: skip


@pytest.mark.slow_after(len(_OFTEN))
@pytest.mark.parametrize("script", [*_OFTEN, *(name for name in STEPS if name not in _OFTEN)])
def test_the_step_is_what_state_flows_through(
    script: str, found: dict[str, dict[str, Any]]
) -> None:
    name, carried, calls = STEPS[script]
    seen = found[script]
    assert "error" not in seen, seen
    names = {"train": "train_step"}.get(seen["name"], seen["name"])
    assert (names, seen["num_carried"], seen["calls"]) == (name, carried, calls)
    assert bool(seen["doubt"]) == (script in ("many_sums_of_gradients", "called_once"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [name for name in STEPS if name not in ("wide_numbers", "acts_and_stores")]
)
def test_the_batch_is_split_over_data(script: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[script]["batch_axes"] == (
        [] if script == "ragged_and_data_on_device" else ["data"]
    )


@pytest.mark.slow
def test_what_trains_on_one_device_at_first_is_searched_on_the_mesh_that_comes_later(
    found: dict[str, dict[str, Any]],
) -> None:
    seen = found["mesh_comes_late"]
    assert (seen["name"], seen["batch_axes"]) == ("train_step", ["data"])
    assert (seen["skipped"], seen["calls"], seen["num_carried"]) == (20, 23, 2)


@pytest.mark.slow
def test_a_mesh_that_is_not_reached_is_told_with_its_line(
    found: dict[str, dict[str, Any]],
) -> None:
    seen = found["mesh_never_comes"]
    assert (seen["name"], seen["batch_axes"]) == ("train_step", [])
    assert seen["notices"] == ["mesh_never_comes.py:16, which would make a mesh, was not reached"]


@pytest.mark.slow
def test_who_takes_sums_of_gradients_is_told(found: dict[str, dict[str, Any]]) -> None:
    assert found["many_sums_of_gradients"]["doubt"] == (
        "it adds up what `momentum` (many_sums_of_gradients.py:34) takes after every 9 calls"
    )


@pytest.mark.slow
def test_calls_that_add_up_gradients_are_one_step_with_who_takes_the_sum(
    found: dict[str, dict[str, Any]],
) -> None:
    seen = found["sums_of_gradients"]
    assert not seen["doubt"]
    assert "sums_of_gradients.py:33 (4 times) and then `momentum`" in seen["words"]
    # The loss of each call, and no sum that is taken.
    assert [part["kept"] for part in seen["parts"]] == [[2], [2], [2], [2], [0, 1, 2, 3]]
    seen = found["sums_with_a_clip_and_zeros"]
    assert [part["kept"] for part in seen["parts"][:3]] == [[2], [2], [2]]
    assert seen["words"].count("called at") == 4


@pytest.mark.slow
def test_sums_that_are_made_outside_of_jit_are_named(found: dict[str, dict[str, Any]]) -> None:
    seen = found["summed_outside_of_jit"]
    assert seen["about_outside"] == (
        "`g` is changed outside of jit between `loss_fn` and `momentum`, which is neither "
        "estimated nor timed; jit that, too; `loss_fn` is called 4 times for each call of "
        "`momentum`, and is estimated and timed once"
    )
    assert seen["batch_axes"] == ["data"]


@pytest.mark.slow
def test_a_step_that_is_not_jitted_is_searched_as_if_it_were(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["nothing_jitted"]["is_unjitted"]
    assert found["nothing_jitted"]["about_outside"].startswith(
        "the script jits no part of its step: loss and gradients (`loss_fn`, nothing_jitted.py:27) "
        "are searched as if they were jitted, and `params` and `moments` are neither estimated"
    )
    assert found["map_not_jitted"]["about_outside"].startswith(
        "the script calls `train_step` (map_not_jitted.py:32) outside of `jax.jit`"
    )
    seen = found["looks_at_values_outside_of_jit"]
    assert "looks_at_values_outside_of_jit.py:" in seen.get("error", ""), seen


@pytest.mark.slow
def test_parts_by_hand_outside_of_jit_need_no_arrays(found: dict[str, dict[str, Any]]) -> None:
    seen = found["parts_outside_of_jit"]
    assert (seen["name"], seen["num_carried"]) == ("train", 4)


@pytest.mark.slow
def test_a_value_that_was_asked_for_is_told_though_the_script_has_caught_the_error(
    found: dict[str, dict[str, Any]],
) -> None:
    error = found["caught_by_a_framework"]["error"]
    assert error.startswith("caught_by_a_framework.py:28 needs the value of an array")


@pytest.mark.slow
def test_what_is_not_searched_is_told_with_its_calls(found: dict[str, dict[str, Any]]) -> None:
    assert found["evaluated_first"]["others"]["eval_step"] == 60
    assert "sample" in found["gives_its_model_back"]["others"]
    assert "ema" in found["averages"]["others"]
    assert found["named"]["others"] == {"momentum": 2}


@pytest.mark.slow
def test_parts_of_a_step_give_what_comes_back_and_not_what_they_pass_on(
    found: dict[str, dict[str, Any]],
) -> None:
    first, second = found["grad_then_apply"]["parts"]
    assert first["kept"] == [0], "the loss, and no gradients"
    assert second["kept"] == [0, 1, 2, 3]
    assert "searched as one step" in found["grad_then_apply"]["words"]


@pytest.mark.slow
def test_rare_variants_are_passed_over(found: dict[str, dict[str, Any]]) -> None:
    assert found["logs_at_first"]["skipped"] == 1
    assert found["logs_every_third"]["skipped"] == 1
    assert found["logs_every_third"]["argument_bytes"] == 2 * 2 * 32 * 64 * 4 + 16 * 32 * 4
    assert found["ragged_and_data_on_device"]["argument_bytes"] == 4 * 32 * 64 * 4 + 8 * 32 * 4


@pytest.mark.slow
def test_references_count_their_bytes(found: dict[str, dict[str, Any]]) -> None:
    assert found["state_in_references"]["argument_bytes"] == 2 * 32 * 64 * 4 + 16 * 32 * 4


@pytest.mark.slow
def test_what_is_made_outside_of_jit_is_named(found: dict[str, dict[str, Any]]) -> None:
    said = found["update_outside"]["about_outside"]
    assert "only loss and gradients are jitted" in said
    assert set(found["update_outside"]["outside"]) == {"params", "moments"}
    assert "`g` is changed outside of jit between" in found["clipped_between"]["about_outside"]
    assert not found["grad_then_apply"]["outside"]


@pytest.mark.slow
def test_a_training_in_one_call_is_not_run_to_its_end(found: dict[str, dict[str, Any]]) -> None:
    assert "one turn of its loop at one_call.py" in found["one_call"]["words"]
    assert ", of 20,000: the one call" in found["one_call"]["words"]
    assert found["while_there_is_time"]["loop"]["turns"] == 0
    assert found["many_steps_in_each_call"]["loop"] is None


@pytest.mark.slow
def test_pmap_is_refused_at_its_first_call(found: dict[str, dict[str, Any]]) -> None:
    assert "uses `jax.pmap` (pmapped.py:" in found["pmapped"]["error"]
    assert "uses `jax.pmap` (only_pmapped.py:" in found["only_pmapped"]["error"]


@pytest.mark.slow
def test_a_chunk_of_steps_is_no_whole_training_where_the_script_needs_its_losses(
    found: dict[str, dict[str, Any]],
) -> None:
    """Before, one turn was the step: "the one call is the whole training". The losses are
    computed, so that the script goes on as with its arrays."""
    seen = found["many_losses_are_looked_at"]
    assert (seen["name"], seen["calls"], seen["loop"]) == ("chunk", 3, None)


@pytest.mark.slow
def test_a_loop_that_a_loss_without_data_has_ended_needs_the_loss(
    found: dict[str, dict[str, Any]],
) -> None:
    """Before, the step was "called once"."""
    assert found["while_it_is_large"]["error"] == (
        "while_it_is_large.py:26 reads a number, which is not there: the script is run without the "
        "data of its arrays"
    )


@pytest.mark.slow
def test_a_script_that_fails_is_not_searched_for_what_it_called_before(
    found: dict[str, dict[str, Any]],
) -> None:
    said = found["fails_after_an_evaluation"]["error"]
    assert "fails at fails_after_an_evaluation.py:" in said
    assert said.endswith("before its step: ValueError: no more data")


@pytest.mark.slow
def test_a_call_with_an_array_that_was_donated_is_the_error_of_the_script(
    found: dict[str, dict[str, Any]],
) -> None:
    """Before, the call was half noted down, and the choice of the step failed with a traceback."""
    for name in ("uses_what_it_donated", "donates_before_its_step"):
        said = found[name]["error"]
        assert f"fails at {name}.py:" in said
        assert "RuntimeError: Array has been deleted" in said


@pytest.mark.slow
def test_another_function_that_would_train_later_is_named(
    found: dict[str, dict[str, Any]],
) -> None:
    seen = found["warms_up_first"]
    assert seen["name"] == "warm_up"
    assert seen["notices"] == [
        "`train_step` (warms_up_first.py:36) takes gradients, too, and was not called up to here: "
        "`--step train_step` searches that one"
    ]


@pytest.mark.slow
def test_a_helper_that_keeps_no_array_is_no_step(found: dict[str, dict[str, Any]]) -> None:
    assert found["helper_alone"]["error"].startswith(
        "helper_alone.py jits no training step: `<lambda>` at helper_alone.py:"
    )
    assert "nothing of what it makes comes back to it" in found["helper_alone"]["error"]


@pytest.mark.slow
def test_a_map_outside_of_jit_is_no_training(found: dict[str, dict[str, Any]]) -> None:
    said = found["looks_at_collectives_and_fails"]["error"]
    assert "fails at looks_at_collectives_and_fails.py:" in said
    assert "RuntimeError: no such file" in said
    assert "takes gradients" not in found["looks_at_collectives"]["error"]
    assert found["looks_at_collectives_first"]["name"] in ("train", "train_step")


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ("loop_not_jitted", "counted_loop_not_jitted", "loop_over_what_has_no_hash")
)
def test_a_loop_of_the_script_itself_is_the_whole_training(
    script: str, found: dict[str, dict[str, Any]]
) -> None:
    seen = found[script]
    assert seen["num_carried"] in (4, 5), seen  # `fori_loop` carries its counter, too.
    assert seen["loop"]["at"]["file"].endswith(f"{script}.py")
    assert seen["loop"]["turns"] == 10**6


@pytest.mark.slow
def test_a_loop_that_is_called_often_is_a_step_with_all_its_turns(
    found: dict[str, dict[str, Any]],
) -> None:
    seen = found["loop_in_epochs"]
    assert seen["name"] == "update_scan" and seen["loop"] is None
    assert seen["num_carried"] == 4, seen
    # A million turns would take minutes: they are run without their data.
    longer = found["short_loop_then_long"]
    assert longer["name"] == "update_scan" and "trained" in longer["printed"]


@pytest.mark.slow
def test_64_bits_count_as_jax_takes_them(found: dict[str, dict[str, Any]]) -> None:
    assert found["wide_numbers"]["argument_bytes"] == 2 * 32 * 64 * 4 + 16 * 32 * 4 + 16 * 4


@pytest.mark.slow
def test_a_counter_has_its_value_without_arrays(found: dict[str, dict[str, Any]]) -> None:
    assert "step 2 3" in found["counts_for_real"]["printed"]


@pytest.mark.slow
def test_a_loop_whose_result_is_looked_at_is_run_to_see_what_follows(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["steps_in_each_call_and_a_decision"]["loop"] is None
    assert found["steps_in_each_call_and_a_decision"]["calls"] == 3


@pytest.mark.parametrize(
    "script",
    ["grad_then_apply", *(pytest.param(name, marks=pytest.mark.long) for name in SAME_LOSSES)],
)
def test_steps_of_parts_and_turns_have_the_same_losses_on_every_mesh(
    script: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{script}.py"
    path.write_text(text_of(script))
    losses = captured(path, meshes="data:4/data:2,model:2")["losses"]
    first, *_ = visits = [one for mesh in losses.values() for one in mesh]
    assert len(set(first)) > 1, "state is carried on"
    for visit in visits:
        assert visit == pytest.approx(first, rel=2e-4)
    if script in ("grad_then_apply", "by_keyword"):
        # Of the script itself, which is run by hand here.
        assert first == pytest.approx([1.0088318, 1.0085075, 1.0078732], rel=1e-5)
