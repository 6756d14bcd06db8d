"""How often a broken step is caught by what a search compares, and a right one refused.

    python -m benchmarks.numerics_rates

40 steps that compute something else on a mesh of eight devices (a gradient that is not summed over
devices, summed instead of averaged, summed over the wrong axis, a shard of a parameter that is not
updated, a microbatch that is dropped), in float32 and bfloat16, at learning rates from 1e-2 to
1e-5, with SGD and with Adam; and 200 right ones (other meshes, rematerialization, microbatches,
seeds, in both types). Each is visited by a worker process as in a search, and compared by the
search's own check with the step on one device. The last line on stdout is JSON; progress goes to
stderr.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import Entry, Inspection, StepRef, VisitAnswer
from automesh.tuner.measure.numerics import Reference, check, compare_losses
from automesh.tuner.measure.schedule import Subject, VisitRules, record_losses
from automesh.worker.messages import InspectJob, Surroundings
from automesh.worker.pool import Pool
from benchmarks.support.visitors import Visitors, ask

DEVICES = 8
RULES = VisitRules(timeout_s=120.0)
BROKEN = ("not summed", "summed twice", "wrong axis", "stale shard", "dropped microbatch")
TYPES = ("float32", "bfloat16")
RATES = (1e-2, 1e-3, 1e-4, 1e-5)
MESHES = ((2, 1), (4, 1), (8, 1), (4, 2), (2, 4), (1, 8), (1, 2), (2, 2))
RIGHT = 200

SCRIPT = '''\
"""A perceptron of two layers whose parameters are float32, trained by SGD or Adam.

`broken` names what is wrong with the sum of gradients over devices; "" is right.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import automesh

WIDTH, HIDDEN, ROWS = 48, 192, 64


def build(mesh, broken="", dtype="float32", rate=1e-2, adam=False, remat=False, micro=1, seed=0):
    kind = jnp.dtype(dtype)

    def predict(params, x):
        layer = lambda w, h: jnp.tanh(h.astype(kind) @ w.astype(kind))
        if remat:
            layer = jax.checkpoint(layer)
        hidden = layer(params["up"], x)
        return (hidden @ params["down"].astype(kind)).astype(jnp.float32) + params["bias"]

    def loss_of(params, x, y):
        return jnp.mean((predict(params, x) - y) ** 2)

    def gradients(params, x, y):
        parts = max(micro, 4 if broken == "dropped microbatch" else 1)
        if parts == 1:
            return jax.value_and_grad(loss_of)(params, x, y)
        xs, ys = (a.reshape(parts, -1, *a.shape[1:]) for a in (x, y))

        def add(total, part):
            found = jax.value_and_grad(loss_of)(params, *part)
            return jax.tree.map(jnp.add, total, found), None

        zero = (0.0, jax.tree.map(jnp.zeros_like, params))
        if broken == "dropped microbatch":
            xs, ys = xs[1:], ys[1:]
        (loss, grads), _ = lax.scan(add, zero, (xs, ys))
        return jax.tree.map(lambda one: one / parts, (loss, grads))

    def update(state, grads):
        if not adam:
            params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
            return {**state, "params": params}
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, state["v"], grads)
        params = jax.tree.map(
            lambda p, a, b: p - rate * 10 * a / (jnp.sqrt(100 * b) + 1e-8), state["params"], m, v
        )
        return {"params": params, "m": m, "v": v}

    def right(state, x, y):
        loss, grads = gradients(state["params"], x, y)
        return update(state, grads), loss

    def wrong(state, x, y):
        loss, grads = gradients(state["params"], x, y)
        loss = lax.pmean(loss, "dp")
        if broken == "summed twice":
            grads = lax.psum(grads, "dp")
        elif broken == "wrong axis":
            grads = lax.pmean(grads, "tp")
        elif broken != "not summed":
            grads = lax.pmean(grads, "dp")
        new = update(state, grads)
        if broken == "stale shard":
            last = lax.axis_index("dp") == lax.axis_size("dp") - 1
            keep = lambda a, b: jnp.where(last, a, b)
            new = jax.tree.map(keep, state, new)
        return new, loss

    step = right
    if broken:
        step = jax.shard_map(
            wrong, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=(P(), P()),
            check_vma=False,
        )

    def shapes(place):
        state = {"params": {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (WIDTH,)}}
        specs = {"up": P(None, "tp"), "down": P("tp", None), "bias": P()}
        if broken:
            specs = dict.fromkeys(specs, P())
        if adam:
            state |= {"m": state["params"], "v": state["params"]}
        tree = {
            group: {name: place(shape, specs[name]) for name, shape in leaves.items()}
            for group, leaves in state.items()
        }
        return tree, place((ROWS, WIDTH), P("dp")), place((ROWS, WIDTH), P("dp"))

    def init(mesh):
        count = iter(range(99))

        def values(shape, spec):
            number = next(count)
            key = jax.random.fold_in(jax.random.key(seed), number)
            scale = 0.0 if number in range(3, 9) and adam else 0.2
            made = scale * jax.random.normal(key, shape, jnp.float32)
            return jax.device_put(made, NamedSharding(mesh, spec))

        return shapes(values)

    args = shapes(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, spec)
        )
    )
    return automesh.Workload(step, args, init=init)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step on one mesh, and whether it is right."""

    dp: int
    tp: int
    knobs: tuple[tuple[str, bool | int | float | str], ...]

    @property
    def plan(self) -> Plan:
        """As a search would name it."""
        axes = (MeshAxis(name="dp", ici=self.dp), MeshAxis(name="tp", ici=self.tp))
        return Plan(axes=axes, knobs=self.knobs)

    def reference(self) -> Plan:
        """The right step of the same model on one device."""
        kept = ("dtype", "rate", "adam", "seed")
        knobs = tuple((name, value) for name, value in self.knobs if name in kept)
        axes = (MeshAxis(name="dp", ici=1), MeshAxis(name="tp", ici=1))
        return Plan(axes=axes, knobs=knobs)


def broken_cases() -> list[Case]:
    """Every kind of error in both types at every learning rate, SGD and Adam in turn."""
    every = itertools.product(BROKEN, TYPES, RATES)
    return [
        Case(
            dp=4 if kind == "wrong axis" else DEVICES,
            tp=2 if kind == "wrong axis" else 1,
            knobs=(
                ("broken", kind),
                ("dtype", dtype),
                ("rate", rate),
                ("adam", number % 2 == 1),
                ("seed", number),
            ),
        )
        for number, (kind, dtype, rate) in enumerate(every)
    ]


def right_cases(count: int) -> list[Case]:
    """Meshes, types, optimizers, rematerialization and microbatches, drawn at random."""
    luck = random.Random(0)
    found: list[Case] = []
    for number in range(count):
        dp, tp = luck.choice(MESHES)
        knobs = (
            ("dtype", TYPES[number % 2]),
            ("rate", luck.choice(RATES)),
            ("adam", number % 4 >= 2),
            ("remat", luck.random() < 0.5),
            ("micro", luck.choice([1, 2, 4])),
            ("seed", number // 8),
        )
        found.append(Case(dp=dp, tp=tp, knobs=knobs))
    return found


@dataclass(slots=True, kw_only=True)
class Bench:
    """Visits cases in a worker process, as a search does."""

    visitors: Visitors
    subject: Subject
    references: dict[Plan, VisitAnswer]

    def visit(self, plan: Plan) -> VisitAnswer:
        answer = record_losses(self.visitors, self.subject, plan, rules=RULES)
        if not isinstance(answer, VisitAnswer):
            raise SystemExit(f"the benchmark's own step {plan} failed: {answer}")
        return answer

    def agrees(self, case: Case) -> tuple[bool, bool, str]:
        """Whether losses and updates agree, whether losses alone do, and what differs."""
        plan = case.reference()
        if plan not in self.references:
            self.references[plan] = self.visit(plan)
        known, here = self.references[plan], self.visit(case.plan)
        reference = Reference(
            name="one device", plan=(plan,), losses=known.losses, updates=known.updates
        )
        verdict, detail = check(reference, case.plan, here)
        alone = compare_losses(known.losses, here.losses, here.loss_dtype).verdict
        return verdict == "agree", alone == "agree", detail


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def main(
    right: Annotated[int, typer.Option(min=0, help="Right steps to compare.")] = RIGHT,
) -> None:
    """Compares broken and right steps with the step on one device."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        surroundings = Surroundings(platforms="cpu", cpu_devices=DEVICES)
        with Pool(
            size=1,
            surroundings=surroundings,
            log_dir=Path(directory) / "logs",
            memory_limit_bytes=4 * 2**30,
        ) as pool:
            script = Path(directory) / "train.py"
            script.write_text(SCRIPT)
            entry = Entry(kind="script", location=str(script))
            found = ask(pool, InspectJob(step=StepRef(entry=entry), axis_names=("dp", "tp")), 120.0)
            if not isinstance(found, Inspection):
                raise SystemExit(f"the benchmark's own script cannot be inspected: {found}")
            subject = Subject(
                step=StepRef(entry=entry, axis_types=found.axis_types, facts=found.facts),
                cache_dir=str(Path(directory) / "cache"),
            )
            bench = Bench(visitors=Visitors(pool=pool), subject=subject, references={})
            caught, by_losses = 0, 0
            cases = broken_cases()
            for case in cases:
                agrees, alone, detail = bench.agrees(case)
                caught, by_losses = caught + (not agrees), by_losses + (not alone)
                say(f"broken {case.plan}: {'NOT CAUGHT' if agrees else detail}")
            refused = 0
            for number, case in enumerate(right_cases(right)):
                agrees, _, detail = bench.agrees(case)
                refused += not agrees
                if not agrees:
                    say(f"right {case.plan}: REFUSED: {detail}")
                elif number % 20 == 0:
                    say(f"right {number}/{right}: {refused} refused")
    figures = {
        "broken": len(cases),
        "caught": caught,
        "caught_by_losses_alone": by_losses,
        "right": right,
        "refused": refused,
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
