"""Routers compared on what two models really answered: quality, cost and time of each, on questions with one right answer.

    python -m bench.routes --small DIR --big DIR --work DIR [--questions 240] [--kinds rooms,last_words] [--tasks DIR]
        [--out results/routes.json]

Both models are served by one in-process engine. Each question, with solved examples before it, is put to the small model and to
the big one, and one half of them to the router `token` over both (without a translator each reads what the other said), one after
the other, nothing kept from an earlier one. What they did is written to `--work` as the rows that `kvlingo route fit` and
`kvlingo route eval` take: one half is fitted on, the other compared on. Limits are the routers' own, and once more those that
send about half of the first half to the big model.

Questions are eight kinds written from a seed (sums, series, capitals, …), or with `--tasks` those of BIG-bench's files
(`bench/tasks.py`). Quality is 1 where the first line of an answer is the right one, else 0. Cost is GFLOPs by `cost.py`, of what
was read and said. Times are this machine's. JSON on the last line of stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import tasks
from bench.quality import finish, tell
from kvlingo.calibration import read_cost
from kvlingo.cost import TargetCost, pass_flops
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.models import load_model
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import AUTO, Begun, Done, Engine, Part, Piece, Request, Sampling
from kvlingo.serve.routing.choosing import Pair
from kvlingo.serve.routing.comparing import compare_file
from kvlingo.serve.routing.learning import fit_router
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.routing.token import Token

PAIR = Pair("small", "big")
PAIR_NAMES = (PAIR.small, PAIR.big)
ANSWER_TOKENS = 12
Solved = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True)
class Asked:
    """One prompt and the right answer to it."""

    kind: str
    prompt: str
    right: str


# --- questions -------------------------------------------------------------------------------------------------------

CAPITALS = """
France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, Austria Vienna, Poland Warsaw,
Norway Oslo, Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Ireland Dublin, Hungary Budapest, Russia Moscow,
Turkey Ankara, Egypt Cairo, Kenya Nairobi, Japan Tokyo, China Beijing, Thailand Bangkok, Vietnam Hanoi, Cuba Havana,
Peru Lima, Chile Santiago, Canada Ottawa, Ukraine Kyiv, Iran Tehran, Iraq Baghdad, Romania Bucharest, Bulgaria Sofia,
Belgium Brussels, Serbia Belgrade, Nepal Kathmandu, Morocco Rabat, Ghana Accra, Lebanon Beirut, Latvia Riga
"""
OPPOSITES = """
hot cold, big small, up down, left right, day night, black white, open closed, fast slow, early late, wet dry, hard
soft, full empty, rich poor, strong weak, happy sad, old young, high low, long short, heavy light, clean dirty, near
far, thick thin, wide narrow, deep shallow, loud quiet, cheap expensive, first last, always never, push pull, buy
sell, win lose, begin end, love hate, friend enemy, true false, inside outside, summer winter, north south
"""
PASTS = """
go went, see saw, eat ate, come came, take took, give gave, find found, think thought, buy bought, bring brought,
teach taught, catch caught, sing sang, drink drank, swim swam, run ran, write wrote, drive drove, ride rode, speak
spoke, break broke, steal stole, fly flew, grow grew, know knew, throw threw, draw drew, fall fell, feel felt, keep
kept, sleep slept, leave left, lose lost, make made, sell sold, tell told, stand stood, wear wore
"""
WORDS = """
river table green window seven garden paper horse silver music bread winter tower letter ocean candle forest bridge
"""


def facts(listed: str, question: str) -> list[Solved]:
    """Return one question for each pair of words in a list."""
    pairs = (each.split() for each in listed.split(","))
    return [(question.format(a), b) for a, b in pairs]


def sums(rng: random.Random) -> Solved:
    """Ask for a sum."""
    a, b = rng.randrange(10, 60), rng.randrange(2, 40)
    return f"What is {a} plus {b}?", str(a + b)


def products(rng: random.Random) -> Solved:
    """Ask for a product."""
    a, b = rng.randrange(2, 13), rng.randrange(2, 13)
    return f"What is {a} times {b}?", str(a * b)


def series(rng: random.Random) -> Solved:
    """Ask how a series goes on."""
    first, step = rng.randrange(1, 30), rng.randrange(2, 9)
    shown = ", ".join(str(first + i * step) for i in range(4))
    return f"What number comes next: {shown}?", str(first + 4 * step)


def last_words(rng: random.Random) -> Solved:
    """Ask for the last of some words."""
    shown = rng.sample(WORDS.split(), rng.randrange(3, 9))
    return f"What is the last word of this list: {' '.join(shown)}?", shown[-1]


def rooms(rng: random.Random) -> Solved:
    """Hide numbers in a list and ask for one of them."""
    names = rng.sample(WORDS.split(), 8)
    numbers = {name: rng.randrange(100, 1000) for name in names}
    asked = rng.choice(names)
    listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"Here is a list: {listed}. Which number stands after {asked}?", str(numbers[asked])


FACTS = {
    "capitals": facts(CAPITALS, "What is the capital of {}?"),
    "opposites": facts(OPPOSITES, "What is the opposite of {}?"),
    "pasts": facts(PASTS, "What is the past tense of {}?"),
}
MADE: Mapping[str, Callable[[random.Random], Solved]] = {
    f.__name__: f for f in (sums, products, series, last_words, rooms)
}


KINDS = (*MADE, *FACTS)


def write_questions(count: int, shots: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Asked]:
    """Write `count` questions, the kinds in turn, none twice; no question is its own example."""
    rng = random.Random(seed)
    each = -(-count // len(kinds))
    found: list[list[Asked]] = []
    for kind in kinds:
        pool = list(FACTS.get(kind, ())) or several(MADE[kind], each + shots, rng)
        if len(pool) < each + shots:
            raise BadInput(
                f"{len(pool)} {kind} are known, {each + shots} are needed; give fewer --questions or --shots"
            )
        rng.shuffle(pool)
        shown = pool[:shots]
        found.append([solved_before(kind, shown, one) for one in pool[shots : shots + each]])
    return [asked for row in zip(*found, strict=True) for asked in row][:count]


def several(make: Callable[[random.Random], Solved], count: int, rng: random.Random) -> list[Solved]:
    """Make questions until there are so many different ones."""
    made: dict[str, str] = {}
    while len(made) < count:
        question, answer = make(rng)
        made[question] = answer
    return list(made.items())


def solved_before(kind: str, shown: Sequence[Solved], one: Solved) -> Asked:
    """Put solved examples before a question."""
    examples = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shown)
    return Asked(kind, f"{examples}Question: {one[0]}\nAnswer:", one[1])


def kinds_of(named: str | None) -> tuple[str, ...]:
    """Read names of kinds, separated by commas; all of them where none is given. Raises `BadInput`."""
    kinds = tuple(named.split(",")) if named else KINDS
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BadInput(f"there is no kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    return kinds


def read_questions(arguments: argparse.Namespace) -> list[Asked]:
    """Return BIG-bench's questions where they are given, else written ones."""
    if arguments.tasks is None:
        return write_questions(arguments.questions, arguments.shots, arguments.seed, kinds_of(arguments.kinds))
    files = sorted(arguments.tasks.glob("*/task.json"))
    if not files:
        raise BadInput(f"{arguments.tasks} holds no folder with a task.json; give bigbench/benchmark_tasks")
    found = []
    for file in files:
        name, each = file.parent.name, -(-arguments.questions // len(files))
        for q in tasks.questions_of(name, tasks.read_task(file), each, arguments.shots, arguments.seed):
            found.append(Asked(name, q.context, q.choices[q.right].strip()))
    random.Random(arguments.seed).shuffle(found)
    return found[: arguments.questions]


def first_half(questions: Sequence[Asked]) -> list[bool]:
    """Tell which questions are fitted on: every other one of each kind."""
    seen: Counter[str] = Counter()
    found = []
    for asked in questions:
        found.append(seen[asked.kind] % 2 == 0)
        seen[asked.kind] += 1
    return found


def is_right(said: str, right: str) -> bool:
    """Tell whether the first line of an answer is the right one, but for case and a full stop."""
    line = said.strip().split("\n")[0].strip().rstrip(".")
    return line.casefold() == right.casefold()


# --- asking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What one arm did on one question."""

    said: str
    ms: float
    first_ms: float
    mean_logprob: float | None
    prompt_tokens: int
    done: Done


async def put(engine: Engine, model: str, prompt: str, tenant: str) -> Told:
    """Put one question, as somebody whom nobody else's cache serves."""
    sampling = Sampling(ANSWER_TOKENS, temperature=0.0, stop=("\n",), top_logprobs=0)
    began = time.perf_counter()
    events = [event async for event in engine.run(Request(model, prompt, sampling, tenant=tenant))]
    ms = 1e3 * (time.perf_counter() - began)
    pieces = [event for event in events if isinstance(event, Piece)]
    logprobs = [token.logprob for piece in pieces for token in piece.tokens]
    (begun,) = (event for event in events if isinstance(event, Begun))
    (done,) = (event for event in events if isinstance(event, Done))
    mean = statistics.fmean(logprobs) if logprobs else None
    return Told("".join(piece.text for piece in pieces), ms, done.ttft_ms, mean, begun.prompt_tokens, done)


async def put_all(
    engine: Engine, questions: Sequence[Asked], costs: Mapping[str, TargetCost], *, with_token: bool
) -> list[dict[str, Any]]:
    """Put each question to every arm, in an order that rotates; return the rows. What is fitted on needs no router's answer."""
    for name in (*PAIR_NAMES, AUTO):
        await put(engine, name, questions[0].prompt, "warm")
    rows = []
    for number, (asked, to_fit) in enumerate(zip(questions, first_half(questions), strict=True)):
        arms = (*PAIR_NAMES, AUTO) if with_token and not to_fit else PAIR_NAMES
        first = number % len(arms)
        told = {
            name: await put(engine, name, asked.prompt, f"{number}-{name}") for name in (*arms[first:], *arms[:first])
        }
        rows.append(row_of(asked, told, costs))
        if (number + 1) % 20 == 0:
            tell("putting questions", number + 1, len(questions))
    return rows


def row_of(asked: Asked, told: Mapping[str, Told], costs: Mapping[str, TargetCost]) -> dict[str, Any]:
    """Return a row as `route eval` takes it."""
    row: dict[str, Any] = {"prompt": asked.prompt}
    for name, each in told.items():
        parts = each.done.parts or (Part(name, each.done.completion_tokens, recomputed_tokens=each.prompt_tokens),)
        cost = sum(gflops(costs[part.model], part) for part in parts)
        row["token" if name == AUTO else name] = {
            "quality": float(is_right(each.said, asked.right)),
            "cost": round(cost, 3),
            "ms": round(each.ms, 1),
        }
        if name == AUTO:
            of_big = sum(part.completion_tokens for part in parts if part.model == PAIR.big)
            row["token"]["share_big"] = of_big / max(1, sum(part.completion_tokens for part in parts))
    small = told[PAIR.small]
    row[PAIR.small] |= {
        "mean_logprob": small.mean_logprob,
        "answer": small.said,
        "cut": small.done.finish_reason == "length",
    }
    return row


def gflops(cost: TargetCost, part: Part) -> float:
    """Return what one model computed: the prompt and what others said, and each token of its own with the output head."""
    said = part.completion_tokens
    read = part.recomputed_tokens + said
    return (pass_flops(cost, read) + 2.0 * cost.head_weights * said) / 1e9 if read else 0.0


# --- comparing -------------------------------------------------------------------------------------------------------


def report_on(rows: Sequence[Mapping[str, Any]], to_fit: Sequence[bool], work: Path, seed: int) -> dict[str, Any]:
    """Fit the learned router on one half, compare all of them on the other."""
    halves: dict[str, list[Mapping[str, Any]]] = {"fit": [], "eval": []}
    for row, fitted_on in zip(rows, to_fit, strict=True):
        halves["fit" if fitted_on else "eval"].append(row)
    files = {name: work / f"{name}.jsonl" for name in halves}
    for name, half in halves.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in half), encoding="utf-8")
    learned: Path | None = work / "router"
    try:
        fit: dict[str, Any] = fit_router(files["fit"], work / "router", big_share=None, seed=seed, overwrite=True)
    except BadInput as error:
        fit, learned = {"verdict": None, "reason": str(error)}, None
    limits = halving(halves["fit"])
    rules = work / "rules.toml"
    rules.write_text("".join(f"[{table}]\n{name} = {value}\n" for table, name, value in limits), encoding="utf-8")
    return {
        "fit": fit,
        "eval": compare_file(files["eval"], rules=None, learned=learned, seed=seed),
        "halving": {f"{table}.{name}": value for table, name, value in limits},
        "eval_halving": compare_file(files["eval"], rules=rules, learned=learned, seed=seed),
    }


def halving(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """Return limits that send about half of these rows to the big model."""
    length = statistics.median(len(row["prompt"]) for row in rows)
    known = [row["small"]["mean_logprob"] for row in rows if row["small"]["mean_logprob"] is not None]
    doubt = statistics.median(known) if known else -1.0
    return [("threshold", "question_chars", round(length)), ("cascade", "escalate_below", min(0.0, float(doubt)))]


def by_kind(questions: Sequence[Asked], rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the share of right answers by kind and arm, and how many there are."""
    counts = Counter(asked.kind for asked in questions)
    sums: dict[str, Counter[str]] = {kind: Counter() for kind in counts}
    for asked, row in zip(questions, rows, strict=True):
        sums[asked.kind].update({name: row[name]["quality"] for name in PAIR_NAMES})
    return {kind: {**{name: sums[kind][name] / n for name in PAIR_NAMES}, "questions": n} for kind, n in counts.items()}


def outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count who was right: what a router can win is where the big model alone was."""
    names = {(1.0, 1.0): "both", (1.0, 0.0): "small alone", (0.0, 1.0): "big alone", (0.0, 0.0): "neither"}
    counts = Counter(names[row["small"]["quality"], row["big"]["quality"]] for row in rows)
    return {name: counts[name] for name in names.values()}


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a person wants to see first."""
    yield f"right: {record['outcomes']}"
    for name in ("eval", "eval_halving"):
        for arm, figures in record[name]["arms"].items():
            shown = ", ".join(f"{figure} {figures[figure]['mean']:.3g}" for figure in ("quality", "cost", "ms"))
            yield f"{name}: {arm}: {shown}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, required=True, help="a model's folder or .gguf")
    parser.add_argument("--big", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where rows and the fitted router go")
    parser.add_argument("--questions", type=int, default=240)
    parser.add_argument("--shots", type=int, default=2, help="solved examples before each question")
    parser.add_argument("--tasks", type=Path, help="BIG-bench's benchmark_tasks, instead of written questions")
    parser.add_argument("--kinds", help=f"of written questions, separated by commas: {', '.join(KINDS)}")
    parser.add_argument(
        "--no-token", action="store_true", help="leave the router `token` out, which answers twice as long"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(told: list[str] | None = None) -> None:
    """Record, fit, compare; print one record."""
    arguments = parse(told)
    questions = read_questions(arguments)
    if all(first_half(questions)):
        raise BadInput(f"{len(questions)} questions leave none to compare on; give at least two of a kind")
    models = {name: load_model(getattr(arguments, name), dtype=arguments.dtype) for name in PAIR_NAMES}
    arguments.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    engine = LocalEngine(models, [], Limits(cache_bytes=64 << 20))
    costs = {name: read_cost(lm) for name, lm in models.items()}
    with_token = not arguments.no_token
    rows = asyncio.run(drained(engine, RoutedEngine(engine, Token(PAIR)), questions, costs, with_token=with_token))
    record = {
        "models": {name: lm.name for name, lm in models.items()},
        "options": {
            name: getattr(arguments, name) for name in ("questions", "kinds", "no_token", "shots", "dtype", "seed")
        },
        "questions_from": "BIG-bench" if arguments.tasks else "bench.routes",
        "by_kind": by_kind(questions, rows),
        "outcomes": outcomes(rows),
        "seconds": time.perf_counter() - began,
        "threads": torch.get_num_threads(),
        **report_on(rows, first_half(questions), arguments.work, arguments.seed),
        "environment": environment_card(),
    }
    for line in lines(record):
        tell(line, len(rows), len(questions))
    finish(arguments, json.loads(json.dumps(record, allow_nan=False)))


async def drained(engine: LocalEngine, routed: Engine, *work: Any, with_token: bool) -> list[dict[str, Any]]:
    """Put all questions, then end the engine's workers."""
    try:
        return await put_all(routed, *work, with_token=with_token)
    finally:
        await engine.drain(0.0)


if __name__ == "__main__":
    main()
