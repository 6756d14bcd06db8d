"""What follows the releases of training frameworks: their steps, and their words for a mesh."""

from automesh.package import count_as_ours

# An adapter builds a framework's step as the user's own script would: devices answer it likewise.
count_as_ours(__name__, __file__, asks_as_user=True)
