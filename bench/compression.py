"""What maps lose by becoming smaller: KL against bytes and products, on the real pair, written to results/compression.json.

    python -m bench.compression --direction smollm2-gemma --work DIR --out results/compression.json
    python -m bench.compression … --variants "store=int8;rank=256;text=160,mb=30;flops=0.3" --distill "flops=0.3" --minutes 5

DIR is where `bench.quality fit` and `distill` left their translators and statistics. Every variant is judged on the same held-out
hand-overs as the whole translator, pairwise. A variant is a list of what `kvlingo compress` takes: rank, text (features of an
embedding), mb, flops (share of the products), store, weigh.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.corpora import held_out_and_training
from bench.quality import DISTILL, finish, fit_options, models, tell, training_documents
from kvlingo.calibration import map_weights, read_cost
from kvlingo.collecting import load_statistics
from kvlingo.compression import CompressOptions, compress
from kvlingo.cost import mapped_flops
from kvlingo.distillation import distill
from kvlingo.environment import environment_card
from kvlingo.evaluation import EvaluationOptions, choose_examples, judge
from kvlingo.judging import native_logits, translated_logits
from kvlingo.language_model import LanguageModel, read
from kvlingo.metrics import DocumentScores, arm_ratios, cluster_bootstrap, estimates, paired_kl_ratio
from kvlingo.models import default_cache_dir
from kvlingo.sensitivity import measure_sensitivity, options_for
from kvlingo.stats import GramStats
from kvlingo.store import load_translator, pack, packed_bytes, unpack
from kvlingo.texts import Split, split_documents
from kvlingo.translator import Translator

VARIANTS = (
    "store=bfloat16",
    "store=int8",
    *(f"rank={r}" for r in (256, 192, 128, 96, 64)),
    *(f"rank={r},weigh=deviation" for r in (256, 128)),
    *(f"text={t}" for t in (320, 160)),
    *(f"mb={m},store=bfloat16" for m in (40, 30, 20, 15, 10)),
    "mb=10,store=int8",
    *(f"flops={s}" for s in (0.5, 0.3, 0.2, 0.1)),
)
WHOLE = "whole"
TOKENS = 2048


def main() -> None:
    """Compress, judge, and write the record."""
    arguments = parse()
    source, target = models(arguments, "float32")
    whole, _ = load_translator(arguments.work / arguments.start, source=source, target=target)
    stats = load_statistics(source, target, fit_options(arguments), arguments.work / "statistics")
    if stats is None:
        sys.exit("no statistics of this pair: run bench.quality's fit step first")
    minds = minded(arguments, whole)
    made: dict[str, Translator] = {WHOLE: whole}
    told: dict[str, dict[str, Any]] = {WHOLE: size_of(whole, target, "float32")}
    for words in arguments.variants.split(";"):
        made[words], told[words] = variant(whole, target, stats, minds, words)
    if arguments.distill:
        for words in arguments.distill.split(";"):
            name = f"{words}, distilled"
            made[name], told[name] = distilled(arguments, made[words], source, target, stats, told[words])
    del stats
    rows = {
        str(length): judged(source, target, made, told, length, arguments)
        for length in map(int, arguments.lengths.split(","))
    }
    record = {
        "benchmark": "KL of compressed maps to native, and its paired difference to that of the whole ones",
        "pair": {"source": source.name, "target": target.name},
        "start": arguments.start,
        "documents": arguments.documents,
        "variants": told,
        "lengths": rows,
        "environment": environment_card(),
    }
    finish(arguments, record)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("smollm2-gemma", "gemma-smollm2"), default="smollm2-gemma")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--start", default="distilled", help="which translator of DIR to compress")
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--gemma", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--variants", default=";".join(VARIANTS))
    parser.add_argument("--distill", help="variants to distil, separated by ;")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lengths", default="192,1024")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def minded(arguments: argparse.Namespace, whole: Translator) -> dict[int, Tensor]:
    """Measure what the target minds, on training text, in the dtype that training runs in."""
    source, target = models(arguments, quick_dtype())
    options = options_for(fit_options(arguments))
    training = split_as_trained(arguments).training
    return measure_sensitivity(whole, source, target, training, options, progress=tell)


def quick_dtype() -> str:
    """Return the dtype that training runs in on this machine."""
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def split_as_trained(arguments: argparse.Namespace) -> Split:
    """Split the training text as `bench.quality` does."""
    options = fit_options(arguments)
    return split_documents(training_documents(arguments), held_out_share=options.held_out_share, seed=options.seed)


def variant(
    whole: Translator, target: LanguageModel, stats: GramStats, minds: Mapping[int, Tensor], words: str
) -> tuple[Translator, dict[str, Any]]:
    """Make one variant, as it comes back from disk, and say how small it is and what was chosen."""
    given = dict(part.split("=") for part in words.split(","))
    storage: Any = given.get("store", "float32")
    budgets: dict[str, Any] = {
        "rank": int(given["rank"]) if "rank" in given else None,
        "budget_bytes": round(1e6 * float(given["mb"])) if "mb" in given else None,
        "flops_share": float(given["flops"]) if "flops" in given else None,
    }
    if all(value is None for value in budgets.values()):
        budgets["budget_bytes"] = 10**12  # everything fits: only the text's features, or how weights are stored
    text_rank = int(given["text"]) if "text" in given else None
    options = CompressOptions(text_rank=text_rank, tokens=TOKENS, storage=storage, **budgets)
    small = compress(whole, stats, options, None if given.get("weigh") == "deviation" else minds)
    stored = Translator(small.translator.config)
    stored.load_state_dict(unpack(pack(small.translator, storage)))
    stored.multiply_in_bfloat16(storage != "float32")  # as what is loaded does
    config = small.translator.config
    chosen = {"text_rank": config.text_rank, "ranks": config.ranks, "lost_share": small.to_json()["lost_share"]}
    tell(f"made {words}", 1, 1)
    return stored.eval(), size_of(stored, target, storage) | chosen


def size_of(translator: Translator, target: LanguageModel, storage: Any) -> dict[str, Any]:
    """Say what a translator takes on disk, and in products for a token of a conversation, windows counted."""
    flops = mapped_flops(read_cost(target), map_weights(translator), TOKENS) / TOKENS
    return {"bytes": packed_bytes(translator.config, storage), "storage": storage, "mflop_per_token": flops / 1e6}


def distilled(
    arguments: argparse.Namespace,
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    stats: GramStats,
    known: Mapping[str, Any],
) -> tuple[Translator, dict[str, Any]]:
    """Distil a compressed translator for a few minutes, in the dtype that training runs in."""
    quick_source, quick_target = models(arguments, quick_dtype())
    split = split_as_trained(arguments)
    small = Translator(translator.config)
    small.load_state_dict(translator.state_dict())
    done = distill(
        small.requires_grad_(True),
        quick_source,
        quick_target,
        split.training,
        split.held_out,
        stats,
        replace(DISTILL, minutes=arguments.minutes),
        report=lambda fact: print(json.dumps(fact), file=sys.stderr, flush=True),
    )
    curve = {"steps": done.steps, "best_step": done.best_step, "held_out_kl_nats": done.curve.held_out_kl_nats}
    return done.translator, {**known, "distill": curve}


@torch.no_grad()
def judged(
    source: LanguageModel,
    target: LanguageModel,
    made: Mapping[str, Translator],
    told: Mapping[str, Mapping[str, Any]],
    length: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return each variant's KL and how much it is above the whole translator's, over the same hand-overs."""
    options = EvaluationOptions(context_tokens=length, documents=arguments.documents)
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    chosen = choose_examples(documents, source, target, options)
    scores = []
    for number, example in enumerate(chosen, start=1):
        native, follow = native_logits(target, example), target.ids(example.continuation)
        source_kv = read(source, source.ids(example.source.ids))
        arms = {
            name: judge(native, translated_logits(by, target, example, source_kv, tail=1), follow)
            for name, by in made.items()
        }
        scores.append(DocumentScores(example.cluster, example.kind, len(example.continuation_text.encode()), arms))
        tell(f"judging at {length} tokens", number, len(chosen))
    return table(scores, list(made))


def table(scores: Sequence[DocumentScores], names: Sequence[str]) -> dict[str, Any]:
    """Return KL, agreement and the paired difference of KL with intervals for each variant."""
    weights = cluster_bootstrap([s.cluster for s in scores])
    whole = estimates({"kl_nats": arm_ratios(scores, WHOLE)["kl_nats"]}, weights)["kl_nats"]
    assert whole is not None
    rows = {}
    for name in names:
        ratios = arm_ratios(scores, name)
        wanted = {"kl_nats": ratios["kl_nats"], "top1_agreement": ratios["top1_agreement"]}
        wanted["above_whole_nats"] = paired_kl_ratio(scores, name, WHOLE)
        found: dict[str, Any] = dict(estimates(wanted, weights))
        above = found["above_whole_nats"]
        found["above_whole_share"] = None if above is None else above["mean"] / whole["mean"]
        rows[name] = found
    return rows


if __name__ == "__main__":
    main()
