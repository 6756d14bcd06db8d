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
  config = automesh.load("mesh_rules.toml").select()  # these devices' rule
  mesh = config.create_device_mesh()          config.knobs, config.mapping
"""

SEARCH_HELP = """Search for the fastest mesh for the step that SCRIPT builds, and write it to
mesh_rules.toml.

SCRIPT is train.py, train.py:make_step or package.module:function. The function is `build`
unless you name another; it takes the mesh and returns (step, args).

A script without `build` is run as it is, up to the call of its training step, with the mesh
of each plan in the place of its own: the axes of its mesh are searched, and that mesh is what
others are compared with. --step NAME chooses among several jitted functions. --split
data=dp,fsdp searches two axes in the place of its axis `data`, the second of which splits
the parameters, too.

A search lists all meshes, estimates the legal ones, compiles the most promising, races the
best of them against the script's own mesh (--baseline), and runs the winner again in fresh
processes. While others may still win and there is time, it races on. The table goes to
stdout, progress to stderr.

Devices that are not here (--target tpu-v5p-128) are compiled for: what does not fit is found
out by their own compiler, the schedules of the best are replayed on the links of the target,
and the rule says that its times are predicted. That needs `pip install 'jax-automesh[tpu]'`
or `[gpu]`; a search on the devices later starts from the rule and replaces it by what it
measures.

Stop it whenever you like: the same command goes on where it was. What is finished is never
repeated.

\b
Examples:
  automesh search train.py
  automesh search train.py --dry-run          the estimates alone
  automesh search train.py --dry-run --target tpu-v5p-128
  automesh search train.py --target tpu-v5p-128 --target gpu-h100-64
  automesh search train.py --target cpu:8 --budget 3m
  automesh search train.py --baseline "fsdp:8 remat=full"
  automesh search train.py --space my_space.toml --top 4
  automesh search pkg.steps:make_step -- --size small
  automesh search train.py --split data=dp,fsdp -- --steps 100

\b
Where the mesh is a flag of a program, give its command instead of SCRIPT:
  automesh search --command 'python train.py --fsdp {fsdp} --tp {tp}'
  automesh search --command 'python -m trainer ici={ici.dp} dcn={dcn.dp}'

It is run as it is, at least once for each plan, and ended when its steps are timed
(--step-time). {axis} is the size of an axis, {ici.axis} and {dcn.axis} are its parts inside
and between slices or nodes, {knob} is a knob of --space, {run_dir} is an empty folder for
what a run writes, {{ and }} are braces. No shell is used.

\b
A search space (my_space.toml) says what may vary:
  batch_axes = ["dp"]               # split the rows of a batch
  [axes]                            # of the mesh, under any names
  dp = {}
  tp = { max = 4 }
  [constraints]
  tp = { divides = "num_heads" }    # a fact of automesh.Workload, or a number
  [mapping]                         # build(mesh, mapping={"mlp": "tp", ...})
  mlp = ["tp", ["dp", "tp"]]        # axes of a logical axis, or "none"
  [knobs]
  remat = ["none", "full"]          # keywords of build

\b
Exit codes:
  0 found   1 nothing may become a rule   2 bad input
  130 Ctrl-C   143 SIGTERM: the same command goes on
"""

CHECK_SCRIPT_HELP = """Look at SCRIPT as a search would, in seconds and without searching.

SCRIPT is train.py, train.py:make_step or package.module:function, as in search. Its `build` is
called on a few small meshes, twice on the first, and its step is traced in two processes.

Printed are the arrays that the step takes, how they are split, and which are made up; the mesh
axes that it uses; the knobs and what a search tries; what goes from one step into the next; and
then the command that searches, or what to mend first.

\b
Examples:
  automesh check-script train.py
  automesh check-script train.py --target cpu:8 --space dense_lm
  automesh check-script train.py --all -- --layers 4
  automesh check-script train.py --json | jq .problems

\b
Exit codes:
  0 ready to search   1 something to mend   2 bad input
"""

SHOW_HELP = """Show what a study has found so far, without running anything.

\b
Examples:
  automesh show                               the newest under results/
  automesh show results/train-cpu-8-3fa9c1d2
  automesh show --json | jq .best
"""

TARGETS_HELP = """List the devices that a search may be aimed at without having them.

Without PATTERN there is a line for each kind. A kind (v5p, h100), a part of names ('tpu-v5*')
or a target (tpu-v5p-128, v5e:4x8, gpu-h100-64) gives names, shapes, speeds, and the sources of
all figures. It is also said what can be compiled for on this machine, and what to install for
the rest.

\b
Clusters of your own become targets with --hardware, here and in search:
  [clusters.lab]
  chip = "h100"                 # on record, or described below
  nodes = 16
  devices_per_node = 8
  network_bytes_per_s = 400e9   # one way, of all network cards of a node
  [clusters.pod]
  chip = "v5p"
  torus = [4, 4, 8]             # chips along each dimension of a slice
  wraps = [true, true, true]    # dimensions whose ends are linked
  slices = 2
  [chips.h100-nvl]              # what differs from the chip that it is like
  like = "h100"
  hbm_bytes = 99.9e9
  hbm_bytes_per_s = 3.9e12
  link_bytes_per_s = 300e9      # one way, over all links to its switch
  flops_per_s = { bf16 = 835e12, fp8 = 1671e12 }

\b
Examples:
  automesh targets
  automesh targets v5p
  automesh targets tpu-v5litepod-256-4
  automesh targets lab --hardware our.toml
  automesh targets --json | jq .targets[].name
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
MESH may be followed by knobs and logical axes: "dp:8 remat=full mlp:tp".

Printed are seconds by cause, the ten most expensive collectives with their source lines, the
memory peak, what could not be counted, and the reason in a sentence. Every figure says whether
it is estimated, compiled or measured. Of devices that are not here, a study has replays of the
compiled schedules as well: they stand beside the estimates, and --trace draws one.

\b
Examples:
  automesh explain results/train-cpu-8-3fa9c1d2 dp:2,tp:4
  automesh explain results/train-cpu-8-3fa9c1d2 dp:8 --against fsdp:8
  automesh explain train.py fsdp:8 --target cpu:8
"""

DOCTOR_HELP = """Check this machine: versions, devices, known-bad combinations, and what to
install for which target.

What is compiled for devices that are not here is kept, so that no search compiles it again:
in $AUTOMESH_CACHE, if set, and no more than $AUTOMESH_CACHE_LIMIT, else 4 GiB, of which what
was used least recently goes first. --cache shows it.

\b
Examples:
  automesh doctor
  automesh doctor --target cpu:8
  automesh doctor --cache
  automesh doctor --cache --clear
"""

COMMAND_OPTION = (
    """Instead of SCRIPT: a command whose mesh is a flag, with {axis} where sizes stand."""
)

SPLIT_OPTION = """For a script without `build`: search an axis of its mesh as several. data=dp,fsdp
splits over dp and fsdp what the script splits over data, and over fsdp also the parameters and
optimizer state that it leaves whole."""

STEP_TIME_OPTION = """Of a --command: `capture` (by default) times its jitted step inside of its
Python; `jsonl:FILE` or `jsonl:FILE:KEY` reads a file of JSON lines that it writes; `regex:PATTERN`
reads its output, with a group for seconds, or (?P<ms>...), (?P<s>...), (?P<steps_per_s>...)."""

SKIP_STEPS_OPTION = """Of a --command: first steps that do not count, as they compile and warm up;
by default 2."""

TIMED_STEPS_OPTION = """Of a --command: steps that are timed in each run, which is then ended; by
default 10."""

TARGET_OPTION = """Devices: local (the attached ones, by default), cpu:N (N virtual ones), or some
that are not here: tpu-v5p-128, v5e:4x8, gpu-h100-64. Give it again for several: one rule each."""

TOP_OPTION = """Meshes in one race (by default 8, of a --command 4), or to compile for devices that
are not here (10); and rows to print."""

RESERVE_OPTION = """Memory of a device that plans leave free, as 1GiB or 5%; by default, of devices
that are not here, 256 MiB of a TPU and what jax does not take of a GPU (25 %)."""

XLA_OPTION = """Compiler option; NAME=default,VALUE tries both. May be given again. `curated` tries
those that are worth it on the target."""

TRACE_OPTION = """Write the replay of MESH as a Chrome trace, for ui.perfetto.dev; for a study of
devices that are not here."""
