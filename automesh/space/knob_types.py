"""A knob takes values of the type of its default: `remat=False` takes false and true, nothing else.

A value of another type would go unnoticed: the string "none" is true, and a rule would then record
the opposite of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from automesh.errors import UsageError
from automesh.mesh.axes import Scalar
from automesh.space.space import Knob

_NAMES = ((bool, "a bool"), (int, "an int"), (float, "a float"))


def type_name(default: Scalar) -> str:
    """Names the type of a knob with this default.

    >>> type_name(False), type_name(2), type_name(0.5), type_name("full")
    ('a bool', 'an int', 'a float', 'a str')
    """
    return next((name for kind, name in _NAMES if isinstance(default, kind)), "a str")


def as_type_of(default: Scalar, value: Scalar) -> Scalar | None:
    """Converts a value to the type of a knob with this default; None if it has another type.

    >>> as_type_of(1.0, 2), as_type_of(1, 2.0), as_type_of(1, True), as_type_of(False, 0)
    (2.0, None, None, None)
    """
    if isinstance(default, bool) or isinstance(value, bool):
        return value if isinstance(default, bool) and isinstance(value, bool) else None
    if isinstance(default, str) or isinstance(value, str):
        return value if isinstance(default, str) and isinstance(value, str) else None
    if isinstance(default, float):
        return float(value)
    return value if isinstance(value, int) else None


def fitting_knob(
    knob: Knob, default: Scalar, *, space: str, shipped: bool, notices: list[str]
) -> Knob | None:
    """Checks a knob's values against the type that `build` takes; None leaves the knob out.

    Args:
      space: name of the search space.
      shipped: true for a space that comes with automesh, which cannot know the user's types: values
        of another type become a notice, and a boolean knob is tried with false and true.

    Raises:
      UsageError: a user's own space has a value of another type.
    """
    values = [as_type_of(default, value) for value in knob.values]
    kept = tuple(value for value in values if value is not None)
    if len(kept) == len(values):
        return Knob(name=knob.name, values=kept)
    wanted = f"{type_name(default)} (its default is {_as_toml(default)})"
    if not shipped:
        wrong = next(old for old, new in zip(knob.values, values, strict=True) if new is None)
        raise UsageError(
            f"the search space `{space}` gives the knob `{knob.name}` the value "
            f"{_as_toml(wrong)}, but `build` takes {wanted}",
            hint=f"list values of that type, as in `{knob.name} = {_example(default)}`",
        )
    listed = ", ".join(map(_as_toml, knob.values))
    if isinstance(default, bool):
        notices.append(f"knob `{knob.name}` is tried with false and true: `build` takes {wanted}")
        return Knob(name=knob.name, values=(False, True))
    notices.append(f"knob `{knob.name}` left out: `build` takes {wanted}, not {listed}")
    return None


def _as_toml(value: Scalar) -> str:
    """Writes a value as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _example(default: Scalar) -> str:
    examples: Sequence[Scalar] = (False, True) if isinstance(default, bool) else (default,)
    return f"[{', '.join(map(_as_toml, examples))}]"
