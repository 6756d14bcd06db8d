"""The orders of actions behind the schedules."""
