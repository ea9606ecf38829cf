"""Many conversations at once through the real HTTP server: does any hear another's, does memory stay, what does HTTP cost?

    python -m bench.load [--seed 0] [--conversations 64] [--turns 2000] [--rounds 5] [--out results/load.json]

A tiny model (double precision) is served under two names with the identity translator between them, so that every answer has
a right text: what the model alone says after reading that conversation anew. The conversations are written from the seed
(`bench/talks.py`): they switch models, take turns back, and go away in the middle of answers or before them. The server, with
its engine, is a process of its own; this one is the client and the judge. The throughput of HTTP is measured against the
engine alone in that same process, on the same conversations and as many at once, in rounds that alternate; there nobody goes
away. Needs Linux (`/proc`).

Exit code 1: an answer was wrong, a request was refused, something was left running, or memory did not stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from bench.talks import ANSWER_TOKENS, SECONDS, EngineAsker, HttpAsker, Message, Talk, Told, converse_all, write_talks
from kvlingo.environment import environment_card
from kvlingo.language_model import LanguageModel
from kvlingo.serve.settings import Settings
from tests.fake_engine import serving
from tests.serving import cold_ids, letters_model, twin_engine

FLAT = 0.05
"""So far may memory be from the median of the last half."""
SAMPLES = 40
ENOUGH = 0.8
"""HTTP is to reach this share of the engine's throughput in the median, or the command fails; no test asks for it."""


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Fields:
        conversations: held at once.
        turns: of all of them together.
        rounds: of throughput, each HTTP and bare.
        round_turns: of one round and arm.
        cache_bytes: of the engine; little enough that the store is full long before the end.
    """

    seed: int = 0
    conversations: int = 64
    turns: int = 2000
    rounds: int = 5
    round_turns: int = 256
    cache_bytes: int = 12_000_000


@dataclass(frozen=True)
class Sample:
    """Memory of the server at one moment."""

    turns: int
    rss_bytes: int
    cache_bytes: int


def main() -> int:
    """Measure, print one record."""
    size, out = parse()
    record = measure(size)
    line = json.dumps(record | {"environment": environment_card()})
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    print(line)
    reached = record["throughput"]["ratio"] >= ENOUGH
    return 0 if reached and all(record["checks"].values()) else 1


def parse() -> tuple[Size, Path | None]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    return Size(**arguments), out


def measure(size: Size) -> dict[str, Any]:
    """Run the load, then the rounds of throughput; return the record."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    talks = write_talks(size.seed, size.conversations, size.turns)
    with worker(size.cache_bytes) as host:
        with host.served() as url:
            told, samples, left = asyncio.run(load(url, talks, host.pid))
        rounds = [throughput(host, size, number) for number in range(size.rounds)]
    record = {
        **asdict(size),
        "turns": outcome(told),
        "cross_talk": cross_talk(told, letters_model()),
        "memory": memory(samples),
        "queue_ms": quantiles([each.queue_ms for each in told if each.queue_ms is not None]),
        "ttft_ms": quantiles([each.ttft_ms for each in told if each.ttft_ms is not None]),
        "left": left,
        "throughput": compared(rounds),
        "seconds": time.perf_counter() - began,
    }
    return record | {"checks": checks(record)}


def checks(record: Mapping[str, Any]) -> dict[str, bool]:
    """Return what must hold."""
    rounds = record["throughput"]["rounds"]
    return {
        "no_cross_talk": record["cross_talk"]["checked"] > 0 and record["cross_talk"]["wrong"] == 0,
        "nothing_refused": not record["turns"]["errors"],
        "nothing_left_running": not any(record["left"].values()),
        "memory_flat": record["memory"]["rss_off"] <= FLAT and record["memory"]["cache_off"] <= FLAT,
        "both_arms_say_the_same": all(each["same_texts"] for each in rounds),
    }


# --- the load --------------------------------------------------------------------------------------------------------


async def load(url: str, talks: Sequence[Talk], pid: int) -> tuple[list[Told], list[Sample], dict[str, float]]:
    """Hold all talks; return what was told, memory meanwhile, and what the server still has to do when all have gone."""
    total = sum(len(talk.turns) for talk in talks)
    async with client_of(url, len(talks)) as client, httpx.AsyncClient(base_url=url, timeout=SECONDS) as watcher:
        done, samples, tasks = 0, list[Sample](), list[asyncio.Task[None]]()

        async def look(turns: int) -> None:
            figures = await figures_of(watcher)
            samples.append(Sample(turns, rss_bytes(pid), int(figures["kvlingo_engine_cache_bytes"])))

        def after_each() -> None:
            nonlocal done
            done += 1
            if done % max(1, total // SAMPLES) == 0:
                tasks.append(asyncio.create_task(look(done)))

        told, _ = await converse_all(talks, HttpAsker(client), after_each)
        await asyncio.gather(*tasks)
        return told, sorted(samples, key=lambda s: s.turns), await at_rest(watcher)


def client_of(url: str, connections: int) -> httpx.AsyncClient:
    """Return a client with a connection for each talk."""
    limits = httpx.Limits(max_connections=2 * connections, max_keepalive_connections=2 * connections)
    return httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits)


async def figures_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's figures that have no labels."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def at_rest(client: httpx.AsyncClient, seconds: float = 30.0) -> dict[str, float]:
    """Return what still waits or runs; those whose clients went away may take a moment to end."""
    until = time.monotonic() + seconds
    while True:
        figures = await figures_of(client)
        left = {name: figures[f"kvlingo_engine_{name}"] for name in ("queued", "running")}
        if not any(left.values()) or time.monotonic() > until:
            return left
        await asyncio.sleep(0.05)


def rss_bytes(pid: int) -> int:
    """Return a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- what is made of it ----------------------------------------------------------------------------------------------


def outcome(told: Sequence[Told]) -> dict[str, Any]:
    """Count how turns ended."""
    whole = [each for each in told if each.whole]
    errors = [each.error for each in told if each.error]
    return {
        "all": len(told),
        "answered": len(whole),
        "gone_away": len(told) - len(whole) - len(errors),
        "errors": dict(Counter(errors)),
        "translated": sum(each.translated_tokens > 0 for each in whole),
        "fallbacks": dict(Counter(re.sub(r"\d+", "N", each.fallback) for each in whole if each.fallback)),
    }


def cross_talk(told: Sequence[Told], lm: LanguageModel) -> dict[str, Any]:
    """Hold every answer, and every beginning of one, against what the model alone says of that conversation.

    `told_apart` is the share of answers that no other conversation's question has: only those could show a mix-up.
    """
    right = {messages: cold_text(lm, messages) for messages in dict.fromkeys(t.messages for t in told if t.text)}
    wrong = [t for t in told if t.text and not (t.text == right[t.messages] if t.whole else is_start(t, right))]
    owners: dict[str, set[str]] = {}
    for messages, text in right.items():
        owners.setdefault(text, set()).add(messages[0][1])
    apart = [len(owners[text]) == 1 for text in right.values()]
    return {
        "checked": sum(bool(t.text) for t in told),
        "whole": sum(t.whole for t in told),
        "wrong": len(wrong),
        "told_apart": statistics.fmean(apart) if apart else 0.0,
        "first_wrong": [{"messages": t.messages, "text": t.text, "right": right[t.messages]} for t in wrong[:3]],
    }


def is_start(told: Told, right: Mapping[tuple[Message, ...], str]) -> bool:
    """Tell whether the beginning of an answer is that of the right one."""
    return right[told.messages].startswith(told.text)


def cold_text(lm: LanguageModel, messages: tuple[Message, ...]) -> str:
    """Return what the model alone says."""
    plain = [{"role": role, "content": content} for role, content in messages]
    return str(lm.tokenizer.decode(cold_ids(lm, plain, ANSWER_TOKENS, letters_only=False)))


def memory(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the samples, and how far the last half of them is from its median at most, as a share."""
    half = samples[len(samples) // 2 :]

    def off(values: list[int]) -> float:
        return max(abs(value / statistics.median(values) - 1) for value in values)

    return {
        "rss_off": off([each.rss_bytes for each in half]),
        "cache_off": off([each.cache_bytes for each in half]),
        "samples": [asdict(each) for each in samples],
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the middle and the end of a distribution."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "largest": max(values)}


# --- throughput ------------------------------------------------------------------------------------------------------


def throughput(host: Worker, size: Size, number: int) -> dict[str, Any]:
    """Hold the same new talks through HTTP and without it, each on an engine that has read nothing; which is first alternates."""
    talks = write_talks(size.seed + 1 + number, size.conversations, size.round_turns, leaving=0.0)

    def over_http() -> tuple[list[Told], float]:
        with host.served() as url:
            return asyncio.run(hold(url, talks))

    arms: dict[str, Callable[[], tuple[list[Told], float]]] = {"http": over_http, "bare": lambda: host.bare(talks)}
    found = {arm: arms[arm]() for arm in (arms if number % 2 == 0 else reversed(arms))}
    speed = {arm: len(told) / seconds for arm, (told, seconds) in found.items()}
    texts = {arm: [each.text for each in told] for arm, (told, _) in found.items()}
    return {
        "turns_per_s": speed,
        "ratio": speed["http"] / speed["bare"],
        "same_texts": texts["http"] == texts["bare"] and all(texts["http"]),
    }


async def hold(url: str, talks: Sequence[Talk]) -> tuple[list[Told], float]:
    """Hold talks over HTTP."""
    async with client_of(url, len(talks)) as client:
        return await converse_all(talks, HttpAsker(client))


def compared(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rounds with the middle, lowest and highest of their ratios."""
    ratios = [each["ratio"] for each in rounds]
    spread = {"ratio": statistics.median(ratios), "ratio_lowest": min(ratios), "ratio_highest": max(ratios)}
    return {**spread, "aim": ENOUGH, "rounds": rounds}


# --- the server's process --------------------------------------------------------------------------------------------


class Worker:
    """A process that serves or answers, as it is told."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self.pipe, self.pid = pipe, pid

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve a new engine over HTTP; yield its address."""
        self.pipe.send(None)
        try:
            yield f"http://127.0.0.1:{self.pipe.recv()}"
        finally:
            self.pipe.send(None)
            self.pipe.recv()

    def bare(self, talks: Sequence[Talk]) -> tuple[list[Told], float]:
        """Hold talks in that process, with a new engine and no HTTP."""
        self.pipe.send(talks)
        told, seconds = self.pipe.recv()
        return told, seconds


@contextmanager
def worker(cache_bytes: int) -> Iterator[Worker]:
    """Start the process; end it."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, cache_bytes), daemon=True)
    process.start()
    there.close()
    try:
        yield Worker(here, process.pid or 0)
    finally:
        here.close()
        process.join(10)
        process.kill()


def work(pipe: Connection, cache_bytes: int) -> None:
    """Do what is asked until nobody asks any more: serve for None, hold talks for a list of them."""
    torch.set_num_threads(1)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        with twin_engine(letters_model(), cache_bytes=cache_bytes) as (engine, _):
            if asked is None:
                with serving(engine, Settings()) as running:
                    pipe.send(running.port)
                    pipe.recv()
                pipe.send(None)
            else:
                pipe.send(asyncio.run(converse_all(asked, EngineAsker(engine))))


if __name__ == "__main__":
    sys.exit(main())
