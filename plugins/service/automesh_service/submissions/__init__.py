"""Searches that others submit: bundles, orders, who may do what, and the process that runs them."""
