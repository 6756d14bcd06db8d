"""A step that is read on another mesh is the program that the script would make there."""

from __future__ import annotations

import enum
import functools
import importlib
import io
import threading
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.capture.flow.sequence import PartCall, as_one
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import AxisSplit
from automesh.program.capture.step_call import TracedCall, trace
from automesh.program.capture.unjitted import LOOPS, hook_unjitted
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.starts import lost
from automesh.program.carry.stored_step import carried_call
from tests.support.carried import Case, Make, Sizes, places, text

OWN = {"data": 4, "model": 2}
OTHERS: tuple[Sizes, ...] = (
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 8, "model": 1},
    {"data": 8, "model": 2},
)


def put(mesh: Mesh, array: Any, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def arrays(mesh: Mesh) -> tuple[Any, Any]:
    w = {
        "up": put(mesh, np.full((16, 32), 0.1, np.float32), None, "model"),
        "down": put(mesh, np.full((32, 16), 0.1, np.float32), "model"),
    }
    return w, put(mesh, np.ones((32, 16), np.float32), "data")


def trained(loss: Any) -> Any:
    def train_step(w: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, slopes), value

    return train_step


def plain(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)


def of_loss(loss: Any, **settings: Any) -> Make:
    return lambda mesh: (jax.jit(trained(loss), **settings), arrays(mesh), {})


def scanned(w: Any, x: Any) -> Any:
    def turn(h: Any, _: Any) -> Any:
        return h + jax.nn.relu(h @ w["up"]) @ w["down"], jax.nn.logsumexp(h)

    h, more = jax.lax.scan(jax.checkpoint(turn), x, None, 3)
    return jnp.mean((h - x) ** 2) + more.sum()


def classified(w: Any, x: Any) -> Any:
    logits = jax.nn.gelu(x @ w["up"]) @ w["down"]
    labels = jnp.zeros(x.shape[0], jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return x


def _forward(x: Any) -> Any:
    return x, None


def _backward(_: Any, slope: Any) -> Any:
    return (jnp.clip(slope, -1, 1),)


_clipped.defvjp(_forward, _backward)


def only_called(mesh: Mesh) -> Any:
    """Functions with rules of their own that nobody differentiates."""
    w, x = arrays(mesh)
    return (
        jax.jit(lambda w, x: (w, _clipped(jax.nn.relu(x @ w["up"])).mean() + jax.nn.silu(x).sum())),
        (w, x),
        {},
    )


def of_the_script(mesh: Mesh) -> Any:
    """Keys, axes and settings whose classes no other process has. Before, reading the step failed
    there: "Can't get attribute 'Part'"."""

    class Part(str, enum.Enum):  # noqa: UP042 - the kind that has another text
        UP = "up"
        DOWN = "down"
        AXIS = "data"

    @dataclass(frozen=True)
    class Settings:
        scale: float

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def scaled(settings: Settings, x: Any) -> Any:
        return x * settings.scale

    scaled.defjvp(lambda settings, x, dx: (scaled(settings, *x), dx[0] * settings.scale))

    def loss(w: Any, x: Any) -> Any:
        split = NamedSharding(mesh, P(Part.AXIS))
        h = jax.lax.with_sharding_constraint(scaled(Settings(2.0), x @ w[Part.UP]), split)
        return jnp.mean((h @ w[Part.DOWN] - x) ** 2)

    for kind in (Part, Settings):
        kind.__module__ = "__main__"
    w, x = arrays(mesh)
    return jax.jit(trained(loss)), ({Part(name): w[name] for name in w}, x), {}


def with_keys(mesh: Mesh) -> Any:
    def train_step(w: Any, key: Any, x: Any) -> Any:
        key, sub = jax.random.split(key)
        kept = jax.random.bernoulli(sub, 0.5, x.shape)
        value, slopes = jax.value_and_grad(plain)(w, x * kept)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, slopes), key, value

    w, x = arrays(mesh)
    return jax.jit(train_step), (w, put(mesh, jax.random.key(0)), x), {}


def with_references(mesh: Mesh) -> Any:
    def train_step(w: Any, x: Any) -> Any:
        value, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w[...])
        w[...] = w[...] - 0.1 * slope
        return value

    w, x = arrays(mesh)
    return jax.jit(train_step), (jax.new_ref(w["up"]), x), {}


def stated(mesh: Mesh) -> Any:
    """Shardings of arguments and outputs, a constraint, donated state, keyword arguments."""

    def loss(w: Any, x: Any) -> Any:
        h = jax.lax.with_sharding_constraint(x @ w["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((h @ w["down"] - x) ** 2)

    at = {"up": NamedSharding(mesh, P(None, "model")), "down": NamedSharding(mesh, P("model"))}
    w = {"up": np.ones((16, 32), np.float32), "down": np.ones((32, 16), np.float32)}
    step = jax.jit(
        trained(loss),
        in_shardings=(at, NamedSharding(mesh, P("data"))),
        out_shardings=(at, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step, (w, np.ones((32, 16), np.float32)), {}


def by_keyword(mesh: Mesh) -> Any:
    def train_step(w: Any, *, x: Any, rate: Any, log: bool) -> Any:
        value, slopes = jax.value_and_grad(plain)(w, x)
        w = jax.tree.map(lambda a, b: a - rate * b, w, slopes)
        return (w, value, x.sum()) if log else (w, value)

    w, x = arrays(mesh)
    return (
        jax.jit(train_step, donate_argnames="w", static_argnames="log"),
        (),
        {"w": w, "x": x, "rate": 0.1, "log": True},
    )


def with_constants(mesh: Mesh) -> Any:
    """Arrays that the step holds: on the mesh, on the host, large and small."""
    held = put(mesh, np.full((32, 16), 0.5, np.float32), "data")
    table, small = np.arange(16.0 * 512, dtype=np.float32).reshape(16, 512), np.ones(16)

    def loss(w: Any, x: Any) -> Any:
        return plain(w, x * held * small.astype(np.float32)) + (x @ table).mean()

    return jax.jit(trained(loss)), arrays(mesh), {}


def weak(mesh: Mesh) -> Any:
    w, x = arrays(mesh)
    w["up"] = put(mesh, jnp.full((16, 32), 0.1), None, "model")
    return jax.jit(trained(lambda w, x: plain(w, x * 1.5))), (w, x), {}


def low_precision(mesh: Mesh) -> Any:
    def loss(w: Any, x: Any) -> Any:
        h = (x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)) @ w["up"]
        return jnp.mean((h @ w["down"]).astype(jnp.float32) ** 2)

    w, x = arrays(mesh)
    return jax.jit(trained(loss)), (jax.tree.map(lambda a: a.astype(jnp.bfloat16), w), x), {}


def looped(mesh: Mesh) -> Any:
    def loss(w: Any, x: Any) -> Any:
        h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.where(i > 1, h * 2, jnp.sin(h)), x)
        h = jax.lax.cond(h.sum() > 0, lambda h: h, lambda h: jnp.linalg.norm(h) * h, h)
        return plain(w, jax.lax.stop_gradient(jnp.sort(h, 0))) + jnp.einsum("ij,ij->", h, x)

    return jax.jit(trained(loss)), arrays(mesh), {}


def other_meshes(mesh: Mesh) -> Any:
    """The batch lies on another mesh of the same devices, and one array on a mesh of one."""
    w, x = arrays(mesh)
    flat = Mesh(mesh.devices.reshape(-1), ("devices",))

    def loss(w: Any, x: Any) -> Any:
        return plain(w, jax.lax.with_sharding_constraint(x, NamedSharding(flat, P("devices"))))

    return jax.jit(trained(loss)), (w, x), {}


def explicit(mesh: Mesh) -> Any:
    def loss(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ jax.sharding.reshard(w["up"], P()))
        return jnp.mean((h @ jax.sharding.reshard(w["down"], P(None, None)) - x) ** 2)

    return jax.jit(trained(loss)), arrays(mesh), {}


def explicit_scanned(mesh: Mesh) -> Any:
    def loss(w: Any, x: Any) -> Any:
        up, down = (jax.sharding.reshard(w[name], P()) for name in ("up", "down"))

        def turn(h: Any, _: Any) -> Any:
            return h + jax.nn.relu(h @ up) @ down, h.mean()

        h, more = jax.lax.scan(jax.checkpoint(turn), x, None, 2)
        return jnp.mean(h**2) + more.sum()

    return jax.jit(trained(loss)), arrays(mesh), {}


@custom_partitioning
def _capped(x: Any) -> Any:
    return 30.0 * jnp.tanh(x / 30.0)


_capped.def_partition(
    partition=lambda mesh, args, _: (
        mesh,
        lambda x: 30.0 * jnp.tanh(x / 30.0),
        args[0].sharding,
        (args[0].sharding,),
    ),
    sharding_rule="i j -> i j",
)


def ruled(mesh: Mesh) -> Any:
    w, x = arrays(mesh)

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda one: one * 0.9, w), _capped(x @ w["up"]).mean()

    return jax.jit(step), (w, x), {}


AUTO: dict[str, Make] = {
    "plain": of_loss(plain),
    "scan_remat_relu_logsumexp": of_loss(scanned, donate_argnums=0),
    "optax_loss": of_loss(classified),
    "rules_never_called": only_called,
    "classes_of_the_script": of_the_script,
    "random_keys": with_keys,
    "references": with_references,
    "stated_shardings": stated,
    "by_keyword": by_keyword,
    "constants": with_constants,
    "weak_types": weak,
    "low_precision": low_precision,
    "loops_and_branches": looped,
    "other_meshes": other_meshes,
}
EXPLICIT: dict[str, Make] = {"matmuls": explicit, "scan": explicit_scanned}
CASES = {
    **{name: Case(make=make, sizes=OWN) for name, make in AUTO.items()},
    **{
        f"explicit_{name}": Case(make=make, sizes=OWN, kind="explicit")
        for name, make in EXPLICIT.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_carried_step_is_the_one_that_is_made_there(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.stored(tmp_path)
    for sizes in OTHERS:
        real, carried = case.real(tmp_path, sizes), case.carried(tmp_path, sizes)
        assert text(carried) == text(real), sizes
        assert places(carried) == places(real), sizes


def test_arrays_that_a_step_holds_are_split_there_too(tmp_path: Path) -> None:
    """Before, they were on no mesh: a data set that the loss holds was "another program there", and
    the script was run again for each mesh."""
    case = CASES["constants"]
    step, sizes = case.stored(tmp_path), {"data": 2, "model": 4}
    carried = carried_call(step, tmp_path, case.mesh(sizes), by="trace", with_values=False)
    program: Any = carried.call.traced.jaxpr
    held = [*program.consts, *carried.call.settings.constants]
    found = [getattr(one, "sharding", None) for one in held]
    (place,) = [at for at in found if isinstance(at, NamedSharding)]
    assert (dict(place.mesh.shape), place.spec) == (sizes, P("data"))


def test_a_split_array_that_a_step_holds_is_an_argument_of_it(tmp_path: Path) -> None:
    """Before, with the data of its arrays a data set that the loss holds counted as whole on each
    device, and the axis that splits it as unused."""
    case = CASES["constants"]
    for built in (case.real(tmp_path, OWN), case.real(tmp_path, {"data": 8, "model": 1})):
        (held,) = jax.tree.leaves(dict(built.workload.kwargs))
        assert isinstance(held, jax.Array) and held.sharding.spec == P("data")
        new, loss = jax.jit(built.workload.step)(*built.workload.args, **built.workload.kwargs)[:2]
        assert np.isfinite(jax.tree.leaves((new, loss))[0]).all()


def test_the_programs_of_two_meshes_are_told_apart(tmp_path: Path) -> None:
    """What is compared above differs from mesh to mesh."""
    case = CASES["plain"]
    case.stored(tmp_path)
    texts = {text(case.carried(tmp_path, sizes)) for sizes in OTHERS}
    assert len(texts) == len(OTHERS)


@pytest.mark.parametrize("name", ["stated_shardings", "references", "random_keys", "weak_types"])
def test_a_carried_step_computes_what_the_script_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.stored(tmp_path)
    outputs: list[Any] = []
    for built in (
        case.carried(tmp_path, {"data": 2, "model": 4}, without_arrays=False),
        case.real(tmp_path, {"data": 2, "model": 4}),
    ):
        workload = built.workload
        given = workload.step(*workload.args, **dict(workload.kwargs))
        changed = [
            leaf[...] for leaf in jax.tree.leaves(workload.args) if isinstance(leaf, jax.Ref)
        ]
        outputs.append([_plain(leaf) for leaf in (*jax.tree.leaves(given), *changed)])
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_array_equal(one, other)


def _plain(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["step.pickle", "values.bin"])
@pytest.mark.parametrize("harm", [Path.unlink, _emptied, _changed])
def test_a_stored_step_that_is_lost_is_told_and_the_script_is_run(
    harm: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    case = CASES["plain"]
    case.stored(tmp_path)
    harm(tmp_path / name)
    said = rf"its stored step is lost: {name} (is damaged|cannot be read \(.+\))"
    # In this test what runs the script refuses.
    with pytest.raises(CannotCarry, match=said):
        case.carried(tmp_path, {"data": 2, "model": 4}, without_arrays=False)
    (why,) = lost(str(tmp_path))
    assert why.startswith(name)


def test_an_axis_that_is_split_does_with_its_first_part_what_the_script_does(
    tmp_path: Path,
) -> None:
    case = Case(make=_over_data, sizes={"data": 8})
    case.stored(tmp_path)
    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    own = case.carried(tmp_path, {"dp": 8, "fsdp": 1}, splits=splits)
    split = case.carried(tmp_path, {"dp": 2, "fsdp": 4}, splits=splits)
    for built in (own, split):
        down, up, x = jax.tree.leaves(built.workload.args)
        assert x.sharding.spec == P(("dp", "fsdp"))
        assert down.sharding.spec == up.sharding.spec == P()
    assert text(own) != text(split)


@pytest.mark.parametrize("check_vma", [False, True])
def test_names_of_an_axis_that_is_split_are_bound_in_parts_by_hand(
    check_vma: bool, tmp_path: Path
) -> None:
    case = Case(make=partial(_in_parts_over_data, check_vma=check_vma), sizes={"data": 8})
    case.stored(tmp_path)
    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    sizes: list[dict[str, int]] = [{"dp": 8, "fsdp": 1}, {"dp": 2, "fsdp": 4}]
    first, second = (text(case.carried(tmp_path, one, splits=splits)) for one in sizes)
    assert first != second


@pytest.mark.parametrize("sizes", [{"dp": 8, "fsdp": 1}, {"dp": 2, "fsdp": 4}])
def test_a_device_has_the_same_number_along_an_axis_that_is_split(
    sizes: Sizes, tmp_path: Path
) -> None:
    case = Case(make=partial(_in_parts_over_data, check_vma=False), sizes={"data": 8})
    case.stored(tmp_path)
    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    built = case.carried(tmp_path, sizes, splits=splits, without_arrays=False)
    workload = built.workload
    *_, numbers = jax.tree.leaves(workload.step(*workload.args, **dict(workload.kwargs)))
    assert numbers.tolist() == list(range(8))


def test_a_function_is_traced_with_the_parts_of_an_axis_that_is_split(tmp_path: Path) -> None:
    """Of four devices: the parts of `shard_map` have other shapes there, so the trace is of no use.
    Before, the function was refused, and the script was started for each mesh."""
    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    sizes = {"dp": 2, "fsdp": 2}
    of_four, of_eight = tmp_path / "four", tmp_path / "eight"
    of_four.mkdir()
    of_eight.mkdir()

    def parts(mesh: Mesh) -> Any:
        def loss(w: Any, x: Any) -> Any:
            @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
            def inner(w: Any, x: Any) -> Any:
                return jax.lax.pmean(jnp.mean((x @ w["up"] @ w["down"] - x) ** 2), "data")

            return inner(w, x)

        w = {"up": np.ones((32, 64), np.float32), "down": np.ones((64, 32), np.float32)}
        step = jax.jit(trained(loss), donate_argnums=0)
        return step, (put(mesh, w), put(mesh, np.ones((32, 32), np.float32), "data")), {}

    (case := Case(make=parts, sizes={"data": 4})).stored(of_four)
    expected = case.carried(of_four, sizes, splits=splits)
    settings = {"donate_argnums": 0}
    (case := Case(make=parts, sizes={"data": 8}, settings=settings)).stored(of_eight)
    with pytest.raises(CannotCarry, match="have other shapes with data:4 than with data:8"):
        case.carried(of_eight, sizes, splits=splits)
    by_function = case.carried(of_eight, sizes, splits=splits, by="function")
    assert text(by_function) == text(expected)
    assert places(by_function) == places(expected)


def test_a_function_that_names_its_axes_is_traced_for_the_parts_of_one(tmp_path: Path) -> None:
    """A `shard_map` that is made before the step holds the names of its axes, and so does the
    script; a data set that the step holds is split over the same parts. Before, jax refused the
    names of the parts, and the script was started for each mesh."""
    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    sizes = {"dp": 2, "fsdp": 2}
    of_four, of_eight = tmp_path / "four", tmp_path / "eight"
    of_four.mkdir()
    of_eight.mkdir()

    def mapped(mesh: Mesh) -> Any:
        held = put(mesh, np.ones((32, 32), np.float32), "data")

        @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        def inner(w: Any, x: Any, y: Any) -> Any:
            if mesh.axis_names != ("data",) or dict(mesh.shape_tuple)["data"] != mesh.size:
                raise ValueError("the mesh has other axes than the script gave it")
            return jax.lax.pmean(jnp.mean((x @ w["up"] @ w["down"] - y) ** 2), "data")

        w = {"up": np.ones((32, 64), np.float32), "down": np.ones((64, 32), np.float32)}
        step = jax.jit(trained(lambda w, x: inner(w, x, held)), donate_argnums=0)
        return step, (put(mesh, w), put(mesh, np.ones((32, 32), np.float32), "data")), {}

    (case := Case(make=mapped, sizes={"data": 4})).stored(of_four)
    expected = case.carried(of_four, sizes, splits=splits)
    settings = {"donate_argnums": 0}
    (case := Case(make=mapped, sizes={"data": 8}, settings=settings)).stored(of_eight)
    by_function = case.carried(of_eight, sizes, splits=splits, by="function")
    assert text(by_function) == text(expected)
    assert places(by_function) == places(expected)


@pytest.fixture
def sees_maps() -> Generator[None]:
    """Functions of jax that make functions are those that a script's run has."""
    former = importlib.import_module("jax.experimental.shard_map")
    names = {jax: ("grad", "value_and_grad", "shard_map"), jax.lax: LOOPS}
    before = {(owner, name): getattr(owner, name) for owner in names for name in names[owner]}
    hook_unjitted(
        lambda _, made, args, kwargs, **_also: made(*args, **kwargs),
        lambda: None,
        lambda loop: loop.function(*loop.args),
    )
    yield
    for (owner, name), function in before.items():
        setattr(owner, name, function)
    vars(former).pop("shard_map", None)


@pytest.mark.usefixtures("sees_maps")
def test_a_map_by_its_former_name_is_traced_with_the_parts_of_an_axis(tmp_path: Path) -> None:
    """Jax remembers the axes of a `shard_map` that was traced once, by the names of the script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        shard_map: Any = importlib.import_module("jax.experimental.shard_map").shard_map

    def mapped(mesh: Mesh) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jax.lax.pmean(jnp.mean((x @ w["up"] @ w["down"] - x) ** 2), "data")

        whole = shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        w = {"up": np.ones((32, 64), np.float32), "down": np.ones((64, 32), np.float32)}
        x = put(mesh, np.ones((32, 32), np.float32), "data")
        return jax.jit(trained(whole)), (put(mesh, w), x), {}

    splits = (AxisSplit(axis="data", into=("dp", "fsdp")),)
    sizes = {"dp": 2, "fsdp": 4}
    (case := Case(make=mapped, sizes={"data": 8}, settings={})).stored(tmp_path)
    by_function = case.carried(tmp_path, sizes, splits=splits, by="function")
    assert text(by_function) == text(case.carried(tmp_path, sizes, splits=splits))


class _Trainer:
    """A class whose method is the step, with what such classes hold besides."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches = (number for number in range(3))
        self.log = io.TextIOWrapper(io.BytesIO())
        self.rate = 0.5

    def loss(self, w: Any, x: Any) -> Any:
        return self.rate * plain(w, x)


def _with_a_trainer(mesh: Mesh) -> Any:
    return _Trainer().loss


def _with_a_cache(mesh: Mesh) -> Any:
    @functools.cache
    def powers(width: int) -> Any:
        return 2.0 ** -np.arange(width) if width == 1 else powers(1)[0] + np.zeros(width)

    return lambda w, x: plain(w, x * powers(x.shape[1]).astype(np.float32))


def _with_remat(mesh: Mesh) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    @partial(jax.checkpoint, policy=policy)
    def layer(w: Any, x: Any) -> Any:
        return checkpoint_name(jnp.sin(x @ w), "hidden")

    return lambda w, x: jnp.mean(layer(w["down"], layer(w["up"], x)) ** 2)


class _Settings:
    """Hands on what it is asked for, also before it holds anything."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _with_settings(mesh: Mesh) -> Any:
    settings = _Settings(_Settings(_Trainer()))
    return lambda w, x: settings.rate * plain(w, x)


def _constrained(mesh: Mesh) -> Any:
    return lambda w, x: plain(w, jax.lax.with_sharding_constraint(x, P("data")))


HELD = {
    "trainer": _with_a_trainer,
    "cache": _with_a_cache,
    "remat": _with_remat,
    "settings": _with_settings,
    "entered_mesh": _constrained,
}


@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("name", HELD)
def test_a_function_is_carried_with_what_public_scripts_let_it_hold(
    name: str, tmp_path: Path
) -> None:
    """Locks, generators and files of a trainer, cached functions, functions under `jax.checkpoint`,
    objects that hand on their attributes, and a mesh that is entered by `with`. Before, each was a
    reason to run the script for each mesh.
    """

    def make(mesh: Mesh) -> Any:
        mean = jax.shard_map(
            lambda x: jax.lax.pmean(x.mean(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        loss = HELD[name](mesh)
        w, x = arrays(mesh)
        step = jax.jit(trained(lambda w, x: loss(w, x) + mean(x)))
        return step, (put(mesh, w), x), {}

    case = Case(make=make, sizes=OWN, settings={}, enters=name == "entered_mesh")
    case.stored(tmp_path)
    sizes = {"data": 2, "model": 4}
    with pytest.raises(CannotCarry, match="have other shapes"):
        case.carried(tmp_path, sizes)
    assert text(case.carried(tmp_path, sizes, by="function")) == text(case.real(tmp_path, sizes))


class _Registered:
    """An object that is another one in a process that has not run the script, as one of a class
    that the script registers with jax."""

    rate = 0.5

    def __reduce__(self) -> Any:
        return object, ()


def test_a_function_that_fails_in_another_process_is_a_reason_to_run_the_script(
    tmp_path: Path,
) -> None:
    """Before, it ended the search: "raised TypeError: Error interpreting argument"."""

    def make(mesh: Mesh) -> Any:
        held = _Registered()
        mean = jax.shard_map(
            jnp.mean, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
        )
        w, x = arrays(mesh)
        step = jax.jit(trained(lambda w, x: held.rate * plain(w, x) + mean(x)))
        return step, (put(mesh, w), x), {}

    (case := Case(make=make, sizes=OWN, settings={})).stored(tmp_path)
    with pytest.raises(CannotCarry, match=r"cannot be traced again \(AttributeError: 'object'"):
        case.carried(tmp_path, {"data": 2, "model": 4}, by="function")


class _ShapeError(Exception):
    """An error of a library, of no class that Python has."""


def test_an_error_of_a_library_on_another_mesh_is_a_reason_to_run_the_script(
    tmp_path: Path,
) -> None:
    """Before, it ended the search: "raised ScopeParamShapeError"."""

    def make(mesh: Mesh) -> Any:
        w, x = arrays(mesh)

        def loss(w: Any, x: Any) -> Any:
            if mesh.shape["data"] != OWN["data"]:
                raise _ShapeError("a kernel of 784 rows is expected, 49 are given")
            return plain(w, x)

        return jax.jit(trained(loss)), (put(mesh, w), x), {}

    (case := Case(make=make, sizes=OWN, settings={})).stored(tmp_path)
    with pytest.raises(CannotCarry, match=r"cannot be traced again \(_ShapeError: a kernel"):
        case.carried(tmp_path, {"data": 2, "model": 4}, by="function")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TwoParts(Case):
    """A step of two jitted functions: gradients by parts of the batch, and the update."""

    def call(self, mesh: Mesh) -> TracedCall:
        w, x = arrays(mesh)
        w = put(mesh, w)
        parts = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

        def gradients(w: Any, x: Any) -> Any:
            loss = parts(lambda w, x: jax.lax.pmean(plain(w, x), "data"))
            return jax.value_and_grad(loss)(w, x)

        def update(w: Any, g: Any) -> Any:
            return jax.tree.map(lambda a, b: a - b / mesh.shape["data"], w, g)

        first = _traced(gradients, w, x)
        value, slopes = jax.jit(gradients)(w, x)
        second = _traced(update, w, slopes)
        return as_one([
            PartCall(kept=(0,), call=first, outputs=jax.tree.leaves((value, slopes))),
            PartCall(kept=(0, 1), call=second),
        ])  # fmt: skip


def _traced(function: Any, *args: Any) -> TracedCall:
    return trace(
        Call(
            jitted=jax.jit(function),
            args=args,
            kwargs={},
            run=lambda: None,
            function=function,
            settings={},
        )
    )


def test_functions_that_are_one_step_are_traced_again_one_after_the_other(tmp_path: Path) -> None:
    """Before, such a step had no function: the script was run again for each mesh."""
    case = _TwoParts(make=in_parts, sizes=OWN)
    assert case.stored(tmp_path).function
    for sizes in OTHERS[1:3]:
        with pytest.raises(CannotCarry, match="have other shapes"):
            case.carried(tmp_path, sizes)
        by_function = case.carried(tmp_path, sizes, by="function")
        assert text(by_function) == text(real := case.real(tmp_path, sizes))
        assert places(by_function) == places(real)


def test_a_part_is_named_without_a_line_where_jax_knows_none(tmp_path: Path) -> None:
    """The whole step is the `shard_map`. Before, the line was one of automesh itself."""

    def make(mesh: Mesh) -> Any:
        w, x = arrays(mesh)
        parts = jax.shard_map(
            trained(plain), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        return jax.jit(parts), (put(mesh, w), x), {}

    (case := Case(make=make, sizes=OWN)).stored(tmp_path)
    with pytest.raises(CannotCarry, match=r"^`shard_map` (at test_steps.*)?works on parts"):
        case.carried(tmp_path, {"data": 2, "model": 4})


def _in_parts_over_data(mesh: Mesh, *, check_vma: bool) -> Any:
    parts = partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    @partial(parts, in_specs=(P(), P("data")), out_specs=P())
    def loss(w: Any, x: Any) -> Any:
        return jax.lax.pmean(jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2), "data")

    @partial(parts, in_specs=(), out_specs=P("data"))
    def numbers() -> Any:
        return jax.lax.axis_index("data")[None]

    w = {"up": np.ones((32, 64), np.float32), "down": np.ones((64, 32), np.float32)}
    train = trained(loss)
    step = jax.jit(lambda w, x: (*train(w, x), numbers()), donate_argnums=0)
    return step, (put(mesh, w), put(mesh, np.ones((32, 32), np.float32), "data")), {}


def _over_data(mesh: Mesh) -> Any:
    w = {"up": np.ones((32, 64), np.float32), "down": np.ones((64, 32), np.float32)}
    step = jax.jit(trained(plain), donate_argnums=0)
    return step, (put(mesh, w), put(mesh, np.ones((32, 32), np.float32), "data")), {}


def in_parts(mesh: Mesh) -> Any:
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def loss(w: Any, x: Any) -> Any:
        return jax.lax.pmean(jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2), "data")

    w, x = arrays(mesh)
    return jax.jit(trained(loss)), (put(mesh, w), x), {}


def test_a_part_that_runs_on_each_device_apart_is_taken_where_its_parts_are_the_same(
    tmp_path: Path,
) -> None:
    case = Case(make=in_parts, sizes=OWN)
    case.stored(tmp_path)
    real, carried = case.real(tmp_path, OWN), case.carried(tmp_path, OWN)
    assert text(carried) == text(real)
    # The line that calls what runs apart: that of the gradient, in `trained`.
    line = trained.__code__.co_firstlineno + 2
    said = f"`shard_map` at test_steps.py:{line} works on parts of arrays, which have other shapes"
    with pytest.raises(CannotCarry, match=rf"{said} with data:2 than with data:4"):
        case.carried(tmp_path, {"data": 2, "model": 4})


def test_a_dimension_that_does_not_divide_is_refused_as_jax_does(tmp_path: Path) -> None:
    case = Case(make=_odd, sizes={"data": 4, "model": 2})
    case.stored(tmp_path)
    for make in (case.carried, case.real):
        with pytest.raises(Exception, match="36"):
            text(make(tmp_path, {"data": 8, "model": 1}))


def _odd(mesh: Mesh) -> Any:
    w, _ = arrays(mesh)
    return jax.jit(trained(plain)), (w, put(mesh, np.ones((36, 16), np.float32), "data")), {}


def test_what_means_nothing_elsewhere_is_named_with_its_line(tmp_path: Path) -> None:
    def calls_python(w: Any, x: Any) -> Any:
        number = jax.ShapeDtypeStruct((), x.dtype)
        seen = jax.pure_callback(np.asarray, number, jax.lax.stop_gradient(x.sum()))
        return plain(w, x) + jax.lax.stop_gradient(seen)

    with pytest.raises(CannotCarry, match=r"its step calls Python by `\w*callback` at test_steps"):
        Case(make=of_loss(calls_python), sizes=OWN).stored(tmp_path)


def test_a_function_that_the_compiler_calls_is_not_carried_with_the_trace(tmp_path: Path) -> None:
    """It is none of a library, so that another process has none. Before, the rule was read as one
    of another rank."""
    case = Case(make=ruled, sizes=OWN)
    case.stored(tmp_path)
    with pytest.raises(CannotCarry, match="function of the script partitions"):
        case.carried(tmp_path, OTHERS[0])


def test_meshes_of_other_devices_are_refused(tmp_path: Path) -> None:
    def make(mesh: Mesh) -> Any:
        some = Mesh(mesh.devices.reshape(-1)[:4], ("some",))
        inner = NamedSharding(some, P("some"))
        step = jax.jit(trained(plain))
        w, x = arrays(mesh)
        return step, (jax.tree.map(lambda a: jax.device_put(a, inner), w), x), {}

    case = Case(make=make, sizes=OWN)
    folder = tmp_path / "step"
    folder.mkdir()
    try:
        case.stored(folder)
    except ValueError as error:  # jax itself does not take arrays of several meshes at once.
        assert "incompatible devices" in str(error)
        return
    with pytest.raises(CannotCarry, match="some:4 of some of the devices of its own, data:4"):
        case.carried(folder, {"data": 2, "model": 4})


def test_the_types_of_axes_are_those_of_the_script(tmp_path: Path) -> None:
    case = CASES["explicit_matmuls"]
    case.stored(tmp_path)
    built = case.carried(tmp_path, {"data": 2, "model": 4})
    assert built.axis_types == ("explicit", "explicit")
    assert set(built.mesh.axis_types) == {AxisType.Explicit}
