"""Time to first token of a conversation that changes its model, through the HTTP API, against a re-prefill of the same.

    python -m bench.gateway --translator DIR [--tokens 2000] [--repeats 5] [--out results/gateway.json]

Serves SmolLM2-135M-Instruct and Gemma-3-270M on loopback ports. Each repeat is a conversation of its own, so nothing is held
from an earlier one: the small model answers the first turn, the next turn is asked of the large one three times, each under its
own X-Conversation and in an order that rotates: with `mode: translate`, with `mode: reprefill`, and of a second server (the same
models, `--ahead`) once it has translated the turn ahead; how long that took, from the end of the answer on, is told beside. Times
are the client's: from sending the request to the first piece of text. The first turn (the source's own prefill) is timed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.corpora import held_out_and_training
from kvlingo.assets import fetch_demo_models
from kvlingo.environment import environment_card
from kvlingo.language_model import LanguageModel
from kvlingo.models import default_cache_dir, load_model
from kvlingo.serve import loading
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.gateway import listen, make_server
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Link
from kvlingo.store import load_translator, read_manifest

SMALL, LARGE = "smollm2-135m-instruct", "gemma-3-270m"
TOLD = ("native_tokens", "translated_tokens", "recomputed_tokens", "hops")
MODES = ("translate", "reprefill", "ahead")
DIALS = {"translate": {"mode": "translate"}, "reprefill": {"mode": "reprefill"}, "ahead": {}}
QUESTION = "Go on in the same manner."
SECONDS = 600.0
ENOUGH = 6.0
"""How many times longer a re-prefill is to take than a translation, in the middle of the conversations."""


@dataclass(frozen=True)
class Turn:
    """One answered turn: its client's time, and what the server says of it."""

    mode: str
    first_token_ms: float
    native_tokens: int
    translated_tokens: int
    recomputed_tokens: int
    hops: int
    fallback: str | None
    ready_ms: float | None = None


def main() -> int:
    """Measure and print one record; fail where a hand-over is not so much faster as it is to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--translator", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--gemma", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    models = load_both(arguments)
    texts = long_texts(models[LARGE], arguments)
    with served(models, arguments.translator) as plain, served(models, arguments.translator, ahead=True) as early:
        for url, _ in (plain, early):
            warm_up(url)
        turns = [turn for number, text in enumerate(texts) for turn in one_conversation(plain, early, text, number)]
    weights = read_manifest(arguments.translator).weights
    told = {"dtype": arguments.dtype, "maps_stored_as": weights.dtype if weights else None}
    record = summary(turns) | {"turns": [asdict(turn) for turn in turns]} | told
    line = json.dumps(record | {"environment": environment_card()})
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if record["ratios"]["translate"]["median"] >= ENOUGH else 1


def load_both(arguments: argparse.Namespace) -> dict[str, LanguageModel]:
    """Load both models under their full names."""
    paths = {SMALL: arguments.smollm2, LARGE: arguments.gemma}
    if not all(paths.values()):
        paths = dict(fetch_demo_models(arguments.cache / "demo"))
    return {name: load_model(paths[name], dtype=arguments.dtype) for name in (SMALL, LARGE)}


def long_texts(lm: LanguageModel, arguments: argparse.Namespace) -> list[str]:
    """Return the first `tokens` tokens of the longest held-out documents, one for each repeat."""
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    longest = sorted(documents, key=lambda d: len(d.text), reverse=True)[: arguments.repeats]
    cut = [lm.tokenizer(d.text[: 8 * arguments.tokens], add_special_tokens=False)["input_ids"] for d in longest]
    return [lm.tokenizer.decode(ids[: arguments.tokens]) for ids in cut]


@contextmanager
def served(models: dict[str, LanguageModel], folder: Path, *, ahead: bool = False) -> Iterator[tuple[str, LocalEngine]]:
    """Serve both models with a translator between them, whether or not it was evaluated; give the address and the engine."""
    translator, _ = load_translator(folder, source=models[SMALL], target=models[LARGE])
    link = Link(SMALL, LARGE, translator.eval())
    loading.warm_up(models, link, print)
    engine = LocalEngine(models, [link], Limits(ahead=ahead))
    settings = Settings(port=0, drain_s=1.0)
    with listen(settings) as listener:
        server = make_server(engine, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join(10)


def warm_up(url: str) -> None:
    """Let both models speak once."""
    for model in (SMALL, LARGE):
        ask(url, model, [{"role": "user", "content": "Hello."}], "warm", {})


Served = tuple[str, LocalEngine]


def one_conversation(plain: Served, early: Served, text: str, number: int) -> Iterator[Turn]:
    """Let the small model answer, then ask the large one in all ways."""
    opening = [{"role": "user", "content": text}]
    first = number % len(MODES)
    for mode in (*MODES[first:], *MODES[:first]):
        name, (url, engine) = f"{number}-{mode}", early if mode == "ahead" else plain
        before = engine.stats().get("ahead_done", 0)
        said, turn = ask(url, SMALL, opening, name, {})
        ready = wait_until_ready(engine, before) if mode == "ahead" else None
        if mode == "translate":
            yield turn
        messages = [*opening, {"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
        yield replace(ask(url, LARGE, messages, name, dict(DIALS[mode]), mode)[1], ready_ms=ready)


def wait_until_ready(engine: LocalEngine, before: float) -> float:
    """Wait until one more turn has been translated ahead; return how long it took, in milliseconds."""
    started = time.perf_counter()
    while engine.stats()["ahead_done"] <= before:
        if time.perf_counter() - started > SECONDS:
            raise SystemExit(f"nothing was translated ahead: {engine.stats()}")
        time.sleep(0.005)
    return 1e3 * (time.perf_counter() - started)


def ask(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    conversation: str,
    dial: dict[str, Any],
    mode: str = "first turn",
) -> tuple[str, Turn]:
    """Stream one answer; return its text and when it began."""
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True, "kvlingo": dial}
    said, first = "", None
    told: dict[str, Any] = {}
    started = time.perf_counter()
    headers = {"X-Conversation": conversation}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(chunk["error"]["message"])
            told = chunk.get("kvlingo") or told
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and first is None:
                first = time.perf_counter()
            said += piece
    assert first is not None, f"{model} said nothing"
    return said, Turn(
        mode, 1e3 * (first - started), fallback=told.get("fallback"), **{name: told[name] for name in TOLD}
    )


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Return medians by mode, and the ratio of each conversation's pair."""
    by_mode: dict[str, list[Turn]] = {}
    for turn in turns:
        by_mode.setdefault(turn.mode, []).append(turn)
    refused = next((turn.fallback for mode in ("translate", "ahead") for turn in by_mode[mode] if turn.fallback), None)
    if refused:
        raise SystemExit(f"a hand-over fell back: {refused}")
    if not all(turn.hops == 1 for mode in ("translate", "ahead") for turn in by_mode[mode]):
        raise SystemExit("an answer that should rest on a translation does not")
    times = {mode: [turn.first_token_ms for turn in found] for mode, found in by_mode.items()}
    return {
        "first_token_ms": {mode: statistics.median(found) for mode, found in times.items()},
        "ready_ms": statistics.median(turn.ready_ms or 0.0 for turn in by_mode["ahead"]),
        "ratios": {mode: ratio_of(times[mode], times["reprefill"]) for mode in ("translate", "ahead")},
    }


def ratio_of(times: list[float], reprefill: list[float]) -> dict[str, float]:
    """Return how many times longer a re-prefill took, over the conversations' pairs."""
    ratios = [b / a for a, b in zip(times, reprefill, strict=True)]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


if __name__ == "__main__":
    raise SystemExit(main())
