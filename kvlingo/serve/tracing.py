"""One OpenTelemetry span for each request, where a collector is named; else nothing of it is even imported.

The only module that knows OpenTelemetry, an extra. A span holds what the log's line holds: who answered, how many tokens, how
long. No prompt, no answer and no key is in either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvlingo import __version__
from kvlingo.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,256}"
PARENTS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(rf"\s*{MEMBER}(\s*,\s*{MEMBER})*\s*"),
}
"""Headers of a client's own trace, as W3C writes them. Others are left out here: the library would write them into the log."""
FLUSH_MS = 5000
"""So long may the last spans take to go, once all requests have ended."""


class Spans:
    """Tells a provider of requests that have ended."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvlingo", __version__)

    def tell(
        self,
        method: str,
        route: str,
        status: int,
        times_ns: tuple[int, int],
        headers: Mapping[str, str],
        facts: Mapping[str, Any],
    ) -> None:
        """Tell of one request. Where its client traces too, the span goes under the client's."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        began, ended = times_ns
        told = {name: headers[name] for name, form in PARENTS.items() if form.fullmatch(headers.get(name, ""))}
        parent = TraceContextTextMapPropagator().extract(told)
        attributes = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            **{f"kvlingo.{name}": value for name, value in facts.items() if isinstance(value, str | int | float)},
        }
        span = self._tracer.start_span(f"{method} {route}", parent, SpanKind.SERVER, attributes, start_time=began)
        first_ms = facts.get("ttft_ms")
        if isinstance(first_ms, float) and first_ms > 0:
            span.add_event("first token", timestamp=min(began + int(1e6 * first_ms), ended))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, facts.get("error")))
        span.end(ended)

    def close(self) -> None:
        """Send what is left; a collector that does not answer is not waited for."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def open_spans(endpoint: str | None, environment: Mapping[str, str]) -> Spans | None:
    """Return where spans go: to `endpoint`, or as OpenTelemetry's own variables say; None where neither names a collector.

    Raises `MissingExtra` where a collector is named and the extra is not installed.
    """
    if endpoint is None and not any(environment.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise MissingExtra(f"spans need {error.name}: pip install 'kvlingo[otel]'") from error
    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "kvlingo"}))
    url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Spans(provider)
