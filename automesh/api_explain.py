"""The part of the Python API that says why: `explain`, and `write_trace` for a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automesh.answers import Account
from automesh.errors import UsageError
from automesh.tuner.request import SearchOptions, read_request

if TYPE_CHECKING:
    from automesh.report.progress import Progress


def explain(
    subject: str | Path,
    mesh: str,
    *,
    against: str = "",
    target: str = "",
    hardware: str | Path = "",
    space: str | Path = "",
    args: Sequence[str] = (),
    storage: str = "",
    progress: Progress | None = None,
) -> Account:
    """Explains what a mesh costs and why, without compiling or measuring anything.

    Args:
      subject: folder of a study, or a script as in `search`.
      mesh: `dp:2,tp:4`, or with knobs `dp:8 remat=full`.
      against: another mesh to compare with.
      target: for a script: what to estimate for; by default `local`.
      hardware: for a script: TOML file with clusters of your own.
      space: for a script: the search space; by default `auto`.
      args: for a script: its own arguments.
      storage: the --storage of the search that made the study, if it had one.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, no such study, or a mesh that it does not hold.

    Example:
      >>> import tempfile
      >>> script = Path(tempfile.mkdtemp()) / "train.py"
      >>> _ = script.write_text('''
      ... import jax
      ... def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=rows)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      ... ''')
      >>> "dp:4" in explain(script, "dp:4", target="cpu:4").text()
      True
    """
    from automesh.report.progress import Silent
    from automesh.tuner.explain.study import explain_script, explain_study

    if is_study(subject):
        if target or hardware or space or args:
            raise UsageError(
                f"`{subject}` is a study, which has its target and its search space already",
                hint="give the script instead to explain it for other devices",
            )
        folder = Path(subject)
        found = explain_study(folder, mesh, against, results=folder.parent, storage=storage)
        return Account(found=found)
    request = read_request(
        subject,
        SearchOptions(hardware=hardware, space=space, args=args, top=1, dry_run=True),
        targets=[target or "local"],
    )
    return Account(found=explain_script(request, mesh, against, progress or Silent()))


def write_trace(study: str | Path, mesh: str, path: str | Path, *, storage: str = "") -> None:
    """Writes the replay of a compiled plan as a Chrome trace, for https://ui.perfetto.dev.

    Args:
      study: folder of a study of devices that are not here.
      mesh: `dp:2,tp:4`, or with knobs `dp:8 remat=full`.
      path: the file.
      storage: the --storage of the search that made the study, if it had one.

    Raises:
      UsageError: no such study or plan, nothing to replay, or the file cannot be written.
    """
    from automesh.tuner.explain.trace import write_trace as write

    if not is_study(study):
        raise UsageError(
            f"`{study}` is a script: what has not been compiled cannot be replayed",
            hint="search with it first, and give the folder of the study",
        )
    folder = Path(study)
    write(folder, mesh, Path(path), results=folder.parent, storage=storage)


def is_study(subject: str | Path) -> bool:
    """Whether a folder, which only studies are, or nothing that could be a script."""
    text = str(subject)
    return Path(text).is_dir() or not (text.endswith(".py") or ":" in text or Path(text).is_file())
