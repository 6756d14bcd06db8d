"""From what the user typed to a build function, and what a user is told when there is none."""

import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.program.nouns import Entry
from automesh.program.script.load import load_entry
from automesh.program.script.payload import pickle_entry
from automesh.program.script.signature import check_knobs, read_signature
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]


def written(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_script_runs_with_its_own_directory_arguments_and_name(own_process):
    written(own_process, "value = 'beside'", "helper_of_script.py")
    path = written(
        own_process,
        "import sys, helper_of_script\n"
        "seen = (sys.argv, sys.path[0], __name__, helper_of_script.value)\n"
        "def build(mesh): return seen\n",
    )
    build = load_entry(script(path, argv=["--size", "tiny"]))
    argv, first, name, value = build(None)
    assert argv == [str(path), "--size", "tiny"]
    assert first == str(own_process)
    assert name == "train"
    assert value == "beside"


def test_helper_that_imports_the_script_back_gets_the_same_module(own_process):
    written(own_process, "def config():\n    import circular\n    return circular\n", "helper_b.py")
    path = written(
        own_process,
        "import sys, helper_b\n"
        "def build(mesh): return helper_b.config() is sys.modules[__name__]\n",
        "circular.py",
    )
    assert load_entry(script(path))(None)


def test_script_named_like_a_module_of_python_does_not_hide_it(own_process):
    import json

    path = written(own_process, "import json\ndef build(mesh): return json.dumps\n", "json.py")
    # `json` is loaded already, so the import inside the script finds the real one.
    assert load_entry(script(path))(None) is json.dumps
    assert sys.modules["json"] is json


def test_module_is_imported_from_the_working_directory(own_process):
    package = Path.cwd() / "pkg_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "steps.py").write_text("def make_step(mesh): return __name__\n")
    entry = Entry(kind="module", location="pkg_here.steps", function="make_step")
    assert load_entry(entry)(None) == "pkg_here.steps"


BAD_SCRIPTS = {
    "syntax error": (
        "x = 1\ndef build(mesh:\n    return\n",
        "build",
        "{path}:2: '(' was never closed: `def build(mesh:`\nhint: mend the syntax error",
    ),
    "no build": (
        "import math\ndef make_step(mesh): ...\ndef _private(): ...\nclass Model: ...\n",
        "build",
        "`{path}` has no function `build`; its functions are: `make_step`\n"
        "hint: name the one that takes the mesh, as in `{path}:make_step`",
    ),
    "no function at all": (
        "x = 1\n",
        "build",
        "`{path}` has no function `build`; its functions are: none\n"
        "hint: write `def build(mesh): ... return step, args`",
    ),
    "not callable": (
        "build = 3\n",
        "build",
        "`build` in `{path}` is an int, not a function\n"
        "hint: it must take the mesh and return `(step, args)`",
    ),
    "raises": (
        "def read():\n    return {}['model']\nread()\n",
        "build",
        "importing `{path}` failed at {path}:2: KeyError: 'model'\n"
        "hint: make it importable without side effects; put what trains under "
        "`if __name__ == ...`",
    ),
    "missing package": (
        "import no_such_package_anywhere\n",
        "build",
        "importing `{path}` failed at {path}:1: ModuleNotFoundError: "
        "No module named 'no_such_package_anywhere'\n"
        "hint: install `no_such_package_anywhere` in the environment that automesh runs in",
    ),
}


@pytest.mark.parametrize("case", BAD_SCRIPTS)
def test_bad_scripts_are_told_in_one_sentence(own_process, case):
    text, function, expected = BAD_SCRIPTS[case]
    path = written(own_process, text)
    with pytest.raises(UsageError) as caught:
        load_entry(script(path, function))
    assert str(caught.value) == expected.format(path=path)


def test_what_is_no_script(own_process):
    texts = []
    for name in ("absent.py", ".", "book.ipynb"):
        (own_process / "book.ipynb").write_text("{}")
        with pytest.raises(UsageError) as caught:
            load_entry(script(own_process / name))
        texts.append(caught.value.message.replace(str(own_process), "DIR"))
    assert texts == [
        "there is no script `DIR/absent.py`",
        "`DIR` is a directory, not a script",
        "`DIR/book.ipynb` is a notebook, not a Python file",
    ]


def test_missing_module_is_told_apart_from_a_module_that_misses_something(own_process):
    (Path.cwd() / "half_here.py").write_text("import no_such_package_anywhere\n")
    with pytest.raises(UsageError, match=r"there is no module `absent\.steps` \(`absent` was not"):
        load_entry(Entry(kind="module", location="absent.steps"))
    with pytest.raises(
        UsageError, match=r"importing `half_here` failed at .*half_here\.py:1: Module"
    ):
        load_entry(Entry(kind="module", location="half_here"))


def test_exit_at_import_is_not_swallowed(own_process):
    path = written(own_process, "import sys\nsys.exit(3)\n")
    with pytest.raises(SystemExit):
        load_entry(script(path))


SIGNATURES = {
    "def build(): ...": "`build` has no parameter for the mesh",
    "def build(*, mesh): ...": "`build` has no parameter for the mesh",
    "def build(**knobs): ...": "`build` has no parameter for the mesh",
    "def build(mesh, size): ...": "`build` needs `size` besides the mesh, and it has no default",
    "def build(mesh, *, lr): ...": "`build` needs `lr` besides the mesh, and it has no default",
}


@pytest.mark.parametrize("text", SIGNATURES)
def test_signatures_that_cannot_be_called_with_a_mesh(text):
    scope = {}
    exec(text, scope)
    with pytest.raises(UsageError) as caught:
        read_signature(scope["build"])
    assert caught.value.message == SIGNATURES[text]


def test_knobs_are_keywords_with_scalar_defaults():
    def build(mesh, remat="full", micro=1, *, rate=0.1, fused=True, config=None, sizes=(1, 2)): ...

    def anything(mesh, **knobs): ...

    signature = read_signature(build)
    assert signature.knobs == (("remat", "full"), ("micro", 1), ("rate", 0.1), ("fused", True))
    assert not signature.takes_any_knob
    assert read_signature(anything).takes_any_knob
    check_knobs(read_signature(anything), (("remat", "full"),), name="anything")
    with pytest.raises(UsageError) as caught:
        check_knobs(signature, (("reamt", "full"),), name="build")
    assert caught.value.message == (
        "`build` takes no knob `reamt`; its knobs are: `remat`, `micro`, `rate`, `fused`"
    )
    check_knobs(signature, (("fused", False), ("rate", 0.2), ("micro", 2)), name="build")
    with pytest.raises(UsageError) as caught:
        check_knobs(signature, (("fused", "none"),), name="build")
    assert caught.value.message == (
        "`build` takes a bool as the knob `fused` (its default is True), not 'none'"
    )


def test_closure_travels_in_a_pickle(tmp_path, own_process):
    width = 48

    def build(mesh, depth=2):
        return width * depth

    entry = pickle_entry(build, tmp_path / "build.pkl", ("--x",))
    assert (entry.kind, entry.function, entry.argv) == ("pickle", "build", ("--x",))
    loaded = load_entry(entry)
    assert loaded(None) == 96
    assert read_signature(loaded).knobs == (("depth", 2),)
    assert sys.argv[1:] == ["--x"]


def test_captured_mesh_is_one_clear_sentence(tmp_path):
    import jax
    import numpy as np

    mesh_of_notebook = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("dp",))
    device = jax.devices()[0]
    texts = []
    for captured in (mesh_of_notebook, device, [device]):

        def capturing(mesh):
            return captured  # noqa: B023

        with pytest.raises(UsageError) as caught:
            pickle_entry(capturing, tmp_path / "b.pkl")
        texts.append(str(caught.value))
        assert not (tmp_path / "b.pkl").exists()
    assert texts == [
        f"`capturing` captures a jax {kind} (`captured`), which cannot be sent to another process\n"
        "hint: use the mesh that the function is given, and create arrays inside it"
        for kind in ("Mesh", "Device", "Device")
    ]


def test_torn_pickle_is_told(tmp_path):
    (tmp_path / "b.pkl").write_bytes(b"\x80\x05torn")
    with pytest.raises(UsageError, match="cannot be loaded: UnpicklingError"):
        load_entry(Entry(kind="pickle", location=str(tmp_path / "b.pkl")))
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        load_entry(Entry(kind="pickle", location=str(tmp_path / "absent.pkl")))


def test_loading_does_not_import_jax():
    code = (
        "import sys, automesh, automesh.program.script.load, automesh.program.script.workload, "
        "automesh.program.script.signature, automesh.program.script.payload; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_script_is_what_its_text_says_whatever_lies_in_its_cache(own_process, monkeypatch):
    """Before, a set among its constants had one order in the first process, another in all later
    ones, and `__pycache__` beside it was written, and run."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = written(own_process, "def build(mesh): return 'planted'")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    planted = py_compile.compile(str(path), invalidation_mode=unchecked)
    path.write_text("def build(mesh): return 'the text'")
    assert load_entry(script(path))(None) == "the text"
    del sys.modules["train"]
    Path(planted).unlink()
    assert load_entry(script(path))(None) == "the text"
    assert list(Path(planted).parent.iterdir()) == []
