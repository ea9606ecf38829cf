"""The headers of vllm-project/semantic-router, for a server whose connector sees bodies only.

Plain ASGI, for `--middleware`. A request with `x-vsr-kv-cache-id` (and `x-vsr-kv-mapper-id`) gets both into its body;
a whole answer gets `x-vsr-kv-transfer-status`. A streamed one does not: its headers are gone before anything is known.

For our own gateway two things more. A stream whose request has `x-kvlingo-tell`, the name that its body gives as `tell`, begins
with a comment that says what became of the prompt. And GET `ABOUT` says what the connector of this server does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvlingo.serve.external.matching import PARAMS
from kvlingo.serve.external.telling import BOARD, Board

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CACHE_ID, MAPPER_ID, STATUS = b"x-vsr-kv-cache-id", b"x-vsr-kv-mapper-id", b"x-vsr-kv-transfer-status"
TELL, COMMENT, ABOUT = b"x-kvlingo-tell", b": kvlingo ", "/kvlingo"
MOST_BODY_BYTES = 64 << 20
TOLD_SECONDS, LOOK_SECONDS = 0.25, 0.005
"""What is told comes a moment after the first token: so long is it waited for, and so often looked."""


class RouterHeaders:
    """Middleware around a server's application. `board`: where the connector tells; a test has its own."""

    def __init__(self, app: App, board: Board = BOARD) -> None:
        self.app, self.board = app, board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; any without the headers passes as it is."""
        headers = dict(scope.get("headers") or ())
        if scope["type"] == "http" and scope.get("method") == "GET" and scope.get("path") == ABOUT:
            await say_about(self.board, send)
            return
        if scope["type"] == "http" and TELL in headers:
            send = Streaming(send, self.board, headers[TELL].decode("latin-1"))
        if scope["type"] != "http" or scope.get("method") != "POST" or CACHE_ID not in headers:
            await self.app(scope, receive, send)
            return
        body = with_wish(await whole_body(receive), headers)
        told = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*told, (b"content-length", str(len(body)).encode())]}
        await self.app(scope, _replay(body, receive), Telling(send))


async def whole_body(receive: Receive) -> bytes:
    """Return a request's body; of one that is too long, what came first: it is no JSON then, and refused as such."""
    body = b""
    while len(body) < MOST_BODY_BYTES:
        event = await receive()
        body += event.get("body", b"")
        if event["type"] != "http.request" or not event.get("more_body"):
            break
    return body


def with_wish(body: bytes, headers: MutableMapping[bytes, bytes]) -> bytes:
    """Return a body that says what the headers say; one that says something itself, or is no object, is left as it is."""
    try:
        asked = json.loads(body)
        params = asked.setdefault("kv_transfer_params", {}) or {}
        wish = {"load": headers[CACHE_ID].decode("ascii"), **params.get(PARAMS, {})}
        if MAPPER_ID in headers:
            wish.setdefault("mapper", headers[MAPPER_ID].decode("ascii"))
        asked["kv_transfer_params"] = {**params, PARAMS: wish}
    except (ValueError, TypeError, AttributeError):
        return body
    return json.dumps(asked).encode()


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Event:
        return waiting.pop() if waiting else await receive()

    return again


class Telling:
    """Sends an answer on; the head of one in JSON waits for its body, which says what happened."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Event | None = None
        self._body = b""

    async def __call__(self, event: Event) -> None:
        """Take what the application sends."""
        if event["type"] == "http.response.start" and _is_json(event):
            self._start = event
        elif self._start is None:
            await self._send(event)
        else:
            self._body += event.get("body", b"")
            if not event.get("more_body"):
                await self._finish(self._start)

    async def _finish(self, start: Event) -> None:
        status = told_status(self._body)
        if status is not None:
            start = {**start, "headers": [*start["headers"], (STATUS, status.encode())]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body, "more_body": False})


class Streaming:
    """Sends a stream on, and before its first event what became of the prompt; where that comes later, later."""

    def __init__(self, send: Send, board: Board, name: str) -> None:
        self._send, self._board, self._name = send, board, name
        self._streams, self._first, self._told = False, True, False

    async def __call__(self, event: Event) -> None:
        """Take what the application sends."""
        if event["type"] == "http.response.start":
            self._streams = _is_stream(event)
        elif self._streams and not self._told:
            told = await self._wait(TOLD_SECONDS if self._first else 0.0)
            self._first = False
            if told is not None:
                self._told = True
                comment = COMMENT + json.dumps(told).encode() + b"\n\n"
                await self._send({"type": "http.response.body", "body": comment, "more_body": True})
        await self._send(event)

    async def _wait(self, seconds: float) -> Any:
        until = asyncio.get_running_loop().time() + seconds
        while (told := self._board.take(self._name)) is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK_SECONDS)
        return told


async def say_about(board: Board, send: Send) -> None:
    """Answer what the connector of this server does; null where there is none, or none that says so."""
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(board.about).encode(), "more_body": False})


def _is_stream(event: Event) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in event.get("headers", ())
    )


def _is_json(event: Event) -> bool:
    return any(name.lower() == b"content-type" and b"json" in value for name, value in event.get("headers", ()))


def told_status(body: bytes) -> str | None:
    """Return the status in an answer, or None where there is none."""
    try:
        status = json.loads(body)["kv_transfer_params"][PARAMS]["status"]
    except (ValueError, KeyError, TypeError):
        return None
    return status if isinstance(status, str) and status.isascii() else None
