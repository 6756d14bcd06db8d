"""`mesh_rules` in Python, as in AXLearn and Loadax: pairs of a pattern and a mesh shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.report.export.nouns import AxisSize, Setting
from automesh_frameworks.exports.source_text import as_size, as_sizes, literal, values_named

HYBRID, FROM_AXES = "HybridMeshShape", "mesh_shape_from_axes"
_ICI, _DCN = "ici_mesh_shape", "dcn_mesh_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeText:
    """A mesh shape as it was read: the sizes inside a granule, and those between granules if there
    are any."""

    ici: tuple[int, ...]
    dcn: tuple[int, ...] | None = None


def hybrid_text(setting: Setting) -> str:
    """Returns a shape as Python: a tuple if it is flat, else a `HybridMeshShape`.

    >>> hybrid_text(Setting(axes=(AxisSize(name="data", dcn=2), AxisSize(name="fsdp", ici=4))))
    'HybridMeshShape(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1))'
    """
    ici = tuple(axis.ici for axis in setting.axes)
    if setting.flat:
        return repr(ici)
    dcn = tuple(axis.dcn for axis in setting.axes)
    return f"{HYBRID}({_ICI}={ici!r}, {_DCN}={dcn!r})"


def pairs_in(tree: ast.AST) -> list[tuple[str, ast.expr]]:
    """Returns the pairs of `mesh_rules`: a pattern, and the expression that it selects; empty if
    there is no such list.

    Raises:
      UsageError: there are several lists, or one is no literal list.
    """
    lists = [
        node for node in values_named(tree, "mesh_rules") if isinstance(node, (ast.Tuple, ast.List))
    ]
    if len({ast.dump(node) for node in lists}) > 1:
        lines = ", ".join(str(node.lineno) for node in lists)
        raise UsageError(
            f"the file has {len(lists)} lists `mesh_rules`, in the lines {lines}",
            hint="put the one of your model into a file of its own",
        )
    return [_pair(node) for node in (lists[0].elts if lists else ())]


def _pair(node: ast.expr) -> tuple[str, ast.expr]:
    match node:
        case (
            ast.Tuple(elts=[ast.Constant(value=str(pattern)), value])
            | ast.List(elts=[ast.Constant(value=str(pattern)), value])
        ):
            return pattern, value
        case _:
            raise UsageError(
                f"line {node.lineno} of `mesh_rules` is not a pattern and a mesh",
                hint="write the pattern as a text",
            )


def shape_in(node: ast.expr, names: Sequence[str]) -> ShapeText:
    """Reads a tuple of sizes, `mesh_shape_from_axes(data=-1)`, or a `HybridMeshShape` of both.

    Raises:
      UsageError: the expression is something else.
    """
    match node:
        case ast.Call(func=func, args=args, keywords=keywords) if called(func) == HYBRID:
            given = {keyword.arg: keyword.value for keyword in keywords}
            given |= dict(zip((_ICI, _DCN), args, strict=False))
            if _ICI in given and _DCN in given:
                return ShapeText(
                    ici=shape_in(given[_ICI], names).ici, dcn=shape_in(given[_DCN], names).ici
                )
        case ast.Call(func=func, args=[], keywords=keywords) if called(func) == FROM_AXES:
            sizes = {one.arg or "": as_size(literal(one.value), one.arg or "") for one in keywords}
            unknown = sorted(sizes.keys() - set(names))
            if unknown:
                raise UsageError(
                    f"line {node.lineno} names the axis `{unknown[0]}`, which is none of "
                    f"{', '.join(names)}"
                )
            return ShapeText(ici=tuple(sizes.get(name, 1) for name in names))
        case ast.Tuple() | ast.List():
            return ShapeText(ici=as_sizes(literal(node), f"the mesh shape in line {node.lineno}"))
        case _:
            pass
    raise UsageError(
        f"line {node.lineno} does not spell out a mesh shape: `{ast.unparse(node)[:60]}`",
        hint=f"write a tuple of sizes, or a {HYBRID}",
    )


def setting_of_shape(match: str, shape: ShapeText, names: Sequence[str]) -> Setting:
    """Makes a setting from a shape.

    Raises:
      UsageError: it has another number of sizes than there are axes.
    """
    dcn = shape.dcn or (1,) * len(shape.ici)
    if not len(names) == len(shape.ici) == len(dcn):
        raise UsageError(
            f"the rule `{match}` has {len(shape.ici)} sizes for the {len(names)} axes "
            f"{', '.join(names)}"
        )
    axes = tuple(AxisSize(name=n, ici=i, dcn=d) for n, i, d in zip(names, shape.ici, dcn))
    return Setting(match=match, axes=axes, flat=shape.dcn is None)


def called(func: ast.expr) -> str:
    """Returns the last name of the called function: `x` for `jax.checkpoint_policies.x`."""
    match func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def calls_of(node: ast.AST, name: str) -> Iterator[dict[str, ast.expr]]:
    """Yields the keywords of every `NAME.default_config().set(...)`."""
    for call in ast.walk(node):
        match call:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Attribute(value=owner, attr="default_config")),
                    attr="set",
                ),
                keywords=keywords,
            ) if called(owner) == name:
                yield {keyword.arg or "": keyword.value for keyword in keywords}
            case _:
                pass
