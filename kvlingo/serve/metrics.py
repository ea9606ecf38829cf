"""Figures for Prometheus. Knows counters and names; no prompt, no key and no tenant is a label."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlingo.serve.protocol import Begun

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
REASON = re.compile(r"([A-Za-z_][\w -]{0,39}):")
MOST_REASONS = 32
KNOWN_REASONS = {
    "no tokens lie between": "nothing between",
    "anchors cover everything": "nothing between",
    "no model with a translator": "no source",
    "the translator from": "translator refused",
    "this hand-over looks bad": "doubted",
}
"""Reasons that are sentences, by how they begin; all others begin with a word and a colon."""


class EngineFigures(Collector):
    """The engine's own figures, read when asked for: bytes of caches, length of the queue."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self.stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield one gauge a figure."""
        for name, value in sorted(self.stats().items()):
            yield GaugeMetricFamily(f"kvlingo_engine_{re.sub(r'[^a-z0-9_]+', '_', name.lower())}", name, value=value)


class Figures:
    """All figures of one server."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineFigures(stats))
        self.requests = self._counter("requests", "Requests by route and status", "route", "status")
        self.switches = self._counter("switches", "Answers by how the model came to know the prompt", "kind")
        self.fallbacks = self._counter("fallbacks", "Translations that became a re-prefill, by reason", "reason")
        self.tokens = self._counter("prompt_tokens", "Prompt tokens by where their keys and values came from", "origin")
        self.completion = self._counter("completion_tokens", "Tokens answered")
        self.cancelled = self._counter("cancelled", "Answers whose client went away")
        self.ttft = Histogram(
            "kvlingo_ttft_seconds", "Time to the first token", ["kind"], buckets=SECONDS, registry=self.registry
        )
        self.queue = Histogram(
            "kvlingo_queue_seconds", "Time before a model turns to a request", buckets=SECONDS, registry=self.registry
        )
        self.reasons: set[str] = set()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvlingo_{name}", text, labels, registry=self.registry)

    def begun(self, begun: Begun) -> None:
        """Count how one prompt was read."""
        self.switches.labels(kind_of(begun)).inc()
        for origin in ("native", "translated", "recomputed"):
            self.tokens.labels(origin).inc(getattr(begun, f"{origin}_tokens"))
        if begun.fallback:
            self.fallbacks.labels(self.reason_class(begun.fallback)).inc()

    def reason_class(self, reason: str) -> str:
        """Return what kind of reason it is, so that labels stay few: a known one, or the word before the colon, or "other"."""
        found = REASON.match(reason)
        known = (kind for begins, kind in KNOWN_REASONS.items() if reason.startswith(begins))
        name = next(known, found[1].strip() if found else "other")
        if name not in self.reasons and len(self.reasons) >= MOST_REASONS:
            return "other"
        self.reasons.add(name)
        return name

    def text(self) -> bytes:
        """Return all figures in Prometheus's text format."""
        return generate_latest(self.registry)


def kind_of(begun: Begun) -> str:
    """Name how a model came to know a prompt: from another's cache, by reading again at a switch, or without a switch."""
    if begun.translated_tokens:
        return "translate"
    return "reprefill" if begun.switched_from or begun.source or begun.fallback else "none"
