"""Logical names by where an array is in its tree: the regex rules of EasyLM and EasyDeL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from jax.sharding import PartitionSpec

from automesh.errors import UsageError, WrongType, kind_of
from automesh.partition.carriers import Leaf, dim_name, map_leaves

Names = Sequence[str | tuple[str, ...] | None] | PartitionSpec
"""A name for each dimension; a PartitionSpec may leave out the last ones."""
_EXAMPLE = "write for example [(r'attn/.*kernel', ('embed', 'heads'))]"


def names_by_path(rules: Sequence[tuple[str, Names]], tree: Any) -> Any:
    """Logical names for the arrays of a plain tree, from rules over their paths.

    What it returns is the `names` of `shard`, `pspec_for` and `infer_resource_partitions`. Rules
    that name mesh axes already need the mapping `{axis: axis for axis in mesh.axis_names}`.

    Example:
      >>> import numpy as np
      >>> from automesh.partition import names_by_path
      >>> rules = [(r"wte/embedding", ("vocab", "embed")), (r".*", (None,))]
      >>> names_by_path(rules, {"wte": {"embedding": np.ones((8, 4))}, "bias": np.ones(4)})
      {'bias': (None,), 'wte': {'embedding': ('vocab', 'embed')}}

    Args:
      rules: a regex that is searched in the path (`/` between its parts, as in
        `layers/0/attn/kernel`), and the names of the dimensions. The first that is found wins.
      tree: arrays or ShapeDtypeStructs; scalars need no rule.

    Raises:
      UsageError: no rule is found in a path, a regex is malformed, or the names of an array are
        more or fewer than its dimensions.
      WrongType: `rules` is no list, or a rule no pair of a regex and names.
    """
    if not isinstance(cast("object", rules), tuple | list):
        raise WrongType(
            f"the rules must be a list of pairs, got {kind_of(rules)}: {rules!r}", hint=_EXAMPLE
        )
    compiled = [_compiled(rule) for rule in rules]

    def names_of(leaf: Leaf) -> Any:
        if not leaf.is_array:
            return None
        if not leaf.array.shape:
            return ()
        for pattern, names in compiled:
            if pattern.search(leaf.path):
                return _fitting(names, leaf)
        raise UsageError(
            f"no rule names the dimensions of array `{leaf.path}` of shape {leaf.array.shape}",
            hint="add a rule for it; ('.*', PartitionSpec()) at the end names nothing else",
        )

    return map_leaves(tree, names_of)


def _compiled(rule: Any) -> tuple[re.Pattern[str], Any]:
    pair = isinstance(rule, tuple | list) and len(rule) == 2  # pyright: ignore[reportUnknownArgumentType]
    if not pair or not isinstance(rule[0], str) or isinstance(rule[1], str):
        raise WrongType(
            f"a rule must be a pair of a regex and the names of the dimensions, got {rule!r}",
            hint=_EXAMPLE,
        )
    if not isinstance(rule[1], tuple | list | PartitionSpec):
        raise WrongType(
            f"the names in rule `{rule[0]}` must be a tuple or a PartitionSpec, "
            f"got {kind_of(rule[1])}",
            hint=_EXAMPLE,
        )
    for name in rule[1]:
        dim_name(name, f"rule `{rule[0]}`")
    try:
        return re.compile(rule[0]), rule[1]
    except re.error as error:
        raise UsageError(f"`{rule[0]}` is not a regex: {error}", hint=_EXAMPLE) from None


def _fitting(names: Any, leaf: Leaf) -> Any:
    read = Leaf(path=leaf.path, names=tuple(names), array=leaf.array, rebuild=leaf.rebuild)
    if isinstance(names, PartitionSpec) and len(names) <= len(leaf.array.shape):
        return names
    read.named_shape()
    return tuple(names)
