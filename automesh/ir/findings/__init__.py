"""Finds unexpected costs of memory or time in a partitioned program (no jax).

A rule is a function in `state` (arguments and results) or `program` (operations), listed in their
`RULES`, with its words in `report.findings.RULES` and its section in docs/lint.md. It names what it
finds by array, source line, bytes as formulas of the axis sizes, and axes.
"""
