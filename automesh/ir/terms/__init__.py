"""From the graph to terms: kernels, collectives and memory as formulas."""
