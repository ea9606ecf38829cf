"""Time a target's first token with mlx-lm, by a hand-over and by reading everything again: `kvlingo bench --engine mlx`.

Knows clocks and the ways to a first token in MLX. Everything is measured, nothing predicted; runs of all arms are interleaved and
the first of each is dropped, as in `benchmark`.
"""

from __future__ import annotations

import copy
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from kvlingo.arms import Pair, random_reading
from kvlingo.benchmark import (
    UNTRAINED,
    BenchOptions,
    crossing,
    finished,
    percentile,
    refuse_early,
    refuse_picture,
    speedups,
    told,
)
from kvlingo.environment import environment_card, installed_version
from kvlingo.errors import BadInput, UnsupportedModel
from kvlingo.jobs import Where, gather
from kvlingo.mlx import (
    MlxModel,
    MlxTranslator,
    check_models,
    full_prompt_cache,
    hand_off,
    load,
    native_prompt_cache,
    read,
    wrap,
)
from kvlingo.mlx import core as mx
from kvlingo.mlx_models import hoisted
from kvlingo.plan import reprefill_plan
from kvlingo.public_shapes import MapShape, random_translator, shape_config
from kvlingo.reading import Reading
from kvlingo.states import WHY_READ, ModelState, read_conversation
from kvlingo.store import load_translator
from kvlingo.timing import CHARS_PER_TOKEN, cut, joined
from kvlingo.translator import HeadwiseMap, LayerMap, Translator

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
MLX_ARMS = ("reprefill", "translate_warm", "source_and_translate", "decode_step")
NOT_CHECKED = "a translator knows its models by PyTorch's weights: that these are the same ones is not checked here"
Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class MlxPair:
    """Two models of mlx-lm, the maps between them, and a long text to cut conversations from; None for random ids."""

    source: MlxModel
    target: MlxModel
    translator: Translator
    maps: MlxTranslator
    text: str | None


@dataclass(frozen=True, eq=False)
class MlxCase:
    """What is there before a switch at one length.

    Fields:
        conversation, reading: the text, which every run tokenises; or the random ids.
        state: what the source has read; `nearly` is the target's prompt cache of all but the last token.
    """

    pair: MlxPair
    options: BenchOptions
    conversation: str
    reading: Reading | None
    ids: tuple[int, ...]
    state: ModelState
    nearly: list[Any]

    def read_again(self) -> tuple[int, ...]:
        """Return the target's ids, from the text where there is one."""
        return (self.reading or reading_of(self.conversation, self.pair.target, prompt=True)).ids


# --- from names to figures -------------------------------------------------------------------------------------------


def bench_mlx_folder(
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
    """Time a saved translator between two models that mlx-lm loads."""
    refuse_options(options)
    refuse_picture(picture)
    text = joined(gather(texts), max(options.lengths) * CHARS_PER_TOKEN)
    choose_device(where.device)
    translator, _ = load_translator(folder)
    source, target = (in_dtype(load(name), where.dtype) for name in (source_name, target_name))
    check_models(translator.config, source, target)
    tell(NOT_CHECKED)
    pair = MlxPair(source, target, translator, MlxTranslator(translator, target), text)
    kind = {"kind": translator.config.map_kind, "rank": translator.config.rank or None}
    return finished(run_mlx(pair, options, tell), kind, "as they were fitted", NOT_CHECKED, picture)


def bench_mlx_shapes(
    source_name: str,
    target_name: str,
    maps: MapShape,
    options: BenchOptions,
    *,
    where: Where,
    picture: Path | None,
    tell: Tell,
) -> dict[str, Any]:
    """Time random maps between models of public shapes with random weights."""
    refuse_options(options)
    refuse_picture(picture)
    choose_device(where.device)
    name = where.dtype or ("float32" if mx.default_device() == mx.cpu else "bfloat16")
    configs = {each: shape_config(each) for each in (source_name, target_name)}
    refuse_early(configs, maps, options, (source_name, target_name), torch.device("cpu"), torch_dtype(name))
    tell(UNTRAINED)
    source, target = (
        random_mlx_model(each, configs[each], DTYPES[name], options.seed + i)
        for i, each in enumerate((source_name, target_name))
    )
    config = maps.config(source, target)
    translator = columns_alike(random_translator(config, maps.kind, options.seed))
    pair = MlxPair(source, target, translator, MlxTranslator(translator, target), None)
    kind = {"kind": maps.kind, "rank": config.rank or None}
    return finished(run_mlx(pair, options, tell), kind, "random, in public shapes", UNTRAINED, picture)


def refuse_options(options: BenchOptions) -> None:
    """Raise `BadInput` for what only the other engine times or predicts."""
    unknown = [name for name in options.arms if name not in MLX_ARMS]
    if unknown:
        raise BadInput(f"--engine mlx has no arm {unknown[0]}; there are {', '.join(MLX_ARMS)}")
    if max(options.lengths) > options.reprefill_up_to:
        raise BadInput(
            f"--engine mlx measures everything, up to {options.reprefill_up_to:,} tokens; "
            "give shorter --lengths, or raise --reprefill-up-to"
        )


def choose_device(name: str | None) -> None:
    """Let MLX compute on the CPU or the GPU; None: where it does by itself."""
    if name is None:
        return
    if name not in ("cpu", "gpu"):
        raise BadInput(f"unknown device {name!r} for --engine mlx; use cpu or gpu")
    if name == "gpu" and not mx.metal.is_available() and not mx.cuda.is_available():
        raise BadInput("no GPU that this build of MLX can use; leave --device out, or use cpu")
    mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)


def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype of PyTorch by its name. Raises `BadInput` for one that MLX models are not run in."""
    if name not in DTYPES:
        raise BadInput(f"unknown dtype {name!r}; use {', '.join(DTYPES)}")
    return cast("torch.dtype", getattr(torch, name))


def in_dtype(lm: MlxModel, name: str | None) -> MlxModel:
    """Return a model in another dtype; None: as it was saved."""
    if name is None:
        return lm
    torch_dtype(name)
    lm.model.set_dtype(DTYPES[name])
    return wrap(lm.model, lm.tokenizer, name=lm.name, embedding_scale=lm.embedding_scale)


def random_mlx_model(name: str, config: Mapping[str, Any], dtype: Any, seed: int) -> MlxModel:
    """Make a model of a shape with random weights; it has no tokenizer."""
    try:
        family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    except ImportError as error:
        raise UnsupportedModel(f"mlx-lm has no models of kind {config['model_type']}, which {name} is") from error
    mx.random.seed(seed)
    model = family.Model(family.ModelArgs.from_dict({**config, **hoisted(config)}))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return wrap(model, None, name=name)


def columns_alike(translator: Translator) -> Translator:
    """Write maps that were drawn for timing, keys from keys and values from values, as headwise ones of one head."""
    for layer_map in translator.maps.values():
        assert isinstance(layer_map, LayerMap)
        split: Any = layer_map.linear
        if not hasattr(split, "inputs"):
            continue
        of_keys, of_values = split.inputs
        keys, values = torch.arange(of_keys)[None], torch.arange(of_keys, of_keys + of_values)[None]
        linear = HeadwiseMap(keys, values, split.key_weight.shape[1], split.value_weight.shape[1])
        linear.key_weight, linear.value_weight = (
            torch.nn.Parameter(weight.detach()[None]) for weight in (split.key_weight, split.value_weight)
        )
        layer_map.linear = linear
    return translator


# --- timing ----------------------------------------------------------------------------------------------------------


def run_mlx(pair: MlxPair, options: BenchOptions, tell: Tell) -> dict[str, Any]:
    """Time every arm at every length; return one record."""
    rows = []
    for length in sorted(set(options.lengths)):
        rows.append(at_length(pair, length, options))
        tell(told(rows[-1]))
    weights = sum(p.numel() for p in pair.translator.parameters())
    return {
        "benchmark": "time to first token, from what is held before a switch to the logits of the next token",
        "engine": "mlx",
        "pair": {"source": pair.source.name, "target": pair.target.name},
        "maps": {"weights": weights, "bytes": 4 * weights, "dtype": "float32"},
        "dtype": str(pair.target.dtype).removeprefix("mlx.core."),
        "device": "gpu" if mx.default_device() == mx.gpu else "cpu",
        "attention": "mlx fast",
        "tokens_are": "random" if pair.text is None else "text",
        "dial": asdict(options.dial),
        "repeats": options.repeats,
        "reprefill_up_to": options.reprefill_up_to,
        "rates": None,
        "lengths": rows,
        "crossing_tokens": crossing(rows),
        "environment": environment_card() | {name: installed_version(name) for name in ("mlx", "mlx-lm")},
    }


def at_length(pair: MlxPair, length: int, options: BenchOptions) -> dict[str, Any]:
    """Time every arm at one length."""
    case = stage_mlx(pair, length, options)
    arms = {name: partial(WAYS[name], case) for name in MLX_ARMS if name in options.timed}
    memory = {name: peak_bytes(run) for name, run in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for round_ in range(options.repeats):
        for name in (*names[round_ % len(names) :], *names[: round_ % len(names)]):
            gc.collect()
            times[name].append(arms[name]())
    found = {name: measured(times[name], memory[name]) for name in names}
    return {
        "length": length,
        "tokens": len(case.ids),
        "caches": "read",
        "arms": found,
        **speedups(found),
        "apply": None,
    }


def measured(runs_ms: Sequence[float], peak: int | None) -> dict[str, Any]:
    """Return an arm's figures."""
    return {
        "measured": True,
        "median_ms": statistics.median(runs_ms),
        "p90_ms": percentile(runs_ms, 0.9),
        "runs_ms": list(runs_ms),
        "peak_extra_bytes": peak,
        "predicted": None,
    }


def peak_bytes(run: Callable[[], float]) -> int | None:
    """Return how far MLX's own memory rises during a call."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return max(int(mx.get_peak_memory()) - int(before), 0)


def stage_mlx(pair: MlxPair, length: int, options: BenchOptions) -> MlxCase:
    """Make what is there before a switch. Raises `BadInput` where the hand-over is a re-prefill: its time would say nothing."""
    like_pair = cast("Pair", pair)  # only geometries and tokenizers are looked at
    if pair.text is None:
        conversation, reading = "", random_reading(like_pair, length, options.seed)
        source_reading = target_reading = reading
    else:
        conversation = cut(pair.text, like_pair.source, like_pair.target, length)
        source_reading = reading_of(conversation, pair.source, prompt=False)
        target_reading = reading_of(conversation, pair.target, prompt=True)
        reading = None
    cache = full_prompt_cache(pair.source)
    read(pair.source, source_reading.ids, cache)
    state = ModelState(source_reading, cache, reprefill_plan(len(source_reading), WHY_READ).spans)
    nearly = native_prompt_cache(pair.target)
    read(pair.target, target_reading.ids[:-1], nearly)
    case = MlxCase(pair, options, conversation, reading, target_reading.ids, state, nearly)
    fallback = hand(case, state).plan.fallback
    if fallback:
        raise BadInput(f"{pair.source.name} → {pair.target.name} can't be timed: {' '.join(fallback.split())}")
    return case


def reading_of(conversation: str, lm: MlxModel, *, prompt: bool) -> Reading:
    """Render a text as a model reads it."""
    return read_conversation(conversation, cast("Any", lm), add_generation_prompt=prompt)


def hand(case: MlxCase, state: ModelState) -> Any:
    """Hand a case's conversation over."""
    pair, dial = case.pair, case.options.dial
    return hand_off(
        case.conversation,  # not read where there is a reading
        pair.source,
        pair.target,
        pair.maps,
        sink=dial.sink,
        tail=dial.tail,
        source_state=state,
        reading=case.reading,
    )


def timed(run: Callable[[], Any]) -> float:
    """Return how long a call takes, in milliseconds, until its logits are there."""
    mx.synchronize()
    started = time.perf_counter()
    mx.eval(run())
    return 1e3 * (time.perf_counter() - started)


def reprefill(case: MlxCase) -> float:
    """Read everything again: what a hand-over is compared with."""
    target = case.pair.target
    return timed(lambda: read(target, case.read_again(), native_prompt_cache(target)))


def translate_warm(case: MlxCase) -> float:
    """Translate with maps and the source's cache in memory."""

    def run() -> Any:
        handed = hand(case, case.state)
        return read(case.pair.target, handed.rest, handed.cache)

    return timed(run)


def source_and_translate(case: MlxCase) -> float:
    """Let the source read first: what a first contact costs."""

    def run() -> Any:
        cache = full_prompt_cache(case.pair.source)
        reading = case.state.reading if case.reading else reading_of(case.conversation, case.pair.source, prompt=False)
        read(case.pair.source, reading.ids, cache)
        handed = hand(case, ModelState(reading, cache, case.state.spans))
        return read(case.pair.target, handed.rest, handed.cache)

    return timed(run)


def decode_step(case: MlxCase) -> float:
    """Read one token after everything before it: no way to a first token is shorter."""
    cache = [forked(one) for one in case.nearly]
    mx.eval([(one.keys, one.values) for one in cache])
    return timed(lambda: read(case.pair.target, case.ids[-1:], cache))


def forked(cache: Any) -> Any:
    """Return a copy of a layer's cache that shares nothing: MLX's caches are written in place."""
    new = copy.copy(cache)
    new.keys, new.values = mx.array(cache.keys), mx.array(cache.values)
    return new


WAYS: dict[str, Callable[[MlxCase], float]] = {
    "reprefill": reprefill,
    "translate_warm": translate_warm,
    "source_and_translate": source_and_translate,
    "decode_step": decode_step,
}
