"""semantic-router's headers: into the body, and out of the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvlingo.serve.external.headers import RouterHeaders
from kvlingo.serve.external.telling import Board

KEY = "a" * 32
STATUS = b"x-vsr-kv-transfer-status"


def send_through(
    body: bytes,
    headers: dict[str, str],
    answer: bytes = b"{}",
    kind: str = "application/json",
    chunks: int = 1,
    status: int = 200,
    board: Board | None = None,
    told: dict[str, Any] | None = None,
) -> tuple[Any, dict[bytes, bytes], bytes]:
    """Return what the application was asked, and the head and body that the client gets.

    `told`: what a connector puts on the board once the application has the request, under the name in its body.
    """
    board = board or Board()
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
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})
        assert not sent or kind == "text/plain" or "x-vsr-kv-cache-id" not in headers, "the head has not waited"
        if told is not None:
            board.put({json.loads(got)["kv_transfer_params"]["kvlingo"]["tell"]: told})
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
    asyncio.run(RouterHeaders(app, board)(scope, receive, send))
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
    assert headers[STATUS] == status.encode()
    assert body == answer


@pytest.mark.parametrize("answer", [b"{}", b"nothing", b'{"kv_transfer_params": null}'])
def test_an_answer_about_which_nothing_is_told_is_unsupported(answer: bytes) -> None:
    """As from a server without a connector: what was not done is seen, and not only missing."""
    _, headers, body = send_through(b"{}", {"x-vsr-kv-cache-id": KEY}, answer)
    assert headers[STATUS] == b"unsupported"
    assert body == answer


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "application/json"), (503, "text/event-stream"), (200, "text/plain")]
)
def test_what_is_no_answer_has_no_status(status: int, kind: str) -> None:
    told = json.dumps({"kv_transfer_params": {"kvlingo": {"status": "applied"}}}).encode()
    _, headers, body = send_through(b"{}", {"x-vsr-kv-cache-id": KEY}, told, kind, status=status)
    assert STATUS not in headers
    assert body == told


def stream_of(board: Board, told: dict[str, Any] | None, body: bytes = b'{"stream": true}') -> tuple[Any, bytes | None]:
    """Return the body that a server was asked for a stream with, and the status in the head of its answer."""
    events = b"data: {}\n\n" * 3
    asked, headers, got = send_through(
        body, {"x-vsr-kv-cache-id": KEY}, events, "text/event-stream", chunks=3, board=board, told=told
    )
    assert got == events
    return asked["body"], headers.get(STATUS)


@pytest.mark.parametrize("status", ["applied", "fallback_reprefill", "unsupported"])
def test_a_stream_s_head_waits_for_what_became_of_its_prompt(status: str) -> None:
    board = Board({"tells": True})
    body, said = stream_of(board, {"status": status, "prompt": {}})
    assert said == status.encode()
    assert set(json.loads(body)["kv_transfer_params"]["kvlingo"]) == {"load", "tell"}
    names = [json.loads(stream_of(board, {"status": status})[0])["kv_transfer_params"]["kvlingo"]["tell"] for _ in "ab"]
    assert len(set(names)) == 2, "a name is drawn for each"


def test_a_stream_says_nothing_where_nothing_is_known() -> None:
    """Of a server without a connector, and of one with a connector that keeps no statistics (`--disable-log-stats`)."""
    body, said = stream_of(Board(), None)
    assert said is None
    assert "tell" not in json.loads(body)["kv_transfer_params"]["kvlingo"]


@pytest.mark.parametrize("tells", [True, False])
def test_a_stream_that_nothing_is_told_of_in_time_has_no_status(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """A router takes that for unsupported: nothing here says that it was."""
    monkeypatch.setattr("kvlingo.serve.external.headers.TOLD_SECONDS", 0.01)
    assert stream_of(Board({"tells": tells}), None)[1] is None


def test_an_answer_that_is_no_stream_is_told_in_its_body() -> None:
    asked, _, _ = send_through(b'{"stream": false}', {"x-vsr-kv-cache-id": KEY}, board=Board({"tells": True}))
    assert json.loads(asked["body"])["kv_transfer_params"]["kvlingo"] == {"load": KEY}


def test_a_request_without_the_header_is_left_alone() -> None:
    asked, headers, _ = send_through(
        b'{"prompt": 1}', {}, b'{"kv_transfer_params": {"kvlingo": {"status": "applied"}}}'
    )
    assert asked["body"] == b'{"prompt": 1}'
    assert STATUS not in headers


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
