"""Compares the figures of a rule with those of the script as it is today: figures, verdicts,
texts."""
