"""The headers of vllm-project/semantic-router, for a server whose connector sees bodies only.

Plain ASGI, for `--middleware`. A request with `x-vsr-kv-cache-id` (and `x-vsr-kv-mapper-id`) gets both into its body; its
answer, if it is one (2xx), gets `x-vsr-kv-transfer-status`. What nobody tells of, as in a server without a connector, is
`unsupported`. The head of a stream waits for its first event: by then it is known what became of the prompt. Where it is not,
the head goes without, which a router has to take for `unsupported` (pkg/headers/headers.go).

For our own gateway two things more. A stream whose request has `x-kvlingo-tell`, the name that its body gives as `tell`, begins
with a comment that says what became of the prompt. And GET `ABOUT` says what the connector of this server does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
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
UNSUPPORTED = "unsupported"
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
        name = secrets.token_hex(16) if self._can_tell and TELL not in headers else None
        body = with_wish(await whole_body(receive), headers, name)
        told = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*told, (b"content-length", str(len(body)).encode())]}
        await self.app(scope, _replay(body, receive), Telling(send, self.board, name))

    @property
    def _can_tell(self) -> bool:
        return self.board.about is not None and bool(self.board.about.get("tells"))


async def whole_body(receive: Receive) -> bytes:
    """Return a request's body; of one that is too long, what came first: it is no JSON then, and refused as such."""
    body = b""
    while len(body) < MOST_BODY_BYTES:
        event = await receive()
        body += event.get("body", b"")
        if event["type"] != "http.request" or not event.get("more_body"):
            break
    return body


def with_wish(body: bytes, headers: MutableMapping[bytes, bytes], tell: str | None = None) -> bytes:
    """Return a body that says what the headers say; one that says something itself, or is no object, is left as it is.

    A stream's gets a name under which is told what became of it.
    """
    try:
        asked = json.loads(body)
        params = asked.setdefault("kv_transfer_params", {}) or {}
        wish = {"load": headers[CACHE_ID].decode("ascii"), **params.get(PARAMS, {})}
        if MAPPER_ID in headers:
            wish.setdefault("mapper", headers[MAPPER_ID].decode("ascii"))
        if tell is not None and asked.get("stream"):
            wish.setdefault("tell", tell)
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
    """Sends an answer on with its status; the head waits for what says it: the whole of a body in JSON, a stream's first event.

    Args:
        name: what a stream's request is called on the board; None where nothing is told of it there.
    """

    def __init__(self, send: Send, board: Board, name: str | None) -> None:
        self._send, self._board, self._name = send, board, name
        self._start: Event | None = None
        self._body = b""

    async def __call__(self, event: Event) -> None:
        """Take what the application sends."""
        if event["type"] == "http.response.start" and (_is_json(event) or _is_stream(event)):
            self._start = event
        elif self._start is None:
            await self._send(event)
        elif _is_stream(self._start):
            await self._begin(self._start, await self._status_of_stream())
            await self._send(event)
        else:
            self._body += event.get("body", b"")
            if not event.get("more_body"):
                await self._begin(self._start, told_status(self._body) or UNSUPPORTED)
                await self._send({"type": "http.response.body", "body": self._body, "more_body": False})

    async def _begin(self, start: Event, status: str | None) -> None:
        self._start = None
        if status is not None and 200 <= start["status"] < 300:
            start = {**start, "headers": [*start["headers"], (STATUS, status.encode())]}
        await self._send(start)

    async def _status_of_stream(self) -> str | None:
        if self._name is None:
            return None  # nothing is known: a server without statistics hears nothing of its connector
        told = await told_of(self._board, self._name, TOLD_SECONDS)
        return None if told is None else told.get("status")


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
            told = await told_of(self._board, self._name, TOLD_SECONDS if self._first else 0.0)
            self._first = False
            if told is not None:
                self._told = True
                comment = COMMENT + json.dumps(told).encode() + b"\n\n"
                await self._send({"type": "http.response.body", "body": comment, "more_body": True})
        await self._send(event)


async def told_of(board: Board, name: str, seconds: float) -> Any:
    """Return what was told under a name; None where nothing is for so long."""
    until = asyncio.get_running_loop().time() + seconds
    while (told := board.take(name)) is None and asyncio.get_running_loop().time() < until:
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
