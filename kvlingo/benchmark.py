"""Time to a target's first token, by every arm and at every length, beside what the arithmetic says: `kvlingo bench`.

Knows clocks, rates and the arms. Runs of all arms are interleaved, the first of each is dropped; beyond the longest conversation
that is really read, what reads all of it is predicted, and said to be.
"""

from __future__ import annotations

import gc
import hashlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvlingo.arms import ARMS, READS_ALL, SHORTEST, Arm, Case, Dial, Pair, apply_alone, stage
from kvlingo.calibration import (
    HANDED_TOKENS,
    REPEATS,
    handoff_cost,
    measure_rates,
    measure_reading,
    median_s,
    read_cost,
    time_products,
)
from kvlingo.environment import available_bytes, environment_card
from kvlingo.errors import BadInput
from kvlingo.folding import product_dtype
from kvlingo.forecast import Forecast, Work
from kvlingo.jobs import Where, gather, load_pair
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import WeightsCard
from kvlingo.plots import draw_times, empty_figure
from kvlingo.public_shapes import (
    MapShape,
    bytes_needed,
    empty_translator,
    maps_bytes,
    place_of,
    random_model,
    random_translator,
    refuse_what_does_not_fit,
    shape_config,
    shape_outline,
)
from kvlingo.states import refuse_changed_angles
from kvlingo.store import WEIGHTS_FILE, load_translator, pack, unpack, verify_weights
from kvlingo.timing import CHARS_PER_TOKEN, fastest_pieces, joined, peak_extra_bytes, timed_ms
from kvlingo.translator import Translator, TranslatorConfig

Tell = Callable[[str], None]
UNTRAINED = (
    "random weights in public shapes and random maps: timing needs no trained weights, and nothing is said of quality"
)


@dataclass(frozen=True)
class BenchOptions:
    """What to time.

    Fields:
        lengths: of conversations, in target tokens.
        repeats: runs of each arm that count, after one that does not.
        reprefill_up_to: the longest conversation that is really read; beyond it what reads all of it is predicted.
        arms: which to time; empty for all.
    """

    lengths: tuple[int, ...]
    repeats: int = 5
    reprefill_up_to: int = 8192
    arms: tuple[str, ...] = ()
    dial: Dial = field(default_factory=Dial)
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.arms if name not in ARMS]
        if unknown:
            raise BadInput(f"unknown arm {unknown[0]!r}; there are {', '.join(ARMS)}")
        least = max(SHORTEST, self.dial.sink + self.dial.tail + 1)
        if not self.lengths or min(self.lengths) < least:
            raise BadInput(
                f"the shortest length is {min(self.lengths, default=0)} tokens; give lengths of {least} or more"
            )

    @property
    def timed(self) -> tuple[str, ...]:
        """Return the arms to time, in order."""
        return tuple(name for name in ARMS if not self.arms or name in self.arms)


# --- from names to figures -------------------------------------------------------------------------------------------


def bench_folder(
    source_name: str,
    target_name: str,
    folder: Path,
    options: BenchOptions,
    *,
    texts: Sequence[Path],
    where: Where,
    picture: Path | None,
    tell: Tell,
) -> dict[str, Any]:
    """Time a saved translator between the models it belongs to."""
    refuse_picture(picture)
    text = joined(gather(texts), max(options.lengths) * CHARS_PER_TOKEN)
    source, target = load_pair(source_name, target_name, where)

    def load() -> Translator:
        return load_translator(folder, source=source, target=target)[0].to(target.device)

    pair = Pair(source, target, load(), load, text)
    kind = {"kind": pair.translator.config.map_kind, "rank": pair.translator.config.rank or None}
    return finished(run_benchmark(pair, options, tell), kind, "as they were fitted", None, picture)


def bench_shapes(
    source_name: str,
    target_name: str,
    maps: MapShape,
    options: BenchOptions,
    *,
    where: Where,
    picture: Path | None,
    tell: Tell,
) -> dict[str, Any]:
    """Time random maps between models of public shapes with random weights, if they fit the memory."""
    device, dtype = place_of(where.device, where.dtype)
    configs = {name: shape_config(name) for name in (source_name, target_name)}
    refuse_early(configs, maps, options, (source_name, target_name), device, dtype)
    refuse_picture(picture)
    tell(UNTRAINED)
    source, target = (
        random_model(name, configs[name], device=device, dtype=dtype, seed=options.seed + i)
        for i, name in enumerate((source_name, target_name))
    )
    config = maps.config(source, target)  # with rotations, which an outline does not know
    translator = random_translator(config, maps.kind, options.seed).to(device)
    with on_disk(translator, config, maps, device) as load:
        record = run_benchmark(Pair(source, target, translator, load), options, tell)
    kind = {"kind": maps.kind, "rank": config.rank or None}
    return finished(record, kind, "random, in public shapes", UNTRAINED, picture)


def refuse_early(
    configs: Mapping[str, dict[str, Any]],
    maps: MapShape,
    options: BenchOptions,
    names: tuple[str, str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise `BadInput` for shapes that don't fit the memory, or are too short for the lengths; nothing is allocated yet."""
    source, target = (shape_outline(name, configs[name]) for name in names)
    config = maps.config(source, target)
    longest = max(options.lengths)
    for side in (source, target):
        refuse_long(side.name, side.geometry.max_positions, longest)
    needed = bytes_needed(
        source,
        target,
        maps_bytes(config, maps.kind),
        tokens=longest,
        read_tokens=min(longest, options.reprefill_up_to),
        bytes_per_value=dtype.itemsize,
    )
    refuse_what_does_not_fit(needed, available_bytes(device), names)


def refuse_long(name: str, room: int | None, longest: int) -> None:
    """Raise `BadInput` for a length that a model does not read."""
    if room is not None and longest > room:
        raise BadInput(f"{name} reads {room:,} tokens, the longest length is {longest:,}; give shorter --lengths")


def refuse_picture(file: Path | None) -> None:
    """Raise an error now, and not after an hour's measuring, where a picture can't be drawn."""
    if file is not None:
        empty_figure()
        if not file.parent.is_dir():
            raise BadInput(f"{file.parent} is no folder; give --picture a place in one that is there")


@contextmanager
def on_disk(
    translator: Translator, config: TranslatorConfig, maps: MapShape, device: torch.device
) -> Iterator[Callable[[], Translator]]:
    """Save random maps to a temporary folder; give what loads them as a saved translator is loaded, hash and all."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / WEIGHTS_FILE
        save_file(pack(translator, "float32"), file)
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        card = WeightsCard(digest, file.stat().st_size, "float32")

        def load() -> Translator:
            verify_weights(file, card)
            empty = empty_translator(config, maps.kind)
            empty.load_state_dict(unpack(load_file(file)))
            return empty.to(device)

        yield load


def finished(
    record: dict[str, Any], maps: dict[str, Any], weights: str, note: str | None, picture: Path | None
) -> dict[str, Any]:
    """Say what was timed, and draw it where asked."""
    whole = {**record, "weights": weights, "note": note, "maps": {**maps, **record["maps"]}}
    if picture is not None:
        draw_times(whole, picture)
    return whole


# --- timing ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_benchmark(pair: Pair, options: BenchOptions, tell: Tell) -> dict[str, Any]:
    """Calibrate, then time every arm at every length; return one record."""
    for side in (pair.source, pair.target):
        refuse_long(side.name, side.geometry.max_positions, max(options.lengths))
        refuse_changed_angles(side, max(options.lengths))
    forecast = calibrated(pair, options, tell)
    rows = []
    for length in sorted(set(options.lengths)):
        rows.append(at_length(pair, length, options, forecast))
        tell(told(rows[-1]))
    return {
        "benchmark": "time to first token, from what is held before a switch to the logits of the next token",
        "pair": {"source": pair.source.name, "target": pair.target.name},
        "maps": {
            "weights": sum(forecast.handoff.map_weights),
            "bytes": forecast.maps_bytes,
            "dtype": str(next(pair.translator.parameters()).dtype).removeprefix("torch."),
            "products": str(product_dtype(pair.translator.maps, pair.target.dtype)).removeprefix("torch."),
        },
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.target.device.type,
        "attention": str(pair.target.model.config._attn_implementation),
        "tokens_are": "random" if pair.text is None else "text",
        "dial": asdict(options.dial),
        "repeats": options.repeats,
        "reprefill_up_to": options.reprefill_up_to,
        "rates": forecast.to_json(),
        "lengths": rows,
        "crossing_tokens": crossing(rows),
        "environment": environment_card(),
    }


def calibrated(pair: Pair, options: BenchOptions, tell: Tell) -> Forecast:
    """Measure the rates that everything is predicted from."""
    tell(f"measuring what reading costs {pair.source.name} and {pair.target.name}")
    source_reading, target_reading = (measure_reading(lm) for lm in (pair.source, pair.target))
    tell("measuring the maps")
    dial = options.dial
    handed = [
        handed_s(pair, length, options) for length in sorted({min(n, max(options.lengths)) for n in HANDED_TOKENS})
    ]
    rates = measure_rates(pair.target, pair.translator, handed, sink=dial.sink, tail=dial.tail, reading=target_reading)
    return Forecast(
        source=read_cost(pair.source),
        target=read_cost(pair.target),
        handoff=handoff_cost(pair.translator),
        source_reading=source_reading,
        target_reading=target_reading,
        maps=rates.maps,
        maps_bytes=sum(p.numel() * p.element_size() for p in pair.translator.parameters()),
        load_s=median_s(pair.load_maps, pair.target, 1),
        sink=dial.sink,
        tail=dial.tail,
    )


def handed_s(pair: Pair, length: int, options: BenchOptions) -> tuple[int, float]:
    """Return a conversation's tokens, and the median seconds of handing it over."""
    case = stage(pair, length, options.dial, really_read=False, seed=options.seed)
    return case.tokens, median_s(partial(case.hand, pair.translator, case.source_state), pair.target, REPEATS)


def at_length(pair: Pair, length: int, options: BenchOptions, forecast: Forecast) -> dict[str, Any]:
    """Time every arm at one length."""
    really_read = length <= options.reprefill_up_to
    case = stage(pair, length, options.dial, really_read=really_read, seed=options.seed)
    work = forecast.arms(case.tokens, case.new)
    chunk = fastest_pieces(case.pair.target, case.ids) if really_read and "reprefill" in options.timed else None
    arms = {name: ARMS[name](case, chunk) for name in options.timed if really_read or name not in READS_ALL}
    times, memory = timed_arms(arms, pair.target, options.repeats)
    found = {
        name: measured(times[name], memory[name], work[name]) if name in arms else predicted(work[name])
        for name in options.timed
    }
    return {
        "length": length,
        "tokens": case.tokens,
        "new_tokens": case.new,
        "caches": "read" if really_read else "filled at random",
        "reprefill_chunk": chunk,
        "target_cache_bytes": cache_bytes(pair.target, case.tokens),
        "arms": found,
        **speedups(found),
        "apply": apply_rate(case, forecast),
    }


def cache_bytes(lm: LanguageModel, tokens: int) -> int:
    """Return what a cache of so many tokens takes at least: of a sliding layer its window."""
    held = ((tokens - layer.first_held(tokens)) * layer.width for layer in lm.geometry.layers)
    return sum(held) * lm.dtype.itemsize


def timed_arms(
    arms: Mapping[str, Arm], lm: LanguageModel, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Return the milliseconds of every run, and the memory that the dropped first run of each arm took.

    Each round runs every arm once, and begins with another arm than the round before: what is slow for a while slows all alike.
    """
    names = list(arms)
    memory = {name: peak_extra_bytes(partial(arms[name].run, arms[name].prepare()), lm) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats):
        for name in (*names[round_ % len(names) :], *names[: round_ % len(names)]) if names else ():
            prepared = arms[name].prepare()
            gc.collect()
            times[name].append(timed_ms(partial(arms[name].run, prepared), lm))
    return times, memory


def measured(runs_ms: Sequence[float], peak: int | None, work: Work) -> dict[str, Any]:
    """Return an arm's figures."""
    return {
        "measured": True,
        "median_ms": statistics.median(runs_ms),
        "predicted_error": 1e3 * work.seconds / statistics.median(runs_ms) - 1,
        "p90_ms": percentile(runs_ms, 0.9),
        "runs_ms": list(runs_ms),
        "peak_extra_bytes": peak,
        "predicted": work.to_json(),
    }


def predicted(work: Work) -> dict[str, Any]:
    """Return the figures of an arm that was not run: its time is the calibrated model's, and says so."""
    return {
        "measured": False,
        "median_ms": 1e3 * work.seconds,
        "predicted_error": None,
        "p90_ms": None,
        "runs_ms": [],
        "peak_extra_bytes": None,
        "predicted": work.to_json(),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of all lies, between two values in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def speedups(arms: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many times sooner the first token is there than by a re-prefill; None where an arm was left out."""
    again = arms.get("reprefill")

    def over(name: str) -> float | None:
        return again["median_ms"] / arms[name]["median_ms"] if again and name in arms else None

    return {
        "speedup_warm": over("translate_warm"),
        "speedup_cold": over("translate_cold"),
        "speedup_ahead": over("translate_ahead"),
        "speedup_from": None if again is None else "measured" if again["measured"] else "predicted re-prefill",
    }


def apply_rate(case: Case, forecast: Forecast) -> dict[str, Any]:
    """Return the apply's rate beside the machine's own for the same products.

    The apply is everything from the source's cache to the target's; its rate counts the maps' FLOPs only.
    """
    target, translator = case.pair.target, case.pair.translator
    middle = max(case.tokens - case.dial.sink - case.dial.tail, 0)
    seconds = median_s(apply_alone(case), target, REPEATS)
    flops, bare_s = time_products(translator, target, middle)
    return {
        "ms": 1e3 * seconds,
        "flops": flops,
        "gflops_per_s": flops / seconds / 1e9,
        "gemm_ms": 1e3 * bare_s,
        "gemm_gflops_per_s": flops / bare_s / 1e9 if bare_s else None,
        "share_of_gemm_rate": bare_s / seconds,
    }


def crossing(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the length at which translating begins to be faster than a re-prefill, between two lengths on log-log paper.

    None where it is faster at all lengths, or not for good at the longest.
    """
    ratios = [(row["tokens"], row["speedup_warm"]) for row in rows if row["speedup_warm"] is not None]
    for (n0, r0), (n1, r1) in reversed(list(pairwise(ratios))):
        if r1 < 1:
            return None
        if r0 < 1:
            share = -math.log(r0) / (math.log(r1) - math.log(r0))
            return math.exp(math.log(n0) + share * (math.log(n1) - math.log(n0)))
    return None


def told(row: Mapping[str, Any]) -> str:
    """Return one length in words."""
    times = ", ".join(
        f"{name.replace('_', ' ')} {'' if arm['measured'] else '~'}{arm['median_ms']:.1f} ms"
        for name, arm in row["arms"].items()
    )
    return f"{row['tokens']:,} tokens: {times}"
