"""semantic-router's headers: into the body, and out of the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvlingo.serve.external.headers import RouterHeaders
from kvlingo.serve.external.telling import Board

KEY = "a" * 32


def send_through(
    body: bytes,
    headers: dict[str, str],
    answer: bytes = b"{}",
    kind: str = "application/json",
    chunks: int = 1,
) -> tuple[Any, dict[bytes, bytes], bytes]:
    """Return what the application was asked, and the head and body that the client gets."""
    asked: dict[str, Any] = {}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got = b""
        while True:
            event = await receive()
            got += event["body"]
            if not event["more_body"]:
                break
        asked.update(body=got, headers=dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        cut = max(1, len(answer) // chunks)
        pieces = [answer[i : i + cut] for i in range(0, len(answer), cut)]
        for i, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(pieces)})

    half = len(body) // 2
    events = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    raw = [(b"content-length", str(len(body)).encode()), *((k.encode(), v.encode()) for k, v in headers.items())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw}
    asyncio.run(RouterHeaders(app)(scope, receive, send))
    assert sent[0]["type"] == "http.response.start"
    return asked, dict(sent[0]["headers"]), b"".join(event.get("body", b"") for event in sent[1:])


def test_a_cache_id_gets_into_the_body() -> None:
    asked, _, _ = send_through(
        b'{"prompt": "x", "kv_transfer_params": {"other": 1}}', {"x-vsr-kv-cache-id": KEY, "x-vsr-kv-mapper-id": "m"}
    )
    body = json.loads(asked["body"])
    assert body["kv_transfer_params"] == {"other": 1, "kvlingo": {"load": KEY, "mapper": "m"}}
    assert body["prompt"] == "x"
    assert int(asked["headers"][b"content-length"]) == len(asked["body"])


def test_what_the_body_says_itself_stays() -> None:
    own = {"kv_transfer_params": {"kvlingo": {"load": "b" * 32}}}
    asked, _, _ = send_through(json.dumps(own).encode(), {"x-vsr-kv-cache-id": KEY})
    assert json.loads(asked["body"]) == own


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"{", b'{"kv_transfer_params": 7}', b'{"kv_transfer_params": {"kvlingo": 7}}']
)
def test_what_is_no_request_is_the_server_s_to_refuse(body: bytes) -> None:
    asked, _, _ = send_through(body, {"x-vsr-kv-cache-id": KEY})
    assert asked["body"] == body


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("status", ["applied", "fallback_reprefill", "unsupported"])
def test_the_status_gets_into_a_header(status: str, chunks: int) -> None:
    answer = json.dumps({"text": "x", "kv_transfer_params": {"kvlingo": {"status": status}}}).encode()
    _, headers, body = send_through(b"{}", {"x-vsr-kv-cache-id": KEY}, answer, chunks=chunks)
    assert headers[b"x-vsr-kv-transfer-status"] == status.encode()
    assert body == answer


@pytest.mark.parametrize("answer", [b"{}", b"nothing", b'{"kv_transfer_params": null}'])
def test_an_answer_without_a_status_has_no_header(answer: bytes) -> None:
    _, headers, body = send_through(b"{}", {"x-vsr-kv-cache-id": KEY}, answer)
    assert b"x-vsr-kv-transfer-status" not in headers
    assert body == answer


def test_a_streamed_answer_goes_on_as_it_comes() -> None:
    _, headers, body = send_through(
        b"{}", {"x-vsr-kv-cache-id": KEY}, b"data: {}\n\n" * 3, "text/event-stream", chunks=3
    )
    assert b"x-vsr-kv-transfer-status" not in headers
    assert body == b"data: {}\n\n" * 3


def test_a_request_without_the_header_is_left_alone() -> None:
    asked, headers, _ = send_through(
        b'{"prompt": 1}', {}, b'{"kv_transfer_params": {"kvlingo": {"status": "applied"}}}'
    )
    assert asked["body"] == b'{"prompt": 1}'
    assert b"x-vsr-kv-transfer-status" not in headers


# --- streams, for our own gateway ------------------------------------------------------------------------------------


def stream_through(
    board: Board, name: str | None, kind: bytes = b"text/event-stream", late: int | None = None
) -> bytes:
    """Return what a client gets of a stream of three events; `late`: before which of them is told."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for number in range(3):
            if number == late:
                board.put({KEY: {"status": "applied"}})
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": number < 2})

    async def receive() -> Any:
        raise AssertionError("nobody asked for the body")

    async def send(event: Any) -> None:
        sent.append(event)

    headers = [(b"x-kvlingo-tell", name.encode())] if name else []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(RouterHeaders(app, board)(scope, receive, send))
    return b"".join(event.get("body", b"") for event in sent[1:])


def test_a_stream_begins_with_what_became_of_its_prompt() -> None:
    board = Board()
    board.put({KEY: {"status": "applied"}, "b" * 32: {"status": "other"}})
    assert stream_through(board, KEY) == b': kvlingo {"status": "applied"}\n\ndata: 0\n\ndata: 1\n\ndata: 2\n\n'
    assert board.take(KEY) is None
    assert board.take("b" * 32) == {"status": "other"}


def test_what_is_told_late_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlingo.serve.external.headers.TOLD_SECONDS", 0.01)
    assert (
        stream_through(Board(), KEY, late=2) == b'data: 0\n\ndata: 1\n\n: kvlingo {"status": "applied"}\n\ndata: 2\n\n'
    )
    assert stream_through(Board(), KEY) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize(("name", "kind"), [(None, b"text/event-stream"), (KEY, b"application/json")])
def test_only_a_stream_that_asks_is_told(name: str | None, kind: bytes) -> None:
    assert stream_through(Board(), name, kind, late=0) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_the_board_is_bounded() -> None:
    board = Board()
    board.put({str(number): {} for number in range(5000)})
    assert board.take("0") is None
    assert board.take("4999") == {}


def test_what_the_connector_does_is_said() -> None:
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    async def never(*_: Any) -> Any:
        raise AssertionError("the application was asked")

    scope = {"type": "http", "method": "GET", "path": "/kvlingo", "headers": []}
    asyncio.run(RouterHeaders(never, Board({"keeps": True}))(scope, never, send))
    assert json.loads(sent[1]["body"]) == {"keeps": True}
