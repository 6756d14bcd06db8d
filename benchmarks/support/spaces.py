"""Search spaces for the examples, whose meshes have all five usual axes."""

from __future__ import annotations

import tomlkit

from automesh.mesh.axes import DEFAULT_AXES


def with_usual_axes(text: str) -> str:
    """The text of a space with the usual axes in their order; those that it leaves out get size 1.

    >>> print(with_usual_axes("[axes]\\ntp = {}\\ndp = { max = 2 }\\n"))
    [axes]
    dp = {max = 2}
    fsdp = {size = 1}
    ep = {size = 1}
    tp = {}
    sp = {size = 1}
    <BLANKLINE>
    """
    space = tomlkit.parse(text).unwrap()
    document = tomlkit.parse(text)
    axes = tomlkit.table()
    for name in DEFAULT_AXES:
        value = tomlkit.inline_table()
        value.update(space["axes"].get(name, {"size": 1}))
        axes.add(name, value)
    document["axes"] = axes
    return tomlkit.dumps(document)
