"""Turns a graph into terms: kernels, collectives and memory as formulas."""
