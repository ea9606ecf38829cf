"""Random requests made from the server's own OpenAPI description: none may break it.

    python -m bench.soak [--requests 100000] [--seed 0] [--out FILE]     (make soak)

Schemathesis draws requests that fit the description and requests that don't. Each is sent as drawn; some once more so that
they reach a model (its name, few tokens), some once more with bytes damaged, some by a client that goes away. A tiny model
answers under two names, with a translator between them. What must hold: no 5xx but a 503 with Retry-After, every error in
OpenAI's shape, every stream ended by [DONE] or by an error that is no internal one; in the end nothing waits or runs, and a
good request is answered as by the model alone. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import hypothesis
import schemathesis
import torch
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from bench.load import at_rest
from bench.talks import MODELS
from kvlingo.environment import environment_card
from kvlingo.serve.settings import Settings
from tests.fake_engine import serving
from tests.serving import cold_ids, letters_model, twin_engine

CHAT, TEXT, ONE_MODEL = "/v1/chat/completions", "/v1/completions", "/v1/models/{name}"
FITS, DOES_NOT = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
DRAWN = (
    (CHAT, "POST", FITS, 30),
    (CHAT, "POST", DOES_NOT, 25),
    (TEXT, "POST", FITS, 20),
    (TEXT, "POST", DOES_NOT, 15),
    (ONE_MODEL, "GET", FITS, 10),  # any name fits
)
"""Path, method, whether it fits the description, how many at a time."""
FIXED = ("/v1/models", "/healthz", "/readyz", "/metrics", "/openapi.json", "/")
AT_ONCE = 16
BATCH = 200
SECONDS = 120.0
SHOWN = 10
GOOD = [{"role": "user", "content": "still there?"}]
GOOD_TOKENS = 8


@dataclass(frozen=True)
class Sent:
    """One request as it goes over the wire. `leave_s`: its client goes away after so many seconds."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content: bytes | None = None
    leave_s: float | None = None


@dataclass
class Found:
    """What came of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[dict[str, Any]] = field(default_factory=list)

    def take(self, sent: Sent, outcome: httpx.Response | str) -> None:
        """Count one outcome: a reply, or the word for why there is none."""
        self.statuses[outcome if isinstance(outcome, str) else str(outcome.status_code)] += 1
        what = broken_connection(outcome) if isinstance(outcome, str) else complaint(outcome)
        if what:
            shown = {name: repr(value)[:600] for name, value in asdict(sent).items()}
            self.complaints.append({"complaint": what, **shown})


def main() -> int:
    """Send them, print one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = soak(arguments.requests, arguments.seed)
    line = json.dumps(record | {"environment": environment_card()})
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    print(
        f"{record['requests']} requests in {record['seconds']:.0f} s, {record['broken']} broke the rules",
        file=sys.stderr,
    )
    return 0 if holds(record) else 1


def holds(record: Mapping[str, Any]) -> bool:
    """Tell whether nothing broke."""
    return not record["broken"] and not any(record["left"].values()) and bool(record["good_answer"])


def soak(count: int, seed: int) -> dict[str, Any]:
    """Serve a tiny model, send `count` random requests, see that it is still well."""
    torch.set_num_threads(1)
    began, found = time.perf_counter(), Found()
    settings = Settings(max_tokens=4, max_body_bytes=100_000, stall_s=10.0)
    with twin_engine(letters_model(), cache_bytes=20_000_000) as (engine, lm), serving(engine, settings) as running:
        openapi = httpx.get(f"{running.url}/openapi.json").json()
        requests = islice(requests_of(openapi, seed), count)
        left, said = asyncio.run(send_all(running.url, requests, found))
    right = lm.tokenizer.decode(cold_ids(lm, GOOD, GOOD_TOKENS, letters_only=False))
    return {
        "requests": found.statuses.total(),
        "seed": seed,
        "statuses": dict(sorted(found.statuses.items())),
        "broken": len(found.complaints),
        "complaints": found.complaints[:SHOWN],
        "left": left,
        "good_answer": said == right,
        "seconds": time.perf_counter() - began,
    }


# --- what is sent ----------------------------------------------------------------------------------------------------


def requests_of(openapi: dict[str, Any], seed: int) -> Iterator[Sent]:
    """Yield requests without end: the same ones for a description and a seed, as long as the same modules are loaded.

    Hypothesis also draws constants that it finds in the loaded modules of a project.
    """
    rng = random.Random(seed)
    schema = schemathesis.openapi.from_dict(openapi)
    strategies = [
        (schema[path][method].as_strategy(generation_mode=mode), count) for path, method, mode, count in DRAWN
    ]
    while True:
        cases = [case for strategy, count in strategies for case in drawn(strategy, count, rng)]
        rng.shuffle(cases)
        for case in cases:
            yield from variants(case, rng)
        yield from (Sent("GET", path) for path in FIXED)


def drawn(strategy: SearchStrategy[Any], count: int, rng: random.Random) -> list[Any]:
    """Return examples of a strategy."""
    found: list[Any] = []

    @hypothesis.seed(rng.getrandbits(64))
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def take(case: Any) -> None:
        found.append(case)

    take()
    return found


def variants(case: Any, rng: random.Random) -> Iterator[Sent]:
    """Yield a case as it was drawn, and changed."""
    sent = as_drawn(case)
    yield sent
    if isinstance(case.body, dict) and rng.random() < 0.7:
        reaching = json_bytes(reach(case.body, rng))
        leave_s = rng.uniform(0.0, 0.05) if rng.random() < 0.1 else None
        yield Sent("POST", sent.path, as_json(named(rng)), reaching, leave_s)
    if sent.content and rng.random() < 0.3:
        yield Sent(sent.method, sent.path, as_json(()), damaged(sent.content, rng))


def as_drawn(case: Any) -> Sent:
    """Turn a case of Schemathesis into bytes."""
    path = case.path
    for name, value in (case.path_parameters or {}).items():
        path = path.replace(f"{{{name}}}", quote(str(value), safe="", errors="replace"))
    headers = tuple((str(n).encode(), str(v).encode("utf-8", "replace")) for n, v in (case.headers or {}).items())
    if case.method == "GET" or isinstance(case.body, schemathesis.core.NotSet):
        return Sent(case.method, path, headers)
    told = any(name.lower() == b"content-type" for name, _ in headers)
    content = case.body if isinstance(case.body, bytes) else json_bytes(case.body)
    return Sent(case.method, path, headers if told else as_json(headers), content)


def as_json(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
    """Add that the body is JSON."""
    return (*headers, (b"Content-Type", b"application/json"))


def named(rng: random.Random) -> tuple[tuple[bytes, bytes], ...]:
    """Name one of a few conversations, or none."""
    return ((b"X-Conversation", f"talk-{rng.randrange(4)}".encode()),) if rng.random() < 0.3 else ()


def json_bytes(value: Any) -> bytes:
    """Write JSON; half characters as escapes, which some parsers take."""
    return json.dumps(value, default=str).encode()


def reach(body: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change as little of a body as lets a model answer it, soon."""
    bias = body.get("logit_bias")
    changed = {
        **body,
        "model": rng.choice(MODELS),
        "max_tokens": rng.randint(1, 6),
        "n": rng.randint(1, 2),
        "logit_bias": {str(rng.randrange(320)): v for v in bias.values()} if isinstance(bias, dict) else None,
    }
    changed.pop("max_completion_tokens", None)
    if not changed.get("stream"):
        changed.pop("stream_options", None)
    if isinstance(body.get("messages"), list):
        changed["messages"] = [answerable(m, rng) for m in body["messages"] if isinstance(m, dict)] or list(GOOD)
        if not changed.get("logprobs"):
            changed.pop("top_logprobs", None)
    return changed


def answerable(message: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Give a message what its role needs."""
    role = rng.choice(("system", "user", "assistant"))
    content = message.get("content") or "".join(rng.choices("abc \n\0é\u2028\U0001f600</s>", k=rng.randint(0, 20)))
    return {"role": role, "content": content}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Change, lose or repeat a few bytes; bytes that are no UTF-8 among them."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        end = at + rng.randint(0, 8)
        data[at:end] = rng.choice((b"", b"\xff", b"\xc3", b"\xed\xa0\x80", b'"', b"{", bytes(data[at:end]) * 3))
    return bytes(data)


# --- what comes back -------------------------------------------------------------------------------------------------


async def send_all(url: str, requests: Iterator[Sent], found: Found) -> tuple[dict[str, float], str | None]:
    """Send all, some at once; return what is left to do afterwards, and what a good request is answered."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:
        while batch := list(islice(requests, BATCH)):
            places = asyncio.Semaphore(AT_ONCE)
            outcomes = await asyncio.gather(*(send(client, sent, places) for sent in batch))
            for sent, outcome in zip(batch, outcomes, strict=True):
                found.take(sent, outcome)
        left = await at_rest(client)
        good = {"model": "a", "messages": GOOD, "max_tokens": GOOD_TOKENS, "temperature": 0}
        answer = await client.post(CHAT, json=good)
    return left, answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else None


async def send(client: httpx.AsyncClient, sent: Sent, places: asyncio.Semaphore) -> httpx.Response | str:
    """Send one request; return its reply, or the word for why there is none."""
    async with places:
        try:
            async with asyncio.timeout(sent.leave_s):
                return await client.request(sent.method, sent.path, headers=list(sent.headers), content=sent.content)
        except TimeoutError:
            return "left"
        except httpx.LocalProtocolError:  # what HTTP can't carry: a line break in a header
            return "unsendable"
        except httpx.HTTPError as error:
            return f"broken: {type(error).__name__}"


def broken_connection(outcome: str) -> str | None:
    """Say that a reply did not come, where its client waited for it."""
    return "the connection broke" if outcome.startswith("broken") else None


def complaint(reply: httpx.Response) -> str | None:
    """Say which rule a reply breaks, or None."""
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if reply.status_code == 503 and "retry-after" not in reply.headers:
        return "a 503 without Retry-After"
    if reply.status_code >= 500 and reply.status_code != 503:
        return f"status {reply.status_code}"
    if reply.status_code >= 400:
        return None if kind == "application/json" and is_fault(reply.content) else "an error in no client's shape"
    if kind == "text/event-stream":
        return bad_end(reply.text)
    return "no JSON" if kind == "application/json" and not is_json(reply.content) else None


def bad_end(stream: str) -> str | None:
    """Say what is wrong with the end of a stream, or None."""
    events = [event.removeprefix("data: ") for event in stream.split("\n\n") if event.startswith("data: ")]
    if events and events[-1] == "[DONE]":
        return None
    if not events or not is_fault(events[-1].encode()):
        return "a stream without an end"
    code = json.loads(events[-1])["error"]["code"]
    return "an internal error in a stream" if code == "internal" else None


def is_json(content: bytes) -> bool:
    """Tell whether it is JSON."""
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def is_fault(content: bytes) -> bool:
    """Tell whether it is an error in OpenAI's shape."""
    if not is_json(content):
        return False
    value = json.loads(content)
    error = value.get("error") if isinstance(value, dict) else None
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"} and bool(error["message"])


if __name__ == "__main__":
    sys.exit(main())
