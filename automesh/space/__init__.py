"""Finds the legal plans of a search space, from its axes, constraints and knobs; says why others
are not legal."""
