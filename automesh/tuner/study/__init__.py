"""A search's memory: trials, storage, leases, and whether they still hold."""
