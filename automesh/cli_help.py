"""What `--help` says: meant to be enough to learn the tool from."""

from __future__ import annotations

HELP = """Finds the fastest device mesh for a JAX training step, and proves it.

Write one function in your training script. It takes a mesh, and returns the step with
its arguments:

\b
  def build(mesh, remat="full"):    # knobs are keywords with defaults
      ...                           # NamedSharding(mesh, P("dp", "tp"))
      return step, (state, batch)   # jax.ShapeDtypeStruct is enough

Then search. The legal meshes of your devices are compiled, the best are run, and the winner
is written to mesh_rules.toml with its evidence:

\b
  automesh search train.py                    on the attached devices
  automesh search train.py --target cpu:8     on 8 virtual CPU devices

In the training script, read it back:

\b
  config = automesh.load("mesh_rules.toml").select("cpu-8")
  mesh = config.create_device_mesh()          config.knobs has the knobs
"""

SEARCH_HELP = """Search the fastest mesh for the step that SCRIPT builds, and write it to
mesh_rules.toml.

SCRIPT is train.py, train.py:make_step or package.module:function. The function is `build`
unless you name another; it takes the mesh and returns (step, args).

A search lists all meshes, compiles the legal ones, runs the best of them against the
script's own mesh (--baseline), and runs the winner again in fresh processes. The table goes
to stdout, progress to stderr.

Stop it whenever you like: the same command goes on where it was. What is finished is never
repeated.

\b
Examples:
  automesh search train.py
  automesh search train.py --dry-run          how many meshes are there?
  automesh search train.py --target cpu:8 --budget 3m
  automesh search train.py --baseline "fsdp:8 remat=full"
  automesh search train.py --space my_space.toml --top 4
  automesh search pkg.steps:make_step -- --size small

\b
A search space (my_space.toml) says what may vary:
  [axes]
  dp = {}
  tp = { max = 4 }
  [constraints]
  tp = { divides = "num_heads" }    # a fact of automesh.Workload, or a number
  [knobs]
  remat = ["none", "full"]          # keywords of build

\b
Exit codes:
  0 found   1 nothing may become a rule   2 bad input   130 interrupted
"""

SHOW_HELP = """Show what a study has found so far, without running anything.

\b
Examples:
  automesh show                               the newest under results/
  automesh show results/train-cpu-8-3fa9c1d2
  automesh show --json | jq .best
"""

DOCTOR_HELP = """Check this machine: versions, devices, known-bad combinations, and what to
install for which target.

\b
Examples:
  automesh doctor
  automesh doctor --target cpu:8
"""
