"""Adapters that follow the releases of training frameworks: their steps, and their settings for a
mesh."""

from automesh.package import count_as_ours

# An adapter builds a framework's step as the user's own script would, so its device queries are
# answered in the same way.
count_as_ours(__name__, __file__, asks_as_user=True)
