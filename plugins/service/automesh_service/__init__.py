"""The service: studies, rules and searches over HTTP, and its clients."""

from automesh.package import count_as_ours

count_as_ours(__name__, __file__)
