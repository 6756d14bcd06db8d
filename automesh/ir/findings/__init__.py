"""Finds unexpected costs of memory or time in a partitioned program (no jax).

A rule is one `Rule` in `RULES` of a module of this folder, with its check and its words, and has
its section in docs/lint.md. `registry` finds all of them. A check names what it finds by array,
source line, bytes as formulas of the axis sizes, and axes.
"""
