"""Search spaces as files: what they say, where they are found, what is wrong with them."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import DEFAULT_AXES
from automesh.space.space import AxisRange, Constraint, Knob
from automesh.space.spec import read_space, shipped_spaces

WHOLE = """
[axes]
dp = { dcn = true }
fsdp = { min = 2, max = 64 }
tp = { size = 4 }
[constraints]
"dp * fsdp" = { divides = "batch", max = 128 }
tp = { min = 2 }
[knobs]
remat = ["none", "full"]
microbatches = [1, 2]
[compiler_options.tpu]
xla_a = ["default", 1000, true, 0.5]
"""


def read(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_space(str(path))


def test_a_file_is_read_whole(tmp_path):
    space = read(tmp_path, WHOLE)
    assert not space.shipped
    assert space.names == ("dp", "fsdp", "tp")
    assert space.batch_axes == ("dp", "fsdp")
    assert space.axes == (
        AxisRange(name="dp", dcn=True),
        AxisRange(name="fsdp", minimum=2, maximum=64),
        AxisRange(name="tp", minimum=4, maximum=4),
    )
    assert space.constraints == (
        Constraint(factors=("dp", "fsdp"), relation="divides", bound="batch"),
        Constraint(factors=("dp", "fsdp"), relation="max", bound=128),
        Constraint(factors=("tp",), relation="min", bound=2),
    )
    assert space.knobs == (
        Knob(name="remat", values=("none", "full")),
        Knob(name="microbatches", values=(1, 2)),
    )
    (option,) = space.options_for("tpu")
    assert [type(value) for value in option.values] == [str, int, bool, float]
    assert space.options_for("cpu") == ()


@pytest.mark.parametrize("names", [("model", "data"), ("tp", "dp"), ("fsdp",), ("pp", "tp")])
def test_axes_of_ones_own_are_all_there_is_in_the_order_of_the_file(tmp_path, names):
    space = read(tmp_path, "[axes]\n" + "".join(f"{name} = {{}}\n" for name in names))
    assert space.names == names
    assert tuple(axis.name for axis in space.axes) == names


def test_an_axis_that_a_script_needs_may_be_listed_with_size_one(tmp_path):
    space = read(tmp_path, "[axes]\ndp = {}\nsp = { size = 1 }")
    assert space.names == ("dp", "sp")


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("[axes]\ndp = {}\ntp = {}", ("dp",)),
        ("[axes]\nmodel = {}\ndata = {}", ("data",)),
        ("[axes]\nmodel = {}", ()),
        ('batch_axes = ["rows"]\n[axes]\nrows = {}\ndp = {}', ("rows",)),
        ("batch_axes = []\n[axes]\ndp = {}", ()),
    ],
)
def test_batch_axes_are_said_or_have_the_usual_names(tmp_path, text, batch):
    assert read(tmp_path, text).batch_axes == batch


@pytest.mark.parametrize("name", ["auto", "dense_lm", "moe_lm", "long_context"])
def test_shipped_spaces_are_found_by_name_and_by_path(name):
    space = read_space(name)
    assert space.shipped
    assert set(space.names) == set(DEFAULT_AXES)
    assert space.batch_axes == (("dp", "fsdp", "ep") if name == "moe_lm" else ("dp", "fsdp"))
    assert read_space(str(shipped_spaces()[name])).shipped


def test_auto_has_all_five_axes():
    assert tuple(axis.name for axis in read_space("auto").axes) == DEFAULT_AXES


def test_a_copy_of_a_shipped_space_is_ones_own(tmp_path):
    assert not read(tmp_path, shipped_spaces()["auto"].read_text()).shipped


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dense", "there is no search space `dense` (did you mean `dense_lm`?)"),
        ("nosuch.toml", "there is no search space file `nosuch.toml`"),
        ("/", "there is no search space file `/`"),
    ],
)
def test_spaces_that_are_not_there(name, said):
    with pytest.raises(UsageError) as caught:
        read_space(name)
    assert said in caught.value.message


AXES = "[axes]\ndp = {}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`axes` is missing"),
        ("[axes\n", "is not TOML: expected ']' at the end of a table declaration (at line 1"),
        ("[axis]\ndp = {}", "`axis` is not a known key (did you mean `axes`?)"),
        ("[axes]", "`axes` must not be empty"),
        ("batch_axes = ['dpp']\n" + AXES, "`batch_axes`: batch axis `dpp` is not a mesh axis (did"),
        ("batch_axes = ['dp', 'dp']\n" + AXES, "`batch_axes`: batch axes must be distinct"),
        ("batch_axes = 'dp'\n" + AXES, '`batch_axes` must be an array, got "dp"'),
        ('[axes]\n"d-p" = {}', "`d-p` is not a mesh axis name"),
        ("[axes]\ndp = 2", "`axes.dp` must be an object, got 2"),
        ("[axes]\ndp = { maxx = 3 }", "`axes.dp.maxx` is not a known key (did you mean `max`?)"),
        ("[axes]\ndp = { max = 'a' }", '`axes.dp.max` must be an integer, got "a"'),
        ("[axes]\ndp = { max = 0 }", "`axes.dp.max` must be greater than or equal to 1, got 0"),
        ("[axes]\ndp = { max = true }", "`axes.dp.max` must be an integer, got true"),
        ("[axes]\ndp = { dcn = 1 }", "`axes.dp.dcn` must be a boolean, got 1"),
        ("[axes]\ndp = { min = 4, max = 2 }", "at least 4 and at most 2, which no size is"),
        ("[axes]\ndp = { size = 4, max = 8 }", "`axes.dp` has both `size` and a bound"),
        (AXES + '[constraints]\n"dp+tp" = { max = 2 }', "`constraints.dp+tp` is not a product"),
        (AXES + "[constraints]\ndp = {}", "`constraints.dp` says nothing"),
        (AXES + "[constraints]\ndp = { divides = 0 }", "`constraints.dp.divides` must be greater"),
        (
            AXES + "[constraints]\ndp = { divides = true }",
            "`constraints.dp.divides` must be an integer or a string, got true",
        ),
        (AXES + "[constraints]\ndp = { min = 4, max = 2 }", "has min 4 above max 2"),
        (AXES + "[knobs]\nremat = 'full'", '`knobs.remat` must be an array, got "full"'),
        (AXES + "[knobs]\nremat = []", "`knobs.remat` must not be empty"),
        (AXES + "[knobs]\nremat = [[1]]", "`knobs.remat[0]` must be a boolean or an integer or"),
        (AXES + "[knobs]\nremat = [1, 1]", "`knobs.remat` lists a value twice"),
        (AXES + "[knobs]\nlr = [nan]", "`knobs.lr` lists a number that is not finite"),
        (AXES + "[knobs]\ndp = [1]", "`knobs.dp` has the name of a mesh axis"),
        (
            AXES + "[compiler_options.tpuu]\na = ['default']",
            "`compiler_options.tpuu` is not a platform (did you mean `tpu`?)",
        ),
    ],
)
def test_mistakes_are_named_with_file_and_key(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert said in caught.value.message
    assert caught.value.message.startswith(f"`{tmp_path / 'mine.toml'}`")
