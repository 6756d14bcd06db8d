"""The command line: a module for each command, registered in `app`."""

from automesh.platforms.allowed import spare_threads

spare_threads()  # Before any of them imports numpy.
