"""Programs that measure automesh itself; each prints JSON on its last line."""
