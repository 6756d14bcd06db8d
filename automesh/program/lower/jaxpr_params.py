"""Parameters of traced equations whose names change between releases of jax (jax)."""

from __future__ import annotations

from typing import Any

from automesh.errors import AutomeshError


class UnknownLoop(AutomeshError):
    """A loop of this jax says nowhere how many values it carries."""


def scan_operands(equation: Any) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried; the rest is sliced.

    Up to jax 0.10.2 the equation states both numbers; from 0.11 on it holds a tree of (constants,
    carried, sliced), which is read by filling the operands in.

    Raises:
      UnknownLoop: neither is there.
    """
    params = equation.params
    if "num_consts" in params and "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    tree: Any = params.get("ft_in")
    if hasattr(tree, "update") and hasattr(tree, "unpack"):
        groups = [list(group) for group in tree.update(list(equation.invars)).unpack()]
        if len(groups) == 3 and sum(map(len, groups)) == len(equation.invars):
            return len(groups[0]), len(groups[1])
    raise UnknownLoop(
        f"this jax does not say what a `scan` carries: its parameters are {', '.join(params)}",
        hint="return the initial arguments from `init`, or use a version that README names",
    )
