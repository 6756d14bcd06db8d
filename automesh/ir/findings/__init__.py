"""What a partitioned program does that costs memory or time and that nobody asked for (no jax).

A rule is a function in `state` (arguments and results) or `program` (operations), listed in their
`RULES`, with its words in `report.findings.RULES` and its section in docs/lint.md. It names what it
finds by array, source line, bytes as formulas of the axis sizes, and axes.
"""
