"""Searches that users submit: bundles, orders, rights, and the process that runs the searches."""
