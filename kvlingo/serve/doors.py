"""What every request passes before its route: its number, its line in the log, its host, its key.

Knows ASGI and headers. Does not know routes' bodies. Logs hold no prompt, no answer, no key, and no text of an unforeseen error,
which may quote one.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlingo.serve.keys import Keys, Rate
from kvlingo.serve.metrics import Figures
from kvlingo.serve.replies import Fault, fault_of
from kvlingo.serve.tracing import Spans

OPEN = {"/", "/healthz", "/readyz"}
"""Routes that need no key: what a probe and a browser ask for before they could have one."""

LOG = logging.getLogger("kvlingo.serve")
NOTE = "kvlingo.note"
EXTRA_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # the rest of the body would be taken for the next request
}
GONE = 499
"""The status of a request whose client went away before there was one."""


@dataclass
class Note:
    """What is written down of one request."""

    id: str
    tenant: str = ""
    status: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def note_of(scope: Scope) -> Note:
    """Return the note that the door wrote."""
    note: Note = scope[NOTE]
    return note


def json_bytes(value: Any) -> bytes:
    """Write JSON in ASCII: some clients take U+2028 inside a text for the end of a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def fault_response(fault: Fault) -> Response:
    """Return an error as a response."""
    headers = fault.headers() | EXTRA_HEADERS.get(fault.status, {})
    return Response(json_bytes(fault.body()), fault.status, headers, "application/json")


def describe(error: BaseException) -> dict[str, Any]:
    """Say what went wrong and where without the error's own text."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    return {"error": type(error).__name__, "at": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}


class Door:
    """Number a request, write its line into the log, and turn what no route caught into an error in JSON.

    `spans`: told of each request too, where there are any.
    """

    def __init__(self, app: ASGIApp, figures: Figures, routes: Iterable[str], spans: Spans | None = None) -> None:
        self.app, self.figures, self.routes, self.spans = app, figures, frozenset(routes), spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        note = scope[NOTE] = Note(f"req-{uuid.uuid4().hex}")
        began, began_ns = time.perf_counter(), time.time_ns()

        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = note.id
            await send(message)

        try:
            await self.app(scope, receive, numbered)
        except Exception as error:
            note.facts |= describe(error)
            if note.status is None:
                await fault_response(fault_of(error))(scope, receive, numbered)
        finally:
            self._write(scope, note, began_ns, (time.perf_counter() - began) * 1000)

    def _write(self, scope: Scope, note: Note, began_ns: int, ms: float) -> None:
        """Write the line. A path that is no route is not repeated: anything could stand in it."""
        route = scope["path"] if scope["path"] in self.routes else "other"
        status = note.status or GONE
        self.figures.requests.labels(route, str(status)).inc()
        facts = {"id": note.id, "method": scope["method"], "route": route, "status": status, "ms": round(ms, 1)}
        facts |= {"tenant": note.tenant} | note.facts
        if self.spans is not None:
            told = {name: value for name, value in facts.items() if name not in ("method", "route", "status", "ms")}
            times = (began_ns, began_ns + int(1e6 * ms))
            self.spans.tell(scope["method"], route, status, times, Headers(scope=scope), told)
        LOG.log(logging.ERROR if status >= 500 and status != 503 else logging.INFO, "request", extra={"facts": facts})


class Gate:
    """Let in who has a key, at the rate that is theirs and so many at once.

    Without keys, only who calls this computer by its own name.

    A page of any host can make a browser call a server on loopback, by letting its own name point there. What it can't do is send
    another `Host`.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys | None, rate: Rate | None, hosts: Iterable[str] | None, most_open: int
    ) -> None:
        self.app, self.keys, self.rate, self.most_open = app, keys, rate, most_open
        self.hosts = None if hosts is None else frozenset(hosts)
        self.open = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on or turn it away."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        fault = self.fault(scope)
        tenant = note_of(scope).tenant
        if fault is None and scope["method"] == "POST" and self.open[tenant] >= self.most_open:
            message = f"{self.most_open} requests are open; wait until one has ended"
            fault = Fault(429, "rate_limit_error", message, None, "too_many_open", 1.0)
        if fault is not None:
            await fault_response(fault)(scope, receive, send)
            return
        self.open[tenant] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open[tenant] -= 1

    def fault(self, scope: Scope) -> Fault | None:
        """Return why a request is turned away, or None."""
        headers = Headers(scope=scope)
        if self.keys is None and self.hosts is not None and host_name(headers.get("host", "")) not in self.hosts:
            return Fault(
                403, "invalid_request_error", "this server answers on its own host name only", None, "wrong_host"
            )
        if self.keys is not None and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            tenant = self.keys.tenant(headers.get("authorization"))
            if tenant is None:
                message = "no valid API key; send the header Authorization: Bearer KEY"
                return Fault(401, "authentication_error", message, None, "invalid_api_key")
            note_of(scope).tenant = tenant
        if self.rate is not None and scope["method"] == "POST":
            return self.too_often(note_of(scope).tenant)
        return None

    def too_often(self, tenant: str) -> Fault | None:
        """Return the error for one request too many, or None."""
        assert self.rate is not None
        wait_s = self.rate.wait_s(tenant)
        if not wait_s:
            return None
        message = f"more than {self.rate.per_minute} requests a minute; try again in {wait_s:.0f} s"
        return Fault(429, "rate_limit_error", message, None, "rate_limit_exceeded", wait_s)


def host_name(host: str) -> str:
    """Return the name in a `Host` header, without the port and an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class JsonLines(logging.Formatter):
    """One JSON object a line; of an exception its kind and place, not its text."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[1]:
            line |= {"event": "error", **describe(record.exc_info[1])}
        return json.dumps(line, ensure_ascii=False, default=str)
