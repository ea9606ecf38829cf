"""The headers of vllm-project/semantic-router, for a server whose connector sees bodies only.

Plain ASGI, for `--middleware`. A request with `x-vsr-kv-cache-id` (and `x-vsr-kv-mapper-id`) gets both into its body;
a whole answer gets `x-vsr-kv-transfer-status`. A streamed one does not: its headers are gone before anything is known.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvlingo.serve.external.matching import PARAMS

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CACHE_ID, MAPPER_ID, STATUS = b"x-vsr-kv-cache-id", b"x-vsr-kv-mapper-id", b"x-vsr-kv-transfer-status"
MOST_BODY_BYTES = 64 << 20


class RouterHeaders:
    """Middleware around a server's application."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; any without the headers passes as it is."""
        headers = dict(scope.get("headers") or ())
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


def _is_json(event: Event) -> bool:
    return any(name.lower() == b"content-type" and b"json" in value for name, value in event.get("headers", ()))


def told_status(body: bytes) -> str | None:
    """Return the status in an answer, or None where there is none."""
    try:
        status = json.loads(body)["kv_transfer_params"][PARAMS]["status"]
    except (ValueError, KeyError, TypeError):
        return None
    return status if isinstance(status, str) and status.isascii() else None
