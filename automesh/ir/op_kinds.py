"""Kinds of operations of a `Graph` that fusion and pricing distinguish."""

from __future__ import annotations

from automesh.collectives import STABLEHLO

# Move data between devices, except `all_slice`: every device keeps a part of its data.
COLLECTIVES = frozenset(STABLEHLO)
# Views: their results are their operands in another form.
VIEWS = frozenset(
    ("reshape", "bitcast_convert", "optimization_barrier", "enter_manual", "leave_manual", "copy")
)
# Read only a part of their first operand.
SLICES = frozenset(("slice", "dynamic_slice", "real_dynamic_slice", "all_slice"))
# One result element per operand element, or no operand: compilers fuse them into their users.
ELEMENTWISE = frozenset(
    (
        "abs", "add", "and", "atan2", "broadcast_in_dim", "cbrt", "ceil", "clamp", "compare",
        "complex", "concatenate", "constant", "convert", "cosine", "count_leading_zeros", "divide",
        "dynamic_broadcast_in_dim", "erf", "erf_inv", "exponential", "exponential_minus_one",
        "floor", "imag", "iota", "is_finite", "log", "log_plus_one", "logistic", "map", "maximum",
        "minimum", "multiply", "negate", "not", "or", "pad", "partition_id", "popcnt", "power",
        "real", "reduce_precision", "remainder", "replica_id", "reverse", "round_nearest_afz",
        "round_nearest_even", "rsqrt", "select", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "sine", "sqrt", "square", "subtract", "tan", "tanh",
        "transpose", "xor",
    )
)  # fmt: skip
VIRTUAL = VIEWS | SLICES | ELEMENTWISE
# Matrix products: compilers fuse operations before and after them.
PRODUCTS = frozenset(("dot_general", "ragged_dot", "convolution"))
# Order effects and take no time.
NO_WORK = frozenset(("create_token", "after_all", "get_dimension_size"))
# Need each operand in memory as it is.
WANT_BUFFERS = COLLECTIVES | {
    "gather", "scatter", "sort", "custom_call", "while", "case", "fft", "cholesky",
    "triangular_solve", "top_k", "infeed", "outfeed", "send", "recv",
    "rng_bit_generator", "select_and_scatter",
}  # fmt: skip
# Pure operations: equal operands give equal results, without other effects.
PURE = (
    VIRTUAL
    | PRODUCTS
    | COLLECTIVES
    | {
        "dynamic_update_slice", "gather", "reduce", "reduce_window", "scatter", "sort", "top_k",
    }
) - {"optimization_barrier"}  # fmt: skip
