"""A loss as a flat list of equations, in which the places of the cuts are visible (jax)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from automesh.errors import UsageError
from automesh_pipeline.runtime.split.marks import TaskRules, find_task, read_mark

# Calls that only wrap their body. Other equations with a body (loops, branches, rematerialization,
# custom derivatives) are indivisible.
_CALLS = ("jit", "pjit", "closed_call", "core_call")
# Transformations wrap the names of scopes: `jvp(layers_0)/dot`.
_SCOPES = re.compile(r"[^/()]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """One equation of a loss.

    Attributes:
      mark: the index of the leaf and the number of leaves, if it marks a value as the end of a
        stage.
      task: the stage that its scope is registered for.
    """

    eqn: core.JaxprEqn
    mark: tuple[int, int] | None
    task: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLoss:
    """A loss, traced and flattened as far as necessary to cut it.

    Attributes:
      params, batch: the variables of the leaves of the loss's arguments.
      constants: arrays that the loss closes over.
      result: what the loss returns.
      debug_info: the debug info of the loss, for jax's own messages.
    """

    params: tuple[core.Var, ...]
    batch: tuple[core.Var, ...]
    constants: Mapping[core.Var, Any]
    equations: tuple[Equation, ...]
    result: Any
    debug_info: Any


def trace_loss(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    mesh: Mesh,
    rules: TaskRules,
) -> TracedLoss:
    """Traces a loss with a mesh in force.

    Args:
      params: a tree of abstract arrays.
      batch: likewise, for one microbatch.
      mesh: a stage's submesh. The program is the same for every mesh of this shape: shardings on
        this mesh become abstract.
      rules: the rules of the tasks.

    Raises:
      UsageError: the loss does not return a float scalar, or is cut inside an indivisible equation.
    """
    with jax.set_mesh(mesh):
        closed: core.ClosedJaxpr = jax.make_jaxpr(loss)(params, batch)
    _check_scalar(closed.out_avals)
    flat = _Flattening(rules)
    results = flat.inline(closed, [_fresh(var) for var in closed.jaxpr.invars], scope="")
    count = len(jax.tree.leaves(params))
    return TracedLoss(
        params=tuple(flat.inputs[:count]),
        batch=tuple(flat.inputs[count:]),
        constants=flat.constants,
        equations=tuple(flat.equations),
        result=results[0],
        debug_info=closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )


def _check_scalar(results: Sequence[Any]) -> None:
    got = ", ".join(f"{result.dtype}{list(result.shape)}" for result in results) or "nothing"
    is_scalar = len(results) == 1 and not results[0].shape
    if not is_scalar or not jax.numpy.issubdtype(results[0].dtype, jax.numpy.floating):
        raise UsageError(
            f"the loss of a pipeline returns one scalar of floats, got {got}",
            hint="return the mean over the rows, without further results",
        )


def _fresh(var: Any) -> Any:
    if isinstance(var, core.DropVar):
        return var
    return core.gensym()(var.aval)


class _Flattening:
    """The equations of a program. Calls in which a stage ends are replaced by their bodies."""

    def __init__(self, rules: TaskRules) -> None:
        self.inputs: list[core.Var] = []
        self.constants: dict[core.Var, Any] = {}
        self.equations: list[Equation] = []
        self._rules = rules

    def inline(self, closed: Any, arguments: Sequence[Any], *, scope: str) -> list[Any]:
        """Appends the equations of a program with these arguments; returns its results."""
        if not scope:
            self.inputs = list(arguments)
        names: dict[Any, Any] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[var] = _fresh(var)
            self.constants[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in closed.jaxpr.eqns:
            inside = f"{scope}/{eqn.source_info.name_stack}"
            invars = [read(atom) for atom in eqn.invars]
            task = find_task(_SCOPES.findall(inside), self._rules)
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if task is None and self._is_cut_inside(eqn, inside):
                if eqn.primitive.name not in _CALLS:
                    raise _indivisible(eqn)
                outvars = self.inline(body, invars, scope=inside)
            else:
                outvars = [_fresh(var) for var in eqn.outvars]
                mark = read_mark(eqn.params.get("name")) if eqn.primitive.name == "name" else None
                if _has_mark(eqn):
                    raise _indivisible(eqn)
                self.equations.append(
                    Equation(
                        eqn=eqn.replace(
                            invars=invars, outvars=outvars, params=_without_devices(eqn.params)
                        ),
                        mark=mark,
                        task=task,
                    )
                )
            names.update(zip(eqn.outvars, outvars, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def _is_cut_inside(self, eqn: core.JaxprEqn, scope: str) -> bool:
        if _has_mark(eqn):
            return True
        return any(
            find_task(_SCOPES.findall(inside), self._rules) is not None
            for inside in _inner_scopes(eqn, scope)
        )


def _has_mark(eqn: core.JaxprEqn) -> bool:
    """Whether an equation inside this one is a mark."""
    return any(
        (one.primitive.name == "name" and read_mark(one.params.get("name")) is not None)
        or _has_mark(one)
        for body in core.jaxprs_in_params(eqn.params)
        for one in body.eqns
    )


def _inner_scopes(eqn: core.JaxprEqn, scope: str) -> Iterator[str]:
    for body in core.jaxprs_in_params(eqn.params):
        for one in body.eqns:
            inside = f"{scope}/{one.source_info.name_stack}"
            yield inside
            yield from _inner_scopes(one, inside)


def _indivisible(eqn: core.JaxprEqn) -> UsageError:
    words = {
        "scan": "a loop (`lax.scan`)",
        "while": "a loop (`lax.while_loop`)",
        "cond": "a branch (`lax.cond`)",
        "remat2": "a rematerialized function (`jax.checkpoint`)",
        "checkpoint": "a rematerialized function (`jax.checkpoint`)",
    }
    what = words.get(eqn.primitive.name, f"`{eqn.primitive.name}`")
    return UsageError(
        f"a stage ends inside {what}, which cannot be taken apart",
        hint="end stages outside of it: a loop over the layers of each stage, with "
        "`stage_boundary` between the loops (see `repeat_layer`), and `jax.checkpoint` inside them",
    )


def _without_devices(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation with abstract meshes, also in its bodies.

    A sharding on the submesh of one stage is valid for the others, which have other devices.
    Parameters without devices stay the same objects, so that jax lowers a body only once if it is
    called twice.
    """
    changed = {name: _abstracted(value) for name, value in params.items()}
    return changed if any(changed[name] is not params[name] for name in params) else params


def _abstracted(value: Any) -> Any:
    if isinstance(value, Mesh):
        return value.abstract_mesh
    if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
        return NamedSharding(
            value.mesh.abstract_mesh, value.spec, memory_kind=_own_memory_kind(value)
        )
    # Since jax 0.11 there is one class for both, and a closed program is its own open one.
    if isinstance(value, core.ClosedJaxpr) and value.jaxpr is not value:
        jaxpr = _abstracted(value.jaxpr)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if isinstance(value, core.Jaxpr):
        params = [_without_devices(eqn.params) for eqn in value.eqns]
        if all(new is eqn.params for new, eqn in zip(params, value.eqns, strict=True)):
            return value
        eqns = [eqn.replace(params=new) for new, eqn in zip(params, value.eqns, strict=True)]
        return value.replace(eqns=eqns)
    if type(value) is tuple:
        parts = tuple(_abstracted(one) for one in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def _own_memory_kind(sharding: NamedSharding) -> str | None:
    # The default memory kind of the devices is omitted, because it names the platform.
    devices: Any = sharding.mesh.devices
    default = devices.flat[0].default_memory().kind
    return None if sharding.memory_kind == default else sharding.memory_kind
