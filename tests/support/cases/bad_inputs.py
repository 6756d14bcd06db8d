"""Bad inputs, one a row: what is typed, which files and variables there are, the exit code.

What is printed for each is in tests/golden/cli/errors.txt.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Files = Mapping[str, str | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput:
    """A command that must be refused.

    Attributes:
      command: as typed after `automesh`.
      files: relative path -> content; a path that ends in `/` is a folder.
      variables: environment.
      code: exit code.
    """

    command: str
    files: Files = field(default_factory=dict[str, "str | bytes"])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    code: int = 2


GOOD = """\
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh, width=8, remat="none", scale=1.0, fused=False):
    def step(w, x):
        loss = jnp.mean((x @ w) ** 2) * scale
        return w - 0.1 * loss, loss

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(step), (struct((64, width), None, "tp"), struct((16, 64), "dp"))
"""
UNUSED = "def build(mesh): ...\n"
GOOD_SPACE = "[axes]\ndp = {}\ntp = {}\n"
RULES = """\
# Kept by hand: do not lose me.
schema = 1
axes = ["dp", "fsdp", "ep", "tp", "sp"]
batch_axes = ["dp"]

[[rule]]
match = "cpu-4"
ici = { dp = 4 }
"""
SEARCH = "search train.py --target cpu:4"
CLUSTER = """\
[clusters.lab]
chip = "h100"
nodes = 16
devices_per_node = 8
network_bytes_per_s = 400e9
"""
TORUS = """\
[clusters.lab]
chip = "v5p"
torus = [4, 4, 8]
"""
CHIP = """\
[chips.x1]
platform = "gpu"
flops_per_s = { bf16 = 1e15 }
hbm_bytes = 80e9
hbm_bytes_per_s = 3e12
link_bytes_per_s = 450e9
""" + CLUSTER.replace("h100", "x1")


def refused(command: str, *, script: str = UNUSED, **more: str | bytes) -> BadInput:
    """A command that is refused before a worker starts; `space` and `rules` are files."""
    names = {"space": "space.toml", "rules": "mesh_rules.toml"}
    return BadInput(
        command=command,
        files={"train.py": script} | {names[name]: text for name, text in more.items()},
    )


def spaced(space: str | bytes) -> BadInput:
    """A search with a search space of the user's own."""
    return refused(f"{SEARCH} --space space.toml", space=space)


def ruled(rules: str | bytes) -> BadInput:
    """A search beside a rules file."""
    return refused(SEARCH, rules=rules)


def commanded(template: str, words: str = "--target cpu:8", **files: str) -> BadInput:
    """A search by a command; `space` is a file."""
    return BadInput(
        command=f'search --command "{template}" {words}',
        files={"train.py": UNUSED} | {f"{name}.toml": text for name, text in files.items()},
    )


def clustered(hardware: str, target: str = "lab") -> BadInput:
    """A search for a cluster of the user's own."""
    return BadInput(
        command=f"search train.py --target {target} --hardware our.toml",
        files={"train.py": UNUSED, "our.toml": hardware},
    )


def scripted(script: str, command: str = SEARCH) -> BadInput:
    """A search of a script that is not fit for it."""
    return BadInput(command=command, files={"train.py": script})


def based(baseline: str) -> BadInput:
    """A search of a good script with a baseline."""
    return BadInput(command=f"{SEARCH} --baseline '{baseline}'", files={"train.py": GOOD})


def fitted(space: str, *, script: str = GOOD, code: int = 2) -> BadInput:
    """A good script with a search space that is well-formed, and does not fit it."""
    return BadInput(
        command=f"{SEARCH} --space space.toml",
        files={"train.py": script, "space.toml": space},
        code=code,
    )


def foreign_database() -> bytes:
    """A SQLite file of another program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.db"
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE customers (name)")
        connection.commit()
        connection.close()
        return path.read_bytes()


# Refused by the parent alone, in milliseconds.
QUICK: dict[str, BadInput] = {
    "no-such-command": BadInput(command="serch train.py"),
    "no-script-given": BadInput(command="search"),
    "unknown-option": refused("search train.py --bugdet 3m"),
    "options-of-the-script": refused("search train.py --size small"),
    "option-without-value": refused("search train.py --budget"),
    "script-missing": BadInput(command="search nowhere/train.py"),
    "script-misspelt": refused("search trian.py"),
    "script-misspelt-with-function": refused("search trian.py:make"),
    "script-without-ending": refused("search train"),
    "script-is-a-folder": BadInput(command="search models", files={"models/": ""}),
    "script-is-a-notebook": BadInput(command="search train.ipynb", files={"train.ipynb": "{}"}),
    "function-is-no-name": refused("search train.py:make-step"),
    "command-and-script": BadInput(
        command="search train.py --command 'python train.py {tp}'", files={"train.py": UNUSED}
    ),
    "command-without-program": commanded("pyhton train.py --tp {tp}"),
    "command-without-interpreter": commanded("train.py --tp {tp}"),
    "command-without-axis": commanded("python train.py --tp 4"),
    "command-open-quote": commanded("python 'train.py --tp {tp}"),
    "command-single-brace": commanded("python train.py --tp {tp"),
    "command-with-pipe": commanded("python train.py --tp {tp} | tee log"),
    "command-half-an-axis": commanded("python train.py dcn={dcn.dp} tp={tp}"),
    "command-unknown-placeholder": commanded(
        "python train.py {dp} {tp} {remta}",
        "--target cpu:8 --space space.toml",
        space=GOOD_SPACE + '[knobs]\nremat = ["none"]\n',
    ),
    "command-without-an-axis-of-its-space": commanded(
        "python train.py {dp}", "--target cpu:8 --space space.toml", space=GOOD_SPACE
    ),
    "command-for-absent-devices": commanded("python train.py {tp}", "--target tpu-v5p-128"),
    "command-for-two-targets": commanded("python train.py {tp}", "--target cpu:4 --target cpu:8"),
    "command-with-compiler-options": commanded("python train.py {tp}", "--xla a=1"),
    "command-source-unknown": commanded("python train.py {tp}", "--step-time jsonlines:m"),
    "command-pattern-without-group": commanded("python train.py {tp}", "--step-time regex:took"),
    "command-baseline-unknown-knob": commanded(
        "python train.py {tp}", "--target cpu:8 --baseline 'tp:8 remat=full'"
    ),
    "command-baseline-too-small": commanded(
        "python train.py {tp} {dp}", "--target cpu:8 --baseline tp:4"
    ),
    "step-time-of-a-script": refused("search train.py --step-time capture"),
    "target-unknown": refused("search train.py --target locl"),
    "target-cpu-0": refused("search train.py --target cpu:0"),
    "target-cpu-too-many": refused("search train.py --target cpu:100000"),
    "target-cpu-banana": refused("search train.py --target cpu:banana"),
    "target-tpu-unknown": refused("search train.py --target tpu-v9-8"),
    "target-tpu-misspelt": refused("search train.py --target tpu-v5o-128"),
    "target-slice-of-no-size": refused("search train.py --target tpu-v5p-100"),
    "target-slice-of-no-shape": refused("search train.py --target v5p:4x4x6"),
    "target-slice-of-no-flat-shape": refused("search train.py --target v5e:3x5"),
    "target-slice-of-two-dimensions": refused("search train.py --target v5p:4x4"),
    "target-slice-twisted": refused("search train.py --target v5p:4x4x8_twisted"),
    "target-slices-zero": refused("search train.py --target v5e:4x4*0"),
    "target-machine-of-a-slice": refused("search train.py --target ct6e-standard-4t"),
    "target-gpu-unknown": refused("search train.py --target gpu-h1000-8"),
    "target-gpu-of-two-kinds": refused("search train.py --target gpu-a100-16"),
    "target-gpu-without-number": refused("search train.py --target gpu-p5.48xlarge"),
    "target-gpu-unfilled": refused("search train.py --target gpu-h100-12"),
    "target-gpu-too-many": refused("search train.py --target gpu-h100-262144"),
    "target-neuron": refused("search train.py --target neuron-trn2.48xlarge-64"),
    "target-without-compiler": refused("search train.py --target gpu-mi300x-16"),
    "hardware-missing": refused("search train.py --target lab --hardware our.toml"),
    "hardware-syntax": clustered("[clusters.lab\n"),
    "hardware-no-clusters": clustered('[chips.x]\nlike = "h100"\n'),
    "hardware-unknown-key": clustered(CLUSTER.replace("nodes", "node")),
    "hardware-unknown-chip": clustered(CLUSTER.replace("h100", "h1000")),
    "hardware-no-network": clustered(CLUSTER.replace("network_bytes_per_s = 400e9\n", "")),
    "hardware-wrong-kind": clustered(CLUSTER.replace("h100", "v5p")),
    "hardware-no-torus": clustered(TORUS.replace("[4, 4, 8]", "[4, 4, 6]")),
    "hardware-wraps": clustered(TORUS + "wraps = [true]\n"),
    "hardware-host": clustered(TORUS + "host = [2, 3, 1]\n"),
    "hardware-name-taken": clustered(CLUSTER.replace("lab", "h100-8")),
    "hardware-chip-without-figures": clustered(CHIP.replace("hbm_bytes = 80e9\n", "")),
    "hardware-chip-without-bf16": clustered(CHIP.replace("bf16", "fp8")),
    "hardware-chip-without-compiler": clustered(CHIP),
    "hardware-other-target": clustered(CLUSTER, target="lap"),
    "hardware-too-many": clustered(CLUSTER, target="lab-256"),
    "budget-banana": refused(f"{SEARCH} --budget banana"),
    "budget-zero": refused(f"{SEARCH} --budget 0"),
    "budget-negative": refused(f"{SEARCH} --budget=-5m"),
    "timeout-x": refused(f"{SEARCH} --timeout x"),
    "worker-memory-x": refused(f"{SEARCH} --worker-memory x"),
    "worker-memory-zero": refused(f"{SEARCH} --worker-memory 0GiB"),
    "top-zero": refused(f"{SEARCH} --top 0"),
    "top-word": refused(f"{SEARCH} --top many"),
    "workers-negative": refused(f"{SEARCH} --workers=-1"),
    "space-unknown": refused(f"{SEARCH} --space dens_lm"),
    "space-file-missing": refused(f"{SEARCH} --space my/space.toml"),
    "space-syntax": spaced("[axes]\ndp = {\n"),
    "space-not-utf8": spaced(b"[axes]\n# gr\xfc\xdfe\ndp = {}\n"),
    "space-no-axes": spaced("[knobs]\nremat = ['none']\n"),
    "space-empty-axes": spaced("axes = {}\n"),
    "space-unknown-table": spaced(GOOD_SPACE + "[knob]\nremat = ['none']\n"),
    "space-unknown-key": spaced("[axes]\ndp = { maximum = 4 }\n"),
    "space-wrong-type": spaced("[axes]\ndp = { max = 'four' }\n"),
    "space-size-zero": spaced("[axes]\ndp = { size = 0 }\n"),
    "space-size-and-bound": spaced("[axes]\ndp = { size = 2, max = 4 }\n"),
    "space-min-over-max": spaced("[axes]\ndp = { min = 4, max = 2 }\n"),
    "space-bad-axis-name": spaced("[axes]\n'd p' = {}\n"),
    "space-empty-knob": spaced(GOOD_SPACE + "[knobs]\nremat = []\n"),
    "space-value-twice": spaced(GOOD_SPACE + "[knobs]\nwidth = [8, 8]\n"),
    "space-empty-constraint": spaced(GOOD_SPACE + "[constraints]\ndp = {}\n"),
    "space-constraint-no-product": spaced(GOOD_SPACE + "[constraints]\n'dp+tp' = { max = 4 }\n"),
    "space-unknown-platform": spaced(GOOD_SPACE + "[compiler_options.tpus]\nx = [1]\n"),
    "rules-broken": ruled("schema = 1\naxes = [\n"),
    "rules-not-utf8": ruled(b"# \xff\n" + RULES.encode()),
    "rules-bad-regex": ruled(RULES.replace("cpu-4", "cpu-[4")),
    "rules-newer-schema": ruled(RULES.replace("schema = 1", "schema = 2")),
    "rules-unknown-key": ruled(RULES.replace("ici = ", "icy = ")),
    "rules-unknown-axis": ruled(RULES.replace("dp = 4", "dq = 4")),
    "rules-zero-size": ruled(RULES.replace("dp = 4", "dp = 0")),
    "rules-folder-missing": refused(f"{SEARCH} --rules deploy/mesh_rules.toml"),
    "rules-is-a-folder": BadInput(
        command=f"{SEARCH} --rules deploy", files={"train.py": UNUSED, "deploy/": ""}
    ),
    "results-is-a-file": BadInput(
        command=f"{SEARCH} --results notes.txt", files={"train.py": UNUSED, "notes.txt": "mine"}
    ),
    "results-under-a-file": BadInput(
        command=f"{SEARCH} --results notes.txt/deep",
        files={"train.py": UNUSED, "notes.txt": "mine"},
    ),
    "results-unwritable": refused(f"{SEARCH} --results /proc/automesh"),
    "storage-unknown": refused(f"{SEARCH} --storage redis://localhost"),
    "storage-no-kind": refused(f"{SEARCH} --storage study"),
    "several-processes": BadInput(
        command=SEARCH,
        files={"train.py": UNUSED},
        variables={"SLURM_NTASKS": "8", "SLURM_PROCID": "3"},
    ),
    "show-nothing": BadInput(command="show"),
    "show-no-such-folder": BadInput(command="show results/train-cpu-8-00000000"),
    "show-wrong-folder": BadInput(command="show notes", files={"notes/todo.txt": "mine"}),
    "show-a-file": BadInput(command="show notes.txt", files={"notes.txt": "mine"}),
    "show-not-a-database": BadInput(command="show old", files={"old/study.db": "these are notes"}),
    "show-of-another-program": BadInput(
        command="show old", files={"old/study.db": foreign_database()}
    ),
    "targets-unknown": BadInput(command="targets banana"),
    "targets-hardware": BadInput(
        command="targets lab --hardware our.toml", files={"our.toml": "clusters = 3\n"}
    ),
    "doctor-target": BadInput(command="doctor --target banana"),
    "calibrate-target": BadInput(command="calibrate --target tpu-v5p-128"),
    "calibrate-budget": BadInput(command="calibrate --budget soon"),
    "calibrate-out-suffix": BadInput(command="calibrate --out profile"),
    "calibrate-out-folder": BadInput(command="calibrate --out my.json", files={"my.json/": ""}),
    "calibrate-out-broken": BadInput(command="calibrate --out p.json", files={"p.json": "{"}),
    "calibrate-out-other": BadInput(
        command="calibrate --out p.json", files={"p.json": '{"schema": 1, "platfrom": "cpu"}'}
    ),
    "calibrate-out-newer": BadInput(
        command="calibrate --out p.json", files={"p.json": '{"schema": 99}'}
    ),
    "baseline-no-mesh": based("fast"),
    "baseline-unknown-axis": based("dq:4"),
    "baseline-wrong-product": based("dp:3"),
    "baseline-two-inferred": based("dp:-1,tp:-1"),
    "baseline-not-divisible": based("dp:3,tp:-1"),
    "baseline-zero": based("dp:0"),
    "baseline-axis-twice": based("dp:2,dp:2"),
    "baseline-over-dcn": based("dcn.dp:2,tp:2"),
    "study-of-another-program": BadInput(
        command=f"{SEARCH} --storage old.db",
        files={"train.py": GOOD, "old.db": foreign_database()},
    ),
    "study-not-a-database": BadInput(
        command=f"{SEARCH} --storage old.db",
        files={"train.py": GOOD, "old.db": "these are notes"},
    ),
    "study-corrupt": BadInput(
        command=f"{SEARCH} --storage old.db",
        files={"train.py": GOOD, "old.db": b"SQLite format 3\x00" + b"\xff" * 9000},
    ),
    "journal-is-a-log": BadInput(
        command=f"{SEARCH} --storage train.log",
        files={"train.py": GOOD, "train.log": "step 1 loss 3.2\nstep 2 loss 3.1\n"},
    ),
    "postgres-unreachable": BadInput(
        command=f"{SEARCH} --storage postgresql://me:secret@127.0.0.1:1/db",
        files={"train.py": GOOD},
    ),
}

WORKLOAD = """\
import jax.numpy as jnp
from automesh import Workload


def build(mesh):
    return Workload(jnp.sum, (jnp.ones(8),), FIELD)
"""

# A worker looks at the script.
INSPECTED: dict[str, BadInput] = {
    "syntax-error": scripted("def build(mesh):\n    return (step, args\n"),
    "not-python": BadInput(command=SEARCH, files={"train.py": b"\x00\x01\x02"}),
    "import-error": scripted("import jax\nimport flaxx\n"),
    "raises-at-import": scripted(
        "import json\n\n\ndef read(text):\n    return json.loads(text)\n\n\nread('{')\n"
    ),
    "no-build": scripted("def make_step(mesh):\n    ...\n\n\ndef train():\n    ...\n"),
    "nothing-at-all": scripted(""),
    "build-is-no-function": scripted("build = 3\n"),
    "function-misspelt": scripted(UNUSED, "search train.py:biuld --target cpu:4"),
    "module-missing": scripted(UNUSED, "search pkg.steps:make --target cpu:4"),
    "module-without-function": scripted(UNUSED, "search train:make --target cpu:4"),
    "no-mesh-parameter": scripted("def build():\n    ...\n"),
    "knob-without-default": scripted("def build(mesh, layers):\n    ...\n"),
    "returns-nothing": scripted("def build(mesh):\n    print('building')\n"),
    "returns-a-list": scripted("def build(mesh):\n    return [1, 2]\n"),
    "returns-three": scripted("def build(mesh):\n    return 1, 2, 3\n"),
    "step-is-no-function": scripted("def build(mesh):\n    return 1, (2,)\n"),
    "args-are-no-tuple": scripted("def build(mesh):\n    return print, 2\n"),
    "fact-is-no-integer": scripted(WORKLOAD.replace("FIELD", "facts={'heads': 1.5}")),
    "workload-baseline": scripted(WORKLOAD.replace("FIELD", "baseline='data:4'")),
    "workload-axis-types": scripted(WORKLOAD.replace("FIELD", "axis_types='manuel'")),
    "raises-in-build": scripted(
        "def heads(size):\n    raise ValueError(f'{size} heads\\nare too many')\n\n\n"
        "def build(mesh):\n    return heads(7)\n"
    ),
    "raises-in-step": scripted(
        "import jax.numpy as jnp\n\n\ndef step(x):\n    return x @ jnp.zeros((5, 5))\n\n\n"
        "def build(mesh):\n    return step, (jnp.ones(4),)\n"
    ),
    "axis-of-no-shipped-space": scripted(GOOD.replace('"tp"', '"model"')),
    "axis-of-no-shipped-space-asked-for": scripted(
        "def build(mesh):\n    rows = 16 // mesh.shape['data']\n"
    ),
    "axis-not-in-the-space": fitted("[axes]\ndp = {}\n"),
    "exits-at-import": scripted("import sys\n\nprint('training')\nsys.exit(0)\n"),
    "wants-arguments": scripted(
        "import argparse\n\nparser = argparse.ArgumentParser(prog='train.py')\n"
        "parser.add_argument('--size', required=True)\nparser.parse_args()\n"
    ),
    "exits-hard": scripted("import os\n\nprint('bye')\nos._exit(0)\n"),
    "aborts-in-build": scripted("import os\n\n\ndef build(mesh):\n    os.abort()\n"),
    "no-such-platform": BadInput(
        command="search train.py", files={"train.py": GOOD}, variables={"JAX_PLATFORMS": "nonsense"}
    ),
    "baseline-unknown-knob": based("dp:4 remta=full"),
    "baseline-knob-without-value": based("dp:4 remat"),
    "baseline-knob-type": based("dp:4 width=wide"),
    "baseline-knob-no-boolean": based("dp:4 fused=2"),
    "space-knob-type": fitted(GOOD_SPACE + "[knobs]\nfused = ['none', 'full']\n"),
    "space-unknown-knob": fitted(GOOD_SPACE + "[knobs]\nremta = ['none', 'full']\n"),
    "space-unknown-fact": fitted(GOOD_SPACE + "[constraints]\ntp = { divides = 'num_heads' }\n"),
    "space-unknown-factor": fitted(GOOD_SPACE + "[constraints]\n'dp*microbatches' = { max = 4 }\n"),
    "space-impossible": fitted("[axes]\ndp = { max = 2 }\ntp = { size = 1 }\n", code=1),
    "space-impossible-constraint": fitted(
        GOOD_SPACE + "[constraints]\n'dp*tp' = { divides = 6 }\n", code=1
    ),
}

HANGS = (
    "import time\n\n\ndef build(mesh):\n    print('waiting for the data')\n    time.sleep(600)\n"
)
MESH_FACT = """\
import jax
import jax.numpy as jnp
from automesh import Workload
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh):
    x = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return Workload(lambda x: x.sum(), (x,), facts={"batch": 16 // mesh.shape["dp"]})
"""
INDIVISIBLE = """\
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh):
    x = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return lambda x: x.sum(), (x,)
"""
DP_ONLY = "[axes]\ndp = { size = 4 }\n"

# A worker takes longer, or plans are tried before nothing is left.
LONG: dict[str, BadInput] = {
    "build-hangs": scripted(HANGS, f"{SEARCH} --timeout 20s"),
    "fact-depends-on-mesh": fitted(DP_ONLY, script=MESH_FACT, code=1),
    "indivisible": fitted(DP_ONLY, script=INDIVISIBLE, code=1),
}

ALL = QUICK | INSPECTED | LONG
