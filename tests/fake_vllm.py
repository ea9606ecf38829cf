"""A vLLM server without a model: its endpoints, its connector's rules for kept caches, and faults as knobs.

Ids are bytes, moved by an offset of its own. What it says follows from the text that it read alone, so that servers with other
ids say the same. The middleware around it is the real one.
"""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvlingo.serve.external.headers import RouterHeaders
from kvlingo.serve.external.telling import Board

BOS, EOS = 0, 1
WORDS = ("red ", "green ", "blue ", "grün ", "\u2028", '"quoted" ', "<i>end</i>. ")
Store = dict[str, dict[str, Any]]


@dataclass
class FakeVllm:
    """One server.

    Fields:
        store: the kept caches; servers that share it hand over to each other.
        offset: what is added to a byte to make its id, modulo 256, before the two special ones.
        heading: how its chat template marks a message.
        answer: what it says, where that is not to follow from the prompt.
        refusal: status, reason and why of a connector that refuses every kept cache.
        status, error, headers: what /v1/completions answers with instead.
        break_after: so many tokens come before the connection breaks.
        silent: nothing comes as long as it is set.
    """

    name: str = "small"
    store: Store = field(default_factory=dict)
    about: Mapping[str, Any] | None = field(
        default_factory=lambda: {"keeps": True, "loads": True, "tells": True, "expires_seconds": 3600.0}
    )
    room: int = 4096
    offset: int = 0
    heading: str = "### "
    tools_shown: bool = True
    answer: str | None = None
    refusal: tuple[str, str, str] | None = None
    status: int | None = None
    error: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    break_after: int | None = None
    token_s: float = 0.0
    silent: bool = False
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0
    read: dict[str, list[list[int]]] = field(default_factory=dict)

    # --- its tokenizer and template ---

    def ids_of(self, text: str) -> list[int]:
        return [2 + (byte + self.offset) % 256 for byte in text.encode()]

    def text_of(self, ids: Sequence[int]) -> str:
        raw = b"".join(b"" if i in (BOS, EOS) else bytes([(i - 2 - self.offset) % 256]) for i in ids)
        return raw.decode(errors="replace")

    def render(self, body: Mapping[str, Any]) -> str:
        tools = f"tools: {json.dumps(body['tools'])}\n" if body.get("tools") and self.tools_shown else ""
        text = tools
        for message in body["messages"]:
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
            said = "".join(f"<tool_call>{call}</tool_call>" for call in calls) if self.tools_shown else ""
            text += f"{self.heading}{message['role']}\n{message['content']}{said}\n"
        return text + (f"{self.heading}assistant\n" if body.get("add_generation_prompt", True) else "")

    # --- what it says ---

    def said(self, body: Mapping[str, Any]) -> list[str]:
        if self.answer is not None:
            return list(self.answer)
        prompt = self.text_of(body["prompt"]).replace(self.heading, "")
        digest = hashlib.sha256(f"{prompt}{body.get('seed')}".encode()).digest()
        return [WORDS[byte % len(WORDS)] for byte in digest[:12]]

    def told(self, body: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, Any]:
        ids, salt, load = body["prompt"], body["cache_salt"], wish.get("load")
        entry = self.store.get(load or "")
        refused = None
        if load is not None:
            if self.refusal is not None:
                refused = self.refusal
            elif entry is None or entry["salt"] != salt:
                refused = ("fallback_reprefill", "unknown", "no such cache is kept")
        place = f"{salt} {load}" if load is not None and refused is None else salt
        native = max((shared(held, ids) for held in self.read.get(place, ())), default=0)
        native = min(native, len(ids) - 1)
        reach = min(shared(entry["ids"], ids), len(ids) - 1) if load is not None and refused is None and entry else 0
        translated = max(0, reach - native)
        self.read.setdefault(place, []).append(list(ids))
        status = {"status": "applied"} if load is not None else {}
        if refused is not None:
            status = dict(zip(("status", "reason", "why"), refused, strict=True))
        prompt = {"native": native, "translated": translated, "recomputed": len(ids) - native - translated}
        return {**status, "prompt": prompt}

    def keep(self, body: Mapping[str, Any], wish: Mapping[str, Any], ids: Sequence[int]) -> None:
        if isinstance(wish.get("save"), str):
            self.store[wish["save"]] = {"salt": body["cache_salt"], "ids": [*body["prompt"], *ids], "of": self.name}
        load = wish.get("load")
        place = f"{body['cache_salt']} {load}"
        self.read.setdefault(place if place in self.read else body["cache_salt"], []).append([*body["prompt"], *ids])

    async def stream(self, body: Mapping[str, Any], board: Board) -> AsyncIterator[bytes]:
        wish = (body.get("kv_transfer_params") or {}).get("kvlingo", {})
        ids: list[int] = []
        try:
            while self.silent:
                await asyncio.sleep(0.01)
            if "tell" in wish:
                board.put({wish["tell"]: self.told(body, wish)})
            said, count = self.said(body), 0
            words, finish = said[: body["max_tokens"]], "stop" if len(said) < body["max_tokens"] else "length"
            for word in words:
                if count == self.break_after:
                    raise RuntimeError("the server breaks here")
                await asyncio.sleep(self.token_s)
                count += 1
                ids += self.ids_of(word)
                stop = next((each for each in body.get("stop", ()) if each in word), None)
                ended = "stop" if stop else "length" if finish == "length" and count == len(words) else None
                chosen = {"text": "" if stop else word, "token_ids": self.ids_of(word), "finish_reason": ended}
                yield event({**chosen, "stop_reason": stop, **logprobs_of(word, body.get("logprobs"))})
                if stop:
                    break
            else:
                if finish == "stop":
                    count += 1
                    ids.append(EOS)
                    end = {"text": "", "token_ids": [EOS], "finish_reason": "stop", "stop_reason": None}
                    yield event({**end, **logprobs_of("</s>", body.get("logprobs"))})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.keep(body, wish, ids[:-1])


def logprobs_of(word: str, top: int | None) -> dict[str, Any]:
    if top is None:
        return {"logprobs": None}
    tops = {word: -0.5, **{f"{word}{rank}": -float(rank + 1) for rank in range(top)}}
    return {"logprobs": {"tokens": [word], "token_logprobs": [-0.5], "top_logprobs": [tops], "text_offset": [0]}}


def event(choice: Mapping[str, Any]) -> bytes:
    body = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, **choice}]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def app_of(fake: FakeVllm) -> Any:
    app, board = FastAPI(), Board(fake.about)

    def stranger(request: Request) -> bool:
        return bool(fake.key) and request.headers.get("authorization") != f"Bearer {fake.key}"

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        if stranger(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return {"object": "list", "data": [{"id": fake.name, "created": 1_700_000_000, "max_model_len": fake.room}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        body = await request.json()
        if "messages" in body and body["messages"][0]["content"] == "refuse":
            error = {
                "message": "the template wants a user first",
                "type": "BadRequestError",
                "code": 400,
                "param": None,
            }
            return JSONResponse({"error": error}, 400)
        text = fake.render(body) if "messages" in body else body["prompt"]
        ids = [*([BOS] if "prompt" in body else []), *fake.ids_of(text)]
        return {"count": len(ids), "max_model_len": fake.room, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        return {"prompt": fake.text_of((await request.json())["tokens"])}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        fake.asked.append({**body, "headers": dict(request.headers)})
        if stranger(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        if fake.status is not None:
            return JSONResponse({"error": {"code": fake.status, **fake.error}}, fake.status, dict(fake.headers))
        return StreamingResponse(fake.stream(body, board), media_type="text/event-stream")

    return RouterHeaders(app, board) if fake.about is not None else app


@dataclass
class Running:
    """A server that runs."""

    fake: FakeVllm
    server: uvicorn.Server
    thread: threading.Thread
    listener: socket.socket

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def stop(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.thread.join(timeout=30)
        self.listener.close()
        assert not self.thread.is_alive()


@contextmanager
def running(*fakes: FakeVllm) -> Iterator[list[Running]]:
    """Run servers until the end of the block."""
    started = [start(fake) for fake in fakes]
    try:
        yield started
    finally:
        for each in started:
            each.stop()


def start(fake: FakeVllm) -> Running:
    config = uvicorn.Config(app_of(fake), log_config=None, access_log=False, ws="none", lifespan="off")
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.01)
    return Running(fake, server, thread, listener)
