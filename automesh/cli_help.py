"""What `--help` says: meant to be enough to learn the tool from."""

from __future__ import annotations

HELP = """Finds the fastest device mesh for a JAX training step, and proves it.

Write one function in your training script. It takes a mesh, and returns the step with
its arguments:

\b
  def build(mesh, remat="full"):    # knobs are keywords with defaults
      ...                           # NamedSharding(mesh, P("dp", "tp"))
      return step, (state, batch)   # jax.ShapeDtypeStruct is enough

Then search. Every legal mesh of your devices is estimated, the most promising are compiled,
the best are run, and the winner is written to mesh_rules.toml with its evidence:

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

A search lists all meshes, estimates the legal ones, compiles the most promising, races the
best of them against the script's own mesh (--baseline), and runs the winner again in fresh
processes. While others may still win and there is time, it races on. The table goes to
stdout, progress to stderr.

Stop it whenever you like: the same command goes on where it was. What is finished is never
repeated.

\b
Examples:
  automesh search train.py
  automesh search train.py --dry-run          the estimates alone
  automesh search train.py --dry-run --target tpu-v5p-128
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

CALIBRATE_HELP = """Measure the devices, so that searches estimate with their real speeds instead
of a data sheet's.

All devices work at once on small programs: multiplications of many shapes, copies, kernels
that do next to nothing, and each collective over groups of every size that a mesh axis can
have. The profile goes to a folder of yours ($AUTOMESH_PROFILES, if set). Later searches on
devices of the same kind pick it up; for virtual CPU devices also their number and this
machine must be the same. Measuring again merges: newer points replace older ones.

The table says how far each law is off at points that it was not fitted to. Let the machine
do nothing else meanwhile.

\b
Examples:
  automesh calibrate                          the attached devices
  automesh calibrate --target cpu:8 --budget 2m
  automesh calibrate --out our_cluster.json
"""

EXPLAIN_HELP = """Explain where the time of a mesh goes, or why one mesh beats another, from
estimates; nothing is compiled or run.

STUDY is the folder of a study, as `search` prints it, or a script that no search has seen.
MESH may be followed by knobs: "dp:8 remat=full".

Printed are seconds by cause, the ten most expensive collectives with their source lines, the
memory peak, what could not be counted, and the reason in a sentence. Every figure says whether
it is estimated, compiled or measured.

\b
Examples:
  automesh explain results/train-cpu-8-3fa9c1d2 dp:2,tp:4
  automesh explain results/train-cpu-8-3fa9c1d2 dp:8 --against fsdp:8
  automesh explain train.py fsdp:8 --target cpu:8
"""

DOCTOR_HELP = """Check this machine: versions, devices, known-bad combinations, and what to
install for which target.

\b
Examples:
  automesh doctor
  automesh doctor --target cpu:8
"""
