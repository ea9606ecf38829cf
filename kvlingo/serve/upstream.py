"""One vLLM server over HTTP: what it serves, how it reads a conversation, what it says.

Knows vLLM's endpoints and the shape of their bodies. Does not know conversations, tenants or why a cache is passed along.
Whatever goes wrong becomes one of the errors of `protocol`, whose texts hold nothing that a client must not see.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvlingo.errors import BadInput
from kvlingo.serve.protocol import Away, Broken, Busy, Message, Unsupported

CONNECT_S, ASK_S, SILENT_S = 5.0, 60.0, 600.0
"""How long a server may take to be reached, to answer what needs no model, and to say its next token."""
LOOK_S = 2.0
RETRY_S = 5.0
IDLE_S = 2.0
"""Connections that rest longer are closed here: uvicorn closes its end after five seconds, and a request could meet that."""
ABOUT, TELL, COMMENT = "/kvlingo", "x-kvlingo-tell", ": kvlingo "
FIELDS = {"max_tokens": "max_tokens", "guided_json": "response_format", "structured_outputs": "response_format"}
MOST_BYTES = 16 << 20
"""No event of a stream is longer."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """One model of a server. `adapter`: it is another one with an adapter, for which no translator is fitted."""

    name: str
    max_tokens: int | None
    created: int
    adapter: bool


@dataclass(frozen=True)
class About:
    """What a server's connector does.

    Fields:
        keeps, loads: whether it keeps what was read, and goes on from what others kept.
        tells: whether a stream says what became of its prompt.
        expires_s: how long a kept cache may be used.
    """

    keeps: bool = False
    loads: bool = False
    tells: bool = False
    expires_s: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """One event of a stream.

    Fields:
        told: what became of the prompt; such a chunk says nothing else.
        ids, logprobs: of the tokens that came; of one that is half a character or held back there is no text yet.
        finish: why it ended; "end" is a special token, "stop" a text that was to stop it.
        completion_tokens: of the whole answer, in the last chunk.
    """

    told: Json | None = None
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: Json | None = None
    finish: str | None = None
    completion_tokens: int | None = None


class Upstream:
    """A server. Used on one event loop, which its connections belong to."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S),
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S, pool=CONNECT_S),
            # Certificates take a fraction of a second to read: here, before anybody waits.
            verify=ssl.create_default_context() if url.startswith("https:") else False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections; what still streams ends with an error."""
        await self._client.aclose()

    async def served(self, timeout_s: float = LOOK_S) -> list[Served]:
        """Return what it serves. Raises `Away`, `Broken`."""
        found = await self._ask("GET", "/v1/models", self.url, timeout_s=timeout_s)
        try:
            return [served_of(model) for model in found["data"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise Broken(self.url, "does not list models as vLLM does") from error

    async def about(self) -> About:
        """Return what its connector does; nothing where it does not say so (no connector, no middleware)."""
        try:
            told = await self._ask("GET", ABOUT, self.url, timeout_s=LOOK_S)
            return About(bool(told["keeps"]), bool(told["loads"]), bool(told["tells"]), float(told["expires_seconds"]))
        except (Away, Broken, Busy, BadInput, Unsupported, KeyError, TypeError, ValueError):
            return About()

    async def chat_ids(
        self, model: str, messages: Sequence[Message], tools: Sequence[Message] = (), *, begins: bool = True
    ) -> tuple[list[int], int]:
        """Return how it reads a chat, and how many tokens it reads in all. `begins`: with the beginning of an answer."""
        body = {"model": model, "messages": [openai_message(m) for m in messages], "add_generation_prompt": begins}
        return await self._ids(model, body | ({"tools": [dict(tool) for tool in tools]} if tools else {}))

    async def text_ids(self, model: str, text: str) -> tuple[list[int], int]:
        """Return how it reads a text, and how many tokens it reads in all."""
        return await self._ids(model, {"model": model, "prompt": text})

    async def _ids(self, model: str, body: Json) -> tuple[list[int], int]:
        found = await self._ask("POST", "/tokenize", model, body)
        try:
            return [int(token) for token in found["tokens"]], int(found["max_model_len"])
        except (KeyError, TypeError, ValueError) as error:
            raise Broken(model, "does not tokenise as vLLM does") from error

    async def text_of(self, model: str, ids: Sequence[int]) -> str:
        """Return what ids spell, special tokens included."""
        found = await self._ask("POST", "/detokenize", model, {"model": model, "tokens": list(ids)})
        return str(found.get("prompt", ""))

    async def _ask(self, method: str, path: str, name: str, body: Json | None = None, timeout_s: float = ASK_S) -> Any:
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise Away(name, RETRY_S) from error
        if response.status_code != 200:
            raise error_of(name, response.status_code, response.content, response.headers, quote=True)
        try:
            return response.json()
        except ValueError as error:
            raise Broken(name, "answered with something that is no JSON") from error

    async def say(self, model: str, body: Json, tell: str | None) -> AsyncGenerator[Chunk, None]:
        """Stream an answer; leaving ends the request over there too.

        Raises `Away`, `Busy`, `Broken` and what the body is refused for.
        """
        headers = {TELL: tell} if tell else {}
        request = self._client.build_request("POST", "/v1/completions", json=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Away(model, RETRY_S) from error
        try:
            if response.status_code != 200:
                raise error_of(model, response.status_code, await response.aread(), response.headers)
            async for line in lines(response.aiter_bytes(), model):
                chunk = chunk_of(line, model)
                if chunk is not None:
                    yield chunk
        except httpx.HTTPError as error:
            raise Broken(model, "broke off its answer") from error
        finally:
            await asyncio.shield(response.aclose())


async def lines(parts: AsyncIterator[bytes], model: str) -> AsyncIterator[bytes]:
    """Yield lines. Only a line feed ends one: what JSON holds may look like other ends of lines."""
    held = b""
    async for part in parts:
        *whole, held = (held + part).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
        if len(held) > MOST_BYTES:
            raise Broken(model, "sent a line without an end")
    if held:
        yield held


def chunk_of(line: bytes, model: str) -> Chunk | None:
    """Read one line of a stream; None for one that says nothing. Raises `Broken`, or what an error in the stream is."""
    try:
        if line.startswith(COMMENT.encode()):
            return Chunk(told=dict(json.loads(line[len(COMMENT) :])))
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            return None
        event = json.loads(line[5:])
        if "error" in event:
            raise error_of(model, int(event["error"].get("code") or 500), line[5:], {})
        usage = event.get("usage") or {}
        if not event["choices"]:
            return Chunk(completion_tokens=int(usage["completion_tokens"])) if usage else None
        choice = event["choices"][0]
        finish = choice.get("finish_reason")
        if finish == "stop" and choice.get("stop_reason") is None:
            finish = "end"
        return Chunk(
            text=str(choice.get("text") or ""),
            ids=tuple(map(int, choice.get("token_ids") or ())),
            logprobs=choice.get("logprobs"),
            finish=finish,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Broken(model, "sent an event that can't be read") from error


def served_of(model: Mapping[str, Any]) -> Served:
    """Read one entry of a list of models."""
    room = model.get("max_model_len")
    return Served(
        str(model["id"]),
        None if room is None else int(room),
        int(model.get("created") or 0),
        model.get("parent") is not None,
    )


def error_of(model: str, status: int, body: bytes, headers: Mapping[str, str], *, quote: bool = False) -> Exception:
    """Return what an error is here.

    `quote`: pass on why a prompt is refused; for requests that held nothing that a client may not see (a salt, ids of caches).
    """
    told = error_in(body)
    if status == 429:
        return Busy(retry_after(headers))
    if status == 503:
        return Away(model, retry_after(headers))
    if status in (401, 403):
        return Broken(model, "asks for another API key (KVLINGO_ENGINE_KEY)")
    if status == 400:
        param = str(told.get("param") or "").removeprefix("body.").partition(".")[0]
        if param in ("prompt", "messages", ""):
            why = f": {' '.join(str(told.get('message')).split())[:200]}" if quote else ""
            return BadInput(f"the server of {model} refuses this prompt{why}")
        return Unsupported(FIELDS.get(param, param), "the server of the model refuses it")
    if status == 404:
        return Away(model, RETRY_S)
    return Broken(model, f"answered with status {status}")


def error_in(body: bytes) -> Json:
    """Return the error object of a body; nothing where there is none."""
    try:
        told = json.loads(body)
        found = told.get("error", told)
        return dict(found) if isinstance(found, Mapping) else {}
    except (ValueError, AttributeError):
        return {}


def retry_after(headers: Mapping[str, str]) -> float:
    """Return when a server wants to be asked again, in seconds."""
    try:
        return min(max(float(headers.get("retry-after", RETRY_S)), 1.0), 600.0)
    except ValueError:
        return RETRY_S


def openai_message(message: Message) -> Json:
    """Return a message as OpenAI's API takes it: arguments of calls as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def as_text(arguments: Any) -> str:
    """Return arguments as JSON in text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
