"""See `benchmarks.kill_fleet.command`."""
