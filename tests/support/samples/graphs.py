"""Small programs written by hand, for tests of what works on a `Graph`."""

from automesh.ir.graph import Block, Graph, Operation, Value

SIZES = {"dp": 2, "fsdp": 4, "tp": 2}


class Program:
    """Builds one block; operations are appended as they are called."""

    def __init__(self, block=None):
        self.block = block or Block()

    def argument(self, shape, axes=None, dtype="f32"):
        value = array(shape, axes, dtype)
        self.block.arguments.append(value)
        return value

    def __call__(self, name, *operands, shape=None, split=None, dtype=None, **attributes):
        """Appends an operation; its result is like the first operand but for what is given."""
        like = operands[0] if operands else array(shape or ())
        shape = like.shape if shape is None else shape
        if split is None and len(like.axes) == len(shape):
            split = like.axes
        result = array(shape, split, dtype or like.dtype)
        result.is_constant = not operands
        self.block.operations.append(
            Operation(
                name=name,
                operands=list(operands),
                results=[result],
                attributes=attributes,
                source="step.py:7",
            )
        )
        return result

    def constant(self, shape, axes=None):
        return self("constant", shape=shape, split=axes, splat=0.0)

    def gather(self, value, *over):
        left = tuple(tuple(a for a in axes if a not in over) for axes in value.axes)
        gone = tuple(tuple(a for a in axes if a in over) for axes in value.axes)
        return self("all_gather", value, split=left, **moved(over, gone))

    def reduce(self, value, *over):
        return self("all_reduce", value, **moved(over))

    def slice(self, value, *per_dimension):
        axes = tuple((*old, *new) for old, new in zip(value.axes, per_dimension, strict=True))
        over = tuple(axis for new in per_dimension for axis in new)
        return self("all_slice", value, split=axes, **moved(over, per_dimension))

    def dot(self, left, right, *, contracting=(1, 0), axes=None):
        free_left = [d for d in range(len(left.shape)) if d != contracting[0]]
        free_right = [d for d in range(len(right.shape)) if d != contracting[1]]
        shape = [left.shape[d] for d in free_left] + [right.shape[d] for d in free_right]
        if axes is None:
            axes = [left.axes[d] for d in free_left] + [right.axes[d] for d in free_right]
        return self(
            "dot_general",
            left,
            right,
            shape=tuple(shape),
            split=tuple(axes),
            lhs_batch=(),
            rhs_batch=(),
            lhs_contracting=(contracting[0],),
            rhs_contracting=(contracting[1],),
        )

    def loop(self, trips, starts, write_body):
        """A scan: `write_body(program, *arguments)` gives what the next turn starts with."""
        body = Program()
        arguments = [body.argument(v.shape, v.axes, v.dtype) for v in starts]
        body.block.returned = list(write_body(body, *arguments))
        results = [array(v.shape, v.axes, v.dtype) for v in starts]
        self.block.operations.append(
            Operation(
                name="while",
                operands=list(starts),
                results=results,
                bodies=[body.block],
                trips=trips,
                source="step.py:3",
            )
        )
        return results

    def graph(self, *returned, mesh=None):
        self.block.returned = list(returned)
        return Graph(top=self.block, mesh=tuple((mesh or SIZES).items()))


def array(shape, axes=None, dtype="f32"):
    return Value(shape=tuple(shape), dtype=dtype, axes=tuple(axes or ((),) * len(shape)))


def moved(over, per_dimension=None):
    group = 1
    for axis in over:
        group *= SIZES[axis]
    found = {"axes": tuple(over), "group": group, "exact": True}
    return found if per_dimension is None else {**found, "per_dimension": tuple(per_dimension)}


def names(block):
    return [operation.name for operation in block.operations]
