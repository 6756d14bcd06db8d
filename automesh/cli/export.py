"""`automesh export` and `automesh import`: rules in the words of other frameworks, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from automesh.errors import UsageError
from automesh.files import write_new
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import format_rules
from automesh.report.export.translate import mesh_text
from automesh.texts.terminal import clean, without_controls
from automesh.texts.user_text import check_text, user_path

EXPORT_HELP = """Write a rule of RULES in the words of the framework that trains with it.

Every key of its mesh is written, since what is left out has defaults that change the mesh. The
batch and the microbatches are converted to what the framework means by them, remat gets the
framework's name, and the evidence stands in a comment. What a framework cannot say is refused,
with the reason and what to do.

\b
  --to maxtext    YAML: ici_* and dcn_*, remat_policy, the batch of a device
  --to axlearn    Python: mesh_rules with modifiers, for all rules
  --to levanter   YAML: trainer.mesh
  --to easydel    Python: config_kwargs and training_arguments
  --to tunix      YAML: model_config.mesh
  --to loadax     Python: a MeshConfig, for all rules
  --to json       the rules file itself, as JSON

\b
Examples:
  automesh export --to maxtext --select tpu-v5p-128 --batch 512 --out mesh.yml
  automesh export mesh_rules.toml --to axlearn
  automesh export --to tunix --axis dp=data --remat dots=block
"""

IMPORT_HELP = """Read the mesh of another framework's configuration as a rule.

FILE is YAML, Python, or a script with key=value words, as the framework has it; Python is read
and never run. The rules go to stdout as a rules file, or with --baseline the mesh alone, as
`automesh search --baseline` takes it. `--baseline maxtext:FILE` of search does both at once.

\b
Examples:
  automesh import run.sh --from maxtext --target tpu-v5p-128
  automesh import fuji_rules.py --from axlearn --out mesh_rules.toml
  automesh import run.sh --from maxtext --target tpu-v5p-128 --baseline
"""

Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--axis",
        metavar="OURS=THEIRS",
        help="An axis of the rule that the framework calls otherwise.",
        show_default=False,
    ),
]
Remat = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="A value of the knob remat that the framework calls otherwise.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where it goes, instead of stdout.", show_default=False),
]


def export(
    rules: Annotated[
        Path, typer.Argument(metavar="RULES", help="A rules file, or preset:NAME.")
    ] = Path("mesh_rules.toml"),
    to: Annotated[str, typer.Option(metavar="NAME", help="The framework; see above.")] = "",
    select: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="The devices whose rule is written; needed where the framework takes one rule "
            "and the file has several.",
        ),
    ] = "",
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows of one update of the optimizer over all devices, if no knob says it.",
            show_default=False,
        ),
    ] = None,
    axis: Axes = None,
    remat: Remat = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOB=KEY",
            help="A key of the framework that takes the value of a knob.",
            show_default=False,
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOB",
            help="A knob that is not written; also mapping, axis_types, compiler_options.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    from automesh import api

    if not to:
        raise UsageError("it was not said which framework", hint="name it with --to")
    text = api.export(
        rules,
        to=to,
        select=select,
        batch=batch or 0,
        axes=_pairs("--axis", axis),
        remat=_pairs("--remat", remat),
        knobs=_pairs("--knob", knob),
        leave_out=leave_out or [],
    )
    _put(text, out)


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The framework's file.", show_default=False)
    ],
    framework: Annotated[
        str, typer.Option("--from", metavar="NAME", help="The framework; see `export --help`.")
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Devices: open sizes are inferred for them; of a list of rules theirs is read.",
        ),
    ] = "",
    match: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="Pattern of the rule, where FILE names no target; by default any.",
        ),
    ] = "",
    axis: Axes = None,
    remat: Remat = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Print the mesh for `search --baseline` alone.")
    ] = False,
    out: Out = None,
) -> None:
    from automesh import api

    if not framework:
        raise UsageError("it was not said which framework", hint="name it with --from")
    notes: list[str] = []
    rules = api.import_rules(
        file,
        framework=framework,
        target=target,
        match=check_text(match),
        axes=_pairs("--axis", axis),
        remat=_pairs("--remat", remat),
        notes=notes,
    )
    for note in notes:
        sys.stderr.write(f"note: {clean(note)}\n")
    _put(_baseline(rules, file) if baseline else format_rules(rules, by="automesh import"), out)


def _baseline(rules: Rules, file: Path) -> str:
    if len(rules.rules) != 1:
        raise UsageError(
            f"`{file}` has {len(rules.rules)} rules", hint="name the devices with --target"
        )
    return f"{mesh_text(rules.rules[0], rules.axes_of(rules.rules[0]))}\n"


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given or []:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals and theirs):
            raise UsageError(f"{option} is `{text}`", hint=f"write {option} OURS=THEIRS")
        found[ours.strip()] = theirs.strip()
    return found


def _put(text: str, out: Path | None) -> None:
    if out is None:
        # Files and other programs get the very text; a terminal obeys what others wrote into it.
        sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
        return
    path = user_path(out)
    if not write_new(path, text):
        raise UsageError(
            f"`{path}` exists, and is left as it is", hint="name another file with --out"
        )
