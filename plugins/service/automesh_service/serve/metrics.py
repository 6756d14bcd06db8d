"""Figures of the service for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The metrics of one service, with names in the style of Prometheus."""

    def __init__(self) -> None:
        # A registry of its own: a test process may have several services.
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "automesh_requests",
            "Requests by route, method and status.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "automesh_request_seconds",
            "From the head of a request to the end of its answer, streams of events left out.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.watchers = Gauge(
            "automesh_watchers", "Streams of events that are open.", registry=self.registry
        )
        self.studies = Gauge(
            "automesh_studies", "Studies by state.", ("state",), registry=self.registry
        )
        self.submissions = Gauge(
            "automesh_submissions", "Submissions by state.", ("state",), registry=self.registry
        )
        self.can_list = False
        self._is_storage_up = Gauge(
            "automesh_storage_up", "Whether the studies could be listed.", registry=self.registry
        )

    def note_storage(self, *, is_up: bool) -> None:
        """Records whether the studies could be listed just now."""
        self.can_list = is_up
        self._is_storage_up.set(is_up)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
