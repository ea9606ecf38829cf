"""The gateway below the client: bytes, headers, keys, hosts, silence, clients that go away, and the end of the server."""

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlingo.errors import BadInput
from kvlingo.serve.answering import SIDE_BY_SIDE, Answering, End
from kvlingo.serve.doors import LOG, JsonLines
from kvlingo.serve.gateway import ROUTES, listen, serve
from kvlingo.serve.keys import digest_of
from kvlingo.serve.protocol import Busy, Request, Sampling, TokenInfo
from kvlingo.serve.replies import Fault, chat_logprob, finite, text_shape
from kvlingo.serve.settings import Settings
from kvlingo.serve.speaking import Line, Stalled
from tests.fake_engine import FakeEngine, Serving, serving
from tests.serving import twin_engine

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
KEY = "sk-of-alice"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving[FakeEngine]]:
    settings = Settings(max_body_bytes=20_000, keepalive_s=0.1, stall_s=0.5, cors_origins=("https://chat.example",))
    with serving(FakeEngine(), settings) as running:
        yield running


@pytest.fixture
def engine(served: Serving[FakeEngine]) -> FakeEngine:
    """Return the served engine, all its knobs as new."""
    until(lambda: served.engine.running == 0)
    served.engine.__init__()  # type: ignore[misc]
    return served.engine


@pytest.fixture(scope="module")
def http(served: Serving[FakeEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=20) as client:
        yield client


def until(done: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return a reply's error, having seen that it is one of OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# --- bodies and routes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 10_000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"seed": 1' + b"0" * 9000 + b"}",
        json.dumps(BODY).encode() + b"x",
        json.dumps({**BODY, "temperature": 1e308}).replace("1e+308", "1e999").encode(),
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_a_bad_body_is_a_400(http: httpx.Client, engine: FakeEngine, body: bytes) -> None:
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert not engine.asked


@pytest.mark.parametrize("size", [20_001, 10_000_000])
@pytest.mark.parametrize("length_told", [True, False])
def test_a_large_body_is_a_413(http: httpx.Client, engine: FakeEngine, size: int, length_told: bool) -> None:
    content = b"x" * size
    headers = {"Content-Type": "application/json"}
    response = http.post(CHAT, content=content if length_told else iter([content]), headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_a_body_at_the_limit_is_read(http: httpx.Client, engine: FakeEngine) -> None:
    text = json.dumps(BODY)
    body = text + " " * (20_000 - len(text))
    assert http.post(CHAT, content=body, headers={"Content-Type": "application/json"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_no_json_by_its_type(http: httpx.Client, engine: FakeEngine, kind: str | None) -> None:
    response = http.post(CHAT, content=json.dumps(BODY), headers={"Content-Type": kind} if kind else {})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def head_of(length: int) -> bytes:
    """Return the head of a request with a body of JSON."""
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_body_that_does_not_come_is_a_408(served: Serving[FakeEngine], engine: FakeEngine) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head_of(100) + b"{")
        answer = ""
        while piece := connection.recv(65536).decode():  # until it is closed: what came would be taken for a request
            answer += piece
    assert answer.startswith("HTTP/1.1 408")
    assert '"code":"request_timeout"' in answer
    assert not engine.asked


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_an_unknown_route_is_an_error_in_json(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    said = error_of(response)
    if status == 405:
        assert response.headers["allow"] == {CHAT: "POST", "/": "GET, HEAD"}.get(path, "GET")
        assert said["message"].endswith(f"only {response.headers['allow']}")


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é"])
def test_a_bad_conversation_name(http: httpx.Client, engine: FakeEngine, name: str) -> None:
    response = http.post(CHAT, json=BODY, headers={b"X-Conversation": name.encode()})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Conversation"


def test_the_description_names_every_field(http: httpx.Client) -> None:
    openapi = http.get("/openapi.json").json()
    schema = openapi["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    assert {"messages", "max_completion_tokens", "kvlingo"} <= set(fields["properties"])
    assert fields["additionalProperties"] is False


FULL_CHAT = {
    **BODY,
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
FORMED_CHAT = {
    **BODY,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
}


@pytest.mark.parametrize("body", [FULL_CHAT, FORMED_CHAT], ids=["tools", "response_format"])
def test_the_description_allows_what_is_supported(http: httpx.Client, body: dict[str, Any]) -> None:
    """What is refused for asking for something stands beside it, and hides no field that is known."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    form = {"$ref": "#/components/schemas/ChatBody", "components": {"schemas": schemas}}
    jsonschema.validate(body, form)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "audio": {"voice": "alloy"}}, form)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "tools": [{"type": "function"}]}, form)


def test_probes(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_headers_that_keep_it_flowing(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post(CHAT, json={**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.content.isascii()
    for event in response.text.split("\n\n"):
        assert "\n" not in event


def test_the_first_byte_comes_at_once_and_comments_while_it_waits(http: httpx.Client, engine: FakeEngine) -> None:
    engine.prefill_s = 2.5
    began = time.monotonic()
    with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        arrived = [(time.monotonic() - began, line) for line in response.iter_lines() if line]
    assert arrived[0][0] < engine.prefill_s / 2
    assert arrived[0][1] == ": keepalive"
    assert sum(line == ": keepalive" for _, line in arrived) >= 3
    assert arrived[-1][1] == "data: [DONE]"


def test_no_comment_where_nothing_waits(http: httpx.Client, engine: FakeEngine) -> None:
    assert ": keepalive" not in http.post(CHAT, json={**BODY, "stream": True}).text


def test_an_error_in_a_stream_ends_it_without_done(http: httpx.Client, engine: FakeEngine) -> None:
    engine.error, engine.error_after = RuntimeError("secret"), 2
    response = http.post(CHAT, json={**BODY, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "internal"
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


def test_an_error_after_a_long_wait_is_an_event(http: httpx.Client, engine: FakeEngine) -> None:
    engine.prefill_s, engine.error, engine.error_after = 0.5, Busy(1), 1
    response = http.post(CHAT, json={**BODY, "stream": True})
    assert response.status_code == 200
    assert '"code":"queue_full"' in response.text
    assert "[DONE]" not in response.text


def raw_request(port: int, body: dict[str, Any]) -> socket.socket:
    """Send a request and return the connection, nothing of the answer read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(head_of(len(content)) + content)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_goes_away_stops_its_choices(
    served: Serving[FakeEngine], http: httpx.Client, engine: FakeEngine, stream: bool, choices: int
) -> None:
    engine.token_s = 0.02
    connection = raw_request(served.port, {**BODY, "stream": stream, "max_tokens": 500, "n": choices})
    until(lambda: engine.told >= 3 * choices)
    connection.close()
    told = engine.told
    until(lambda: engine.running == 0)
    assert engine.told <= told + 4 * choices
    assert engine.cancelled == choices
    engine.token_s = 0
    assert http.post(CHAT, json=BODY).status_code == 200


def test_a_client_that_goes_away_before_the_first_token(served: Serving[FakeEngine], engine: FakeEngine) -> None:
    engine.prefill_s = 60
    connection = raw_request(served.port, {**BODY, "stream": True})
    until(lambda: engine.running == 1)
    connection.close()
    until(lambda: engine.running == 0)
    assert engine.cancelled == 1


def test_a_client_that_does_not_read_counts_as_gone(served: Serving[FakeEngine], engine: FakeEngine) -> None:
    fat = {"max_tokens": 1_000_000, "logprobs": True, "top_logprobs": 20}
    with raw_request(served.port, {**BODY, "stream": True, **fat}):
        until(lambda: engine.running == 1)
        until(lambda: engine.running == 0, seconds=30)
    assert engine.told < 1_000_000
    assert engine.cancelled == 1


def test_the_end_of_a_stream_does_not_wait_for_ever() -> None:
    async def never(_message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stalled):
        asyncio.run(Line(never, 0.05).end())


def test_a_key_has_so_many_requests_open_and_no_more() -> None:
    with serving(FakeEngine(prefill_s=60), Settings(max_open=2)) as running:
        waiting = [raw_request(running.port, BODY) for _ in range(2)]
        until(lambda: running.engine.running == 2)
        refused = httpx.post(f"{running.url}{CHAT}", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "too_many_open"
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
        for connection in waiting:
            connection.close()
        until(lambda: running.engine.running == 0)
        running.engine.prefill_s = 0
        assert httpx.post(f"{running.url}{CHAT}", json=BODY).status_code == 200


def test_a_request_of_many_choices_runs_some_at_a_time() -> None:
    async def most_at_once() -> tuple[int, int]:
        engine, most = FakeEngine(token_s=0.001), 0
        groups = [[Request("small", f"{i}", Sampling(2))] * 4 for i in range(10)]
        async with Answering(engine, groups) as answering:
            while not isinstance(await answering.next(), End):
                most = max(most, engine.running)
        return most, len(engine.asked)

    assert asyncio.run(most_at_once()) == (SIDE_BY_SIDE, 40)


def test_choices_after_the_first_wait_until_it_has_read_the_prompt() -> None:
    async def started_before_begun() -> tuple[int, int]:
        engine = FakeEngine(prefill_s=0.1)
        request = Request("small", "once", Sampling(3))
        async with Answering(engine, [[request] * 3]) as answering:
            await asyncio.sleep(0.05)
            early = len(engine.asked)
            while not isinstance(await answering.next(), End):
                pass
        return early, len(engine.asked)

    assert asyncio.run(started_before_begun()) == (1, 3)


def test_leaving_early_closes_every_choice() -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine()
        async with Answering(engine, [[Request("small", "once", Sampling(100_000))] * 3]) as answering:
            await answering.next()
            await asyncio.sleep(0.1)  # until the queue is full
        return engine

    engine = asyncio.run(leave())
    assert engine.running == 0
    assert engine.told < 1000


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice: {digest_of(KEY)}\nbob: {digest_of('sk-of-bob')}\n")
    settings = Settings(keys=keys, rate_per_minute=3)
    with serving(FakeEngine(), settings) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_but_probes_and_the_page_needs_a_key(guarded: httpx.Client, path: str) -> None:
    is_open = path in ("/", "/healthz", "/readyz")
    for header in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": f"Basic {KEY}"}):
        response = guarded.get(path, headers=header)
        assert response.status_code == (200 if is_open else 401)
        if not is_open:
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    right = guarded.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code
    assert right == (405 if path.endswith("completions") else 200)


def test_an_unknown_route_tells_nothing_without_a_key(guarded: httpx.Client) -> None:
    assert guarded.get("/v1/nothing").status_code == 401


def test_too_many_requests_of_one_key(guarded: httpx.Client) -> None:
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in (KEY, "sk-of-bob"))
    statuses = [guarded.post(CHAT, json=BODY, headers=alice) for _ in range(5)]
    assert [response.status_code for response in statuses][:3] == [200] * 3
    assert statuses[-1].status_code == 429
    assert error_of(statuses[-1])["code"] == "rate_limit_exceeded"
    assert 1 <= int(statuses[-1].headers["retry-after"]) <= 20
    assert guarded.post(CHAT, json=BODY, headers=bob).status_code == 200
    assert guarded.get("/v1/models", headers=alice).status_code == 200


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://chat.example", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
    ],
)
def test_browsers_may_call_from_this_computer_and_from_named_origins(
    http: httpx.Client, guarded: httpx.Client, origin: str, allowed: bool
) -> None:
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-conversation",
    }
    response = http.options(CHAT, headers=preflight)
    assert (response.headers.get("access-control-allow-origin") == origin) is allowed
    if allowed:
        assert response.status_code == 200
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert (
        http.get("/v1/models", headers={"Origin": origin}).headers.get("access-control-allow-origin") == origin
    ) is allowed
    local = {**preflight, "Origin": "http://localhost"}
    assert guarded.options(CHAT, headers=local).status_code == 200
    refused = guarded.post(CHAT, json=BODY, headers={"Origin": "http://localhost"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://localhost")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_without_keys_a_foreign_host_name_is_refused(http: httpx.Client, host: str, status: int) -> None:
    response = http.get("/v1/models", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        error_of(response)


# --- logs and figures ------------------------------------------------------------------------------------------------


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[list[str]]:
    handler = Kept()
    level = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    yield handler.lines
    LOG.removeHandler(handler)
    LOG.setLevel(level)


def test_a_request_is_one_line_of_json_without_its_text(http: httpx.Client, engine: FakeEngine, log: list[str]) -> None:
    secret = "the-secret-word"
    headers = {"Authorization": f"Bearer {secret}", "X-Conversation": secret}
    body = {**BODY, "messages": [{"role": "user", "content": secret}]}
    response = http.post(f"{CHAT}?key={secret}", json=body, headers=headers)
    engine.error = RuntimeError(secret)
    http.post(CHAT, json=body, headers=headers)
    http.post(CHAT, json={**body, secret: 1}, headers=headers)
    http.get(f"/{secret}", headers=headers)
    until(lambda: len(log) == 4)
    lines = [json.loads(line) for line in log]
    assert secret not in "".join(log)
    assert lines[0]["id"] == response.headers["x-request-id"]
    assert [line["status"] for line in lines] == [200, 500, 400, 404]
    assert lines[0]["completion_tokens"] == 30
    assert {"native_tokens", "translated_tokens", "recomputed_tokens", "ttft_ms", "model"} <= set(lines[0])
    assert lines[1]["error"] == "RuntimeError"
    assert any("fake_engine" in place for place in lines[1]["at"])


def test_a_client_that_leaves_while_it_sends_is_no_error(
    served: Serving[FakeEngine], engine: FakeEngine, log: list[str]
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head_of(100) + b"{")
        time.sleep(0.1)
    until(lambda: len(log) == 1)
    line = json.loads(log[0])
    assert (line["status"], line["level"]) == (499, "info")


def test_a_logged_exception_keeps_its_text_to_itself() -> None:
    try:
        raise ValueError("the-secret-word")
    except ValueError as error:
        record = LOG.makeRecord("x", logging.ERROR, "f", 1, "failed", (), (ValueError, error, error.__traceback__))
    line = JsonLines().format(record)
    assert json.loads(line)["error"] == "ValueError"
    assert "secret" not in line


def figures(http: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return all figures by name and labels."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_figures_count_switches_fallbacks_and_times(http: httpx.Client, engine: FakeEngine) -> None:
    before = figures(http)
    http.post(CHAT, json=BODY)
    moved = {"native_tokens": 10, "translated_tokens": 80, "recomputed_tokens": 10, "source": "small"}
    engine.begun = moved
    http.post(CHAT, json={**BODY, "stream": True, "n": 2})
    engine.begun = {"native_tokens": 0, "recomputed_tokens": 100, "source": "small", "fallback": "BadArtifact: damaged"}
    http.post(CHAT, json=BODY)
    engine.begun = {"fallback": "a sentence with no class"}
    http.post(CHAT, json=BODY)
    engine.error = Busy(1)
    http.post(CHAT, json=BODY)
    after = figures(http)
    grown = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    assert grown["kvlingo_switches_total", ("translate",)] == 1
    assert grown["kvlingo_switches_total", ("reprefill",)] == 2
    assert grown["kvlingo_switches_total", ("none",)] == 1
    assert grown["kvlingo_fallbacks_total", ("BadArtifact",)] == 1
    assert grown["kvlingo_fallbacks_total", ("other",)] == 1
    assert grown["kvlingo_prompt_tokens_total", ("translated",)] == 80
    assert grown["kvlingo_ttft_seconds_count", ("translate",)] == 1
    assert grown["kvlingo_ttft_seconds_sum", ("translate",)] == pytest.approx(0.0125)
    assert grown["kvlingo_requests_total", (CHAT, "200")] == 4
    assert grown["kvlingo_requests_total", (CHAT, "429")] == 1
    assert grown["kvlingo_completion_tokens_total", ()] == 5 * 30
    assert after["kvlingo_engine_cache_bytes", ()] == 123
    assert after["kvlingo_engine_queue_length", ()] == 0


def test_reasons_stay_few(served: Serving[FakeEngine]) -> None:
    from kvlingo.serve.metrics import Figures

    counted = Figures(dict)
    classes = {counted.reason_class(f"Reason{number}: x") for number in range(100)}
    assert len(classes) == 33
    assert "other" in classes


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_runs_its_own_script_only(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert " onclick=" not in page.text
    assert " style=" not in page.text


# --- beginning and end -----------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadInput, match="--port"):
        listen(Settings(port=taken.getsockname()[1]))


def test_a_bad_file_of_keys_is_told_before_models_load(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="API keys"):
        serve(Settings(models={"a": "b"}, keys=tmp_path / "nowhere"), lambda: pytest.fail("loaded"))


def test_sigterm_lets_running_answers_end_and_takes_no_more() -> None:
    engine = FakeEngine(token_s=0.05)
    with serving(engine, Settings(drain_s=10)) as running, httpx.Client(base_url=running.url, timeout=20) as http:
        with http.stream("POST", CHAT, json={**BODY, "stream": True, "max_tokens": 80}) as response:
            lines = response.iter_lines()
            next(lines)
            running.server.handle_exit(signal.SIGTERM, None)
            until(lambda: httpx.get(f"{running.url}/readyz").status_code == 503)
            assert httpx.get(f"{running.url}/healthz").status_code == 200
            refused = httpx.post(f"{running.url}{CHAT}", json=BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert error_of(refused)["code"] == "shutting_down"
            assert list(lines)[-2] == "data: [DONE]"
        running.thread.join(timeout=10)
        assert not running.thread.is_alive()
    assert engine.drained
    assert engine.cancelled == 0


@pytest.mark.parametrize("fields", [{"n": 16}, {"n": 2}])
def test_all_choices_of_an_answer_that_was_taken_end(fields: dict[str, Any]) -> None:
    """Choices begin when the first one has, and some wait for others to end: none of them is a new request."""
    with twin_engine() as (local, _), serving(local, Settings(drain_s=30)) as running:
        whole = {"messages": [{"role": "user", "content": "x " * 40}], "model": "a", "max_tokens": 40, "seed": 1}
        with (
            httpx.Client(base_url=running.url, timeout=60) as http,
            http.stream("POST", CHAT, json={**whole, **fields, "stream": True}) as response,
        ):
            lines = response.iter_lines()
            running.server.handle_exit(signal.SIGTERM, None)
            chunks = [line for line in lines if line]
        running.thread.join(timeout=10)
    assert chunks[-1] == "data: [DONE]", chunks[-1]
    ended = [choice for line in chunks[:-1] for choice in json.loads(line[6:])["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ended) == list(range(fields["n"]))


def test_an_answer_that_outlasts_the_drain_is_cut(tmp_path: object) -> None:
    engine = FakeEngine(token_s=0.05)
    with serving(engine, Settings(drain_s=0.3)) as running:
        connection = raw_request(running.port, {**BODY, "stream": True, "max_tokens": 100_000})
        until(lambda: engine.told > 2)
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(timeout=15)
        assert not running.thread.is_alive()
        connection.close()
    assert engine.running == 0


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.1, "1"), (2.0, "2"), (2.01, "3")])
def test_retry_after_is_whole_seconds(wait_s: float, header: str) -> None:
    assert Fault(429, "t", "m", retry_after_s=wait_s).headers() == {"Retry-After": header}


def test_half_a_character_has_no_bytes_of_another() -> None:
    token = TokenInfo(7, "x", (120,), -0.5, (("\ufffd", -1.0), ("é", -2.0), ("\ufffd", -3.0)))
    assert [top["bytes"] for top in chat_logprob(token)["top_logprobs"]] == [None, [0xC3, 0xA9], None]
    assert text_shape().logprobs([token], 0)["top_logprobs"] == [{"\ufffd": -1.0, "é": -2.0}]


def test_an_impossible_token_has_a_number_that_json_can_hold() -> None:
    assert finite(float("-inf")) == -9999.0
    assert finite(-3.5) == -3.5
