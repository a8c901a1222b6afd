"""Counters of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "rlinf_vla_requests",
            "Messages answered, by outcome",
            ["dialect", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "rlinf_vla_request_seconds",
            "From message to answer",
            ["dialect"],
            buckets=SECONDS,
            registry=registry,
        )
        self.rows = Histogram(
            "rlinf_vla_call_rows",
            "Rows of a policy call",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.sessions = Gauge("rlinf_vla_sessions", "Open websockets", registry=registry)
        self.queue = Gauge(
            "rlinf_vla_queue", "Requests that wait for the policy", registry=registry
        )
        self.refused = Counter(
            "rlinf_vla_refused", "Connections refused, by reason", ["reason"], registry=registry
        )

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self._registry)
