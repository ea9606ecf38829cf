"""Spans: one for each request, with what the log holds and no word of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
import pytest

from kvlingo.errors import MissingExtra
from kvlingo.serve import tracing
from kvlingo.serve.settings import Settings
from kvlingo.serve.tracing import Spans, open_spans
from tests.fake_engine import FakeEngine, serving

sdk = pytest.importorskip(
    "opentelemetry.sdk.trace", reason="OpenTelemetry is not installed (pip install 'kvlingo[otel]')"
)
exporting = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

SECRET = "the stone lies under seven hills"
CHAT = "/v1/chat/completions"
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@contextmanager
def traced(**knobs: Any) -> Iterator[tuple[str, Any]]:
    """Serve a fake engine whose spans stay in memory."""
    kept = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(exporting.SimpleSpanProcessor(kept))
    with serving(FakeEngine(**knobs), Settings(), Spans(provider)) as served:
        yield served.url, kept


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": SECRET}], **fields}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_is_one_span_without_its_words(stream: bool) -> None:
    with traced(token_s=0.001) as (url, kept):
        answer = httpx.post(f"{url}{CHAT}", json=body(stream=stream, max_tokens=5), headers={"traceparent": PARENT})
        assert answer.status_code == 200
    (span,) = kept.get_finished_spans()
    assert span.name == f"POST {CHAT}"
    wanted = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "kvlingo.model": "small",
        "kvlingo.completion_tokens": 5,
        "kvlingo.stream": stream,
        "kvlingo.translated_tokens": 0,
    }
    assert wanted.items() <= span.attributes.items()
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in PARENT
    assert [event.name for event in span.events] == ["first token"]
    assert span.start_time < span.events[0].timestamp <= span.end_time
    assert span.status.is_ok or span.status.status_code.name == "UNSET"
    for word in (SECRET, "stone", "red", "green"):
        assert word not in span.to_json()


@pytest.mark.parametrize(
    ("headers", "kept_state"),
    [
        ({"traceparent": PARENT, "tracestate": "a=1, b@c=x y"}, {"a": "1", "b@c": "x y"}),
        ({"traceparent": PARENT, "tracestate": f"no member: {SECRET}"}, {}),
        ({"traceparent": PARENT, "tracestate": "a=" + "x" * 9999}, {}),
        ({"traceparent": f"{PARENT} {SECRET}"}, None),
    ],
)
def test_what_is_no_trace_of_the_clients_is_left_out_and_not_logged(
    headers: dict[str, str], kept_state: dict[str, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with traced() as (url, kept):
        assert httpx.post(f"{url}{CHAT}", json=body(), headers=headers).status_code == 200
    (span,) = kept.get_finished_spans()
    assert (None if span.parent is None else dict(span.parent.trace_state)) == kept_state
    assert SECRET not in caplog.text
    assert "xxxx" not in caplog.text


def test_failures_and_refusals_are_told_by_kind() -> None:
    with traced(error=RuntimeError(SECRET)) as (url, kept):
        assert httpx.post(f"{url}{CHAT}", json=body()).status_code == 500
        assert httpx.post(f"{url}{CHAT}", json=body(n=0)).status_code == 400
        assert httpx.get(f"{url}/{SECRET}").status_code == 404
    failed, refused, lost = kept.get_finished_spans()
    assert failed.status.status_code.name == "ERROR"
    assert failed.attributes["kvlingo.error"] == "RuntimeError"
    assert refused.attributes["kvlingo.code"] == "invalid_value"
    assert refused.status.status_code.name == "UNSET"
    assert lost.attributes["http.route"] == "other"
    assert all("stone" not in span.to_json() for span in (failed, refused, lost))


def test_who_leaves_is_a_span_too() -> None:
    with traced(token_s=0.05) as (url, kept):
        with httpx.stream("POST", f"{url}{CHAT}", json=body(stream=True, max_tokens=2000)) as answer:
            next(answer.iter_lines())
        for _ in range(200):
            if kept.get_finished_spans():
                break
            threading.Event().wait(0.05)
    (span,) = kept.get_finished_spans()
    assert span.attributes["kvlingo.cancelled"] is True


# --- whether there are any -------------------------------------------------------------------------------------------


def test_without_a_collector_there_are_none() -> None:
    assert open_spans(None, {}) is None
    assert open_spans(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvlingo\[otel\]'"):
        open_spans("http://127.0.0.1:9", {})


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Listen as a collector does."""
    got: list[tuple[str, bytes]] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Takes)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_spans_reach_a_collector(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with collector() as (url, got):
        if by == "environment":
            monkeypatch.setenv(tracing.ENDPOINTS[0], url)
        spans = open_spans(*((url, {}) if by == "setting" else (None, {tracing.ENDPOINTS[0]: url})))
        assert spans is not None
        with serving(FakeEngine(), Settings(), spans) as served:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20)
            client.chat.completions.create(**body())  # type: ignore[call-overload]
            client.close()
        spans.close()
    ((path, sent),) = got
    assert path == "/v1/traces"
    assert f"POST {CHAT}".encode() in sent
    assert b"kvlingo" in sent
    assert SECRET.encode() not in sent
