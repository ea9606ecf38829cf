"""The HTTP server: routes, what surrounds them, and an end that loses nothing.

The only module that knows FastAPI and uvicorn. Does not know models: it sees an `Engine`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvlingo import __version__
from kvlingo.errors import BadInput
from kvlingo.serve.doors import GONE, LOG, Door, Gate, JsonLines, fault_response, json_bytes, note_of
from kvlingo.serve.keys import Keys, Rate
from kvlingo.serve.metrics import CONTENT_TYPE, Figures
from kvlingo.serve.protocol import AUTO, Away, Engine, ModelInfo, NoRouter, Unavailable, UnknownModel
from kvlingo.serve.replies import Fault, TooLarge, TooSlow, WrongType, chat_shape, fault_of, text_shape
from kvlingo.serve.schema import ChatBody, Common, CompletionBody, Order, Refused, described_neutral, order, read_body
from kvlingo.serve.settings import LOOPBACK, Settings
from kvlingo.serve.speaking import Reply, Setting, noted_fault
from kvlingo.serve.tracing import Spans, open_spans

PAGE = Path(__file__).parent / "page" / "index.html"
LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
CONVERSATION = re.compile(r"[\x21-\x7e]{1,128}")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, type[Common]] = {CHAT: ChatBody, TEXT: CompletionBody}
PROMPT_FIELDS = {CHAT: "messages", TEXT: "prompt"}
ROUTES = (CHAT, TEXT, "/v1/models", "/healthz", "/readyz", "/metrics", "/openapi.json", "/")
AWAY_RETRY_S = 5.0
POLL_S = 0.02
DISCARDED_BYTES = 64_000_000
"""So much of a body that is too large is read and thrown away, so that its client sees the answer and not a broken pipe."""


class Gateway:
    """One engine behind HTTP."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.figures = Figures(engine.stats)
        self.setting = Setting(engine, self.figures, settings.keepalive_s, settings.stall_s)
        self.draining = False
        self.drain_until = math.inf

    async def drain(self) -> None:
        """Take no more requests and wait for those that were taken, with all choices of theirs that have yet to begin."""
        self.draining = True
        self.drain_until = min(self.drain_until, time.monotonic() + self.settings.drain_s)
        while self.setting.replies and time.monotonic() < self.drain_until:
            await asyncio.sleep(POLL_S)
        await self.engine.drain(max(self.drain_until - time.monotonic(), 0.0))

    def hurry(self) -> None:
        """Wait no longer for what runs: it is cut off and told so; what was read is kept."""
        self.drain_until = 0.0

    def model(self, name: str) -> ModelInfo:
        """Return a model by name."""
        infos = {info.name: info for info in self.engine.models()}
        if name == AUTO and name not in infos:
            raise NoRouter(list(infos))
        if name not in infos:
            raise UnknownModel(f"no model {name[:80]!r} here; there are: {', '.join(infos)}")
        return infos[name]

    async def answer(self, request: Request) -> Response:
        """Answer a chat or a text: read what is asked, then let a `Reply` run the choices."""
        path = request.url.path
        try:
            asked = await self.read(request)
        except ClientDisconnect:
            return Response(status_code=GONE)  # nobody reads it
        except Exception as error:
            return fault_response(noted_fault(error, PROMPT_FIELDS[path], note_of(request.scope)))
        shape = chat_shape() if path == CHAT else text_shape()
        return Reply(self.setting, asked, shape, PROMPT_FIELDS[path])

    async def read(self, request: Request) -> Order:
        """Return what is asked for."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            async with asyncio.timeout(self.settings.stall_s):
                raw = await read_bytes(request, self.settings.max_body_bytes)
        except TimeoutError:
            raise TooSlow(self.settings.stall_s) from None
        if kind != "application/json":
            raise WrongType(kind)
        body = read_body(BODIES[request.url.path], raw)
        if self.draining:
            raise Unavailable(self.settings.drain_s)
        room = self.model(body.model).max_tokens
        conversation = request.headers.get("x-conversation")
        if conversation is not None and not CONVERSATION.fullmatch(conversation):
            raise Refused("X-Conversation: give 1 to 128 visible ASCII characters", "X-Conversation", "invalid_value")
        tenant = note_of(request.scope).tenant
        return order(body, self.settings.max_tokens, room=room, tenant=tenant, conversation=conversation)

    async def models(self) -> Response:
        """List the models that can be asked now."""
        away = await self.engine.away()
        here = [described(info) for info in self.engine.models() if info.name not in away]
        return as_json({"object": "list", "data": here})

    async def one_model(self, request: Request) -> Response:
        """Describe one model."""
        try:
            return as_json(described(self.model(request.path_params["name"])))
        except (NoRouter, UnknownModel) as error:
            return fault_response(noted_fault(error, "model", note_of(request.scope)))

    async def healthz(self) -> Response:
        """Say that the process answers."""
        return as_json({"status": "ok"})

    async def readyz(self) -> Response:
        """Say whether requests are taken."""
        if self.draining:
            return fault_response(fault_of(Unavailable(self.settings.drain_s)))
        away = sorted(await self.engine.away())
        if len(away) == len(self.engine.models()):
            return fault_response(fault_of(Away(", ".join(away), AWAY_RETRY_S)))
        return as_json({"status": "ready", **({"away": away} if away else {})})

    async def metrics(self) -> Response:
        """Tell the figures."""
        return Response(self.figures.text(), headers={"Content-Type": CONTENT_TYPE})


def described(info: ModelInfo) -> dict[str, Any]:
    """Return a model in OpenAI's shape, with what it can do here."""
    ours = {"max_tokens": info.max_tokens, "can_be_target": info.can_be_target}
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "kvlingo", "kvlingo": ours}


def as_json(value: Any) -> Response:
    """Return a value as a response."""
    return Response(json_bytes(value), media_type="application/json")


async def read_bytes(request: Request, limit: int) -> bytes:
    """Return the body, or raise `TooLarge` without ever holding more than the limit."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            parts.clear()
            if size > limit + DISCARDED_BYTES:
                break
        else:
            parts.append(part)
    if size > limit:
        raise TooLarge(limit)
    return b"".join(parts)


# --- the application -------------------------------------------------------------------------------------------------


def create_app(engine: Engine, settings: Settings, spans: Spans | None = None) -> FastAPI:
    """Return the application. Order of what surrounds the routes: log, then CORS (a preflight has no key), then keys."""
    gateway = Gateway(engine, settings)
    keys = Keys.read(settings.keys) if settings.keys else None
    rate = Rate(settings.rate_per_minute) if settings.rate_per_minute else None
    hosts = None if settings.anyone else {*LOOPBACK, settings.host}
    app = FastAPI(
        title="KV-Lingo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(Door, figures=gateway.figures, routes=ROUTES, spans=spans),
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_origin_regex=LOOPBACK_ORIGIN,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["Retry-After", "X-Request-Id"],
            ),
            Middleware(Gate, keys=keys, rate=rate, hosts=hosts, most_open=settings.max_open),
        ],
        exception_handlers={HTTPException: no_such_route},
    )
    app.state.gateway = gateway
    add_routes(app, gateway)
    return app


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Give each path its method."""
    for path, kind in BODIES.items():
        app.add_api_route(path, gateway.answer, methods=["POST"], name=path, openapi_extra=asked_with(kind))
    app.add_api_route("/v1/models", gateway.models)
    app.add_api_route("/v1/models/{name:path}", gateway.one_model, openapi_extra=ONE_MODEL)
    app.add_api_route("/healthz", gateway.healthz)
    app.add_api_route("/readyz", gateway.readyz)
    app.add_api_route("/metrics", gateway.metrics)
    page = page_response()

    async def index(_request: Request) -> Response:
        return page

    app.add_route("/", index, include_in_schema=False)

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = with_bodies(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


FAULT: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
FAULTS = {
    "description": "What is wrong, in OpenAI's shape",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Fault"}}},
}
ONE_MODEL = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
    "responses": {"default": FAULTS},
}


def asked_with(kind: type[Common]) -> dict[str, Any]:
    """Describe a request with a body: the body itself is read by `read_body`, for its error messages."""
    body = {"$ref": f"#/components/schemas/{kind.__name__}"}
    whole, stream = {"schema": {"type": "object"}}, {"schema": {"type": "string"}}
    answer = {"application/json": whole, "text/event-stream": stream}
    pinned = {"type": "string", "pattern": f"^{CONVERSATION.pattern}$"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "parameters": [{"name": "X-Conversation", "in": "header", "required": False, "schema": pinned}],
        "responses": {"200": {"description": "The answer, or a stream of it", "content": answer}, "default": FAULTS},
    }


def with_bodies(openapi: dict[str, Any]) -> dict[str, Any]:
    """Add to the OpenAPI description what it refers to."""
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    for kind in BODIES.values():
        properties = schemas["$defs"][kind.__name__]["properties"]
        schemas["$defs"][kind.__name__]["properties"] = described_neutral() | properties
    known = openapi.setdefault("components", {}).setdefault("schemas", {})
    known.update(schemas["$defs"] | {"Fault": FAULT})
    return openapi


async def no_such_route(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))  # Starlette's comes from a set
        message = f"{path} takes no {request.method}, only {allowed}"
        response = fault_response(Fault(405, "invalid_request_error", message, None, "method_not_allowed"))
        response.headers["Allow"] = allowed
        return response
    message = f"no {path} here; there are: {', '.join(ROUTES)}"
    return fault_response(Fault(error.status_code, "invalid_request_error", message, None, "unknown_route"))


def page_response() -> Response:
    """Return the page, and the rule that it may run its own script and style and nothing else."""
    html = PAGE.read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        rules.append(" ".join([f"{tag}-src", *(f"'sha256-{value}'" for value in hashes)]))
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


# --- the server ------------------------------------------------------------------------------------------------------


def serve(settings: Settings, load: Callable[[], Engine]) -> None:
    """Load an engine and serve it until told to stop.

    What can be wrong besides the models comes first, the port too: they take long to load for nothing.
    """
    if not settings.models and not settings.engine:
        raise BadInput("no model to serve; give at least one: --model NAME=MODEL, or --engine vllm=URL")
    if settings.keys:
        Keys.read(settings.keys)
    spans = open_spans(settings.otlp_endpoint, os.environ)
    try:
        with listen(settings) as listener:
            engine = load()
            log_to_stderr()
            make_server(engine, settings, spans).run(sockets=[listener])
    finally:
        if spans is not None:
            spans.close()


class Server(uvicorn.Server):
    """A server whose first SIGTERM or Ctrl-C lets running answers end; a second one cuts them off, a third ends the process.

    While it drains it still listens: probes hear that it is not ready and clients when to come back, which a closed port would
    not tell them.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self.gateway = gateway
        self.loop: asyncio.AbstractEventLoop | None = None
        self.drained: asyncio.Task[None] | None = None
        self.signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; say where."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for each in sockets or []:
            host, port = each.getsockname()[:2]
            LOG.info("listening", extra={"facts": {"url": f"http://{f'[{host}]' if ':' in host else host}:{port}"}})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain first; then hurry. Left to itself, a process that ends would abort in a model's thread."""
        self.signals += 1
        if self.loop is None:
            super().handle_exit(sig, frame)
        elif self.signals == 1:
            self.gateway.draining = True
            self.loop.call_soon_threadsafe(self.begin_to_drain, signal.Signals(sig).name)
        elif self.signals == 2:
            self.loop.call_soon_threadsafe(self.gateway.hurry)
        else:
            os._exit(128 + sig)

    def begin_to_drain(self, why: str) -> None:
        """Start to drain."""
        facts = {"why": why, "limit_s": self.gateway.settings.drain_s, "again": "cuts running answers off"}
        LOG.info("draining", extra={"facts": facts})
        self.drained = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Drain, then end."""
        try:
            await self.gateway.drain()
        finally:
            self.should_exit = True


def make_server(engine: Engine, settings: Settings, spans: Spans | None = None) -> Server:
    """Return a server that does not listen yet."""
    app = create_app(engine, settings, spans)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    return Server(config, app.state.gateway)


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens, or say why it can't."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # Python tells the address once more
        raise BadInput(
            f"can't listen on {settings.host}, port {settings.port}: {why}; choose another with --port"
        ) from error


def log_to_stderr() -> None:
    """Write the log, ours, uvicorn's and that of sending spans, as lines of JSON to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger in (LOG, logging.getLogger("uvicorn"), logging.getLogger("opentelemetry")):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
