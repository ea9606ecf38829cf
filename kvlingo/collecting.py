"""Text becomes statistics: both models read it once, and sums of products are kept.

Knows examples, features and the file the sums are kept in. Does not know what is solved from them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kvlingo.corpus import Example, examples, require_examples
from kvlingo.language_model import LanguageModel, read_padded
from kvlingo.shapes import FitOptions, base_config, candidate_blocks, feature_names
from kvlingo.stats import GramStats, load_tensors, save_tensors
from kvlingo.texts import Document
from kvlingo.timing import give_back_memory
from kvlingo.translator import TranslatorConfig, dense, feature_blocks

Progress = Callable[[str, int, int], None]
SAVE_EVERY_SECONDS = 120.0
GIVE_BACK_EVERY = 8
"""Texts of many lengths leave freed memory in pieces that fit none of the next: kept, it would grow with the text."""


class Collector:
    """Streams examples through both models into statistics."""

    def __init__(
        self, source: LanguageModel, target: LanguageModel, config: TranslatorConfig, options: FitOptions
    ) -> None:
        self.source, self.target, self.config, self.options = source, target, config, options
        self.features = feature_names(config, options)

    def empty(self) -> GramStats:
        """Return statistics of no tokens, with every product that any choice may need."""
        config = self.config
        per_layer = [candidate_blocks(config, layer, self.options) for layer in range(len(config.target))]
        pairs = {(a, b) for blocks in per_layer for a in blocks for b in blocks}
        outputs = {f"target/{layer}": config.target.layers[layer].width for layer in range(len(config.target))}
        pairs |= {(a, f"target/{layer}") for layer, blocks in enumerate(per_layer) for a in blocks}
        dims = {name: config.width(name) for name in self.features} | outputs
        return GramStats(dims, pairs, tuple(outputs))

    def collect(
        self, documents: Sequence[Document], what: str, tokens: int, work_dir: Path | None, progress: Progress | None
    ) -> GramStats:
        """Read up to `tokens` target tokens of the documents; resume from `work_dir` if a run was cut short there."""
        stats, saved = self.empty(), SavedStats(work_dir, what, self.key(tokens), digest_of(documents))
        done = saved.restore(stats)
        try:
            for number, example in enumerate(self.pieces(documents, tokens), start=1):
                if number <= done:
                    continue
                stats.add(self.blocks(example))
                done = number
                if number % GIVE_BACK_EVERY == 0:
                    give_back_memory()
                saved.maybe_save(stats, done)
                if progress is not None:
                    progress(f"reading {what} text", min(stats.tokens, tokens), tokens)
        except BaseException:
            if stats.is_whole:
                saved.save(stats, done)
            raise
        require_examples(range(stats.tokens), f"{min(self.options.context_tokens)} tokens for {what}")
        saved.save(stats, done)
        return stats

    def key(self, tokens: int) -> str:
        """Identify what the statistics of `tokens` tokens depend on, but for the texts."""
        facts = [self.source.fingerprint, self.target.fingerprint, tokens, asdict(self.options), "kinds in turn"]
        return json.dumps(facts, sort_keys=True, default=str)

    def pieces(self, documents: Sequence[Document], tokens: int) -> Iterator[Example]:
        """Yield the examples that are read until `tokens` tokens of them count: known before any model runs."""
        counted = 0
        for example in self._examples(documents):
            if counted >= tokens:
                return
            start, stop = counted_tokens(example)
            counted += stop - start
            yield example

    def _examples(self, documents: Sequence[Document]) -> Iterable[Example]:
        """Cut all documents: kinds in turn, and a kind's documents in turn.

        A token budget smaller than the text still sees every kind, and alike: not as many documents as each happens to have.
        """
        kinds: dict[str, list[Iterable[Example]]] = {}
        for number, document in enumerate(documents):
            cut = examples(
                [document],
                self.source.tokenizer,
                self.target.tokenizer,
                context_tokens=self.options.context_tokens,
                chat_share=self.options.chat_share,
                seed=self.options.seed + number,
            )
            kinds.setdefault(document.kind, []).append(cut)
        return interleave([interleave(streams) for streams in kinds.values()])

    def blocks(self, example: Example) -> dict[str, Tensor]:
        """Run both models over one example; return features and outputs of its ordinary tokens.

        Sinks are left out, and so is what the source has not read (the target's generation prompt): both are recomputed.
        """
        source_kv = read_padded(self.source, self.source.ids(example.source.ids))
        ids = self.target.ids(example.target.ids)
        target_kv = read_padded(self.target, ids)
        start, stop = counted_tokens(example)
        alignment = example.alignment[start:stop]
        features = feature_blocks(
            self.features,
            source=source_kv,
            alignment=alignment,
            embeddings=self.target.embed(ids) if self.config.reads_text else None,
            start=start,
        )
        found = {name: dense(block) for name, block in features.items()}
        for layer in range(len(self.config.target)):
            outputs = target_kv.flat(layer)[0][start:stop]
            found[f"target/{layer}"] = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return found


def counted_tokens(example: Example) -> tuple[int, int]:
    """Return which target tokens go into statistics, [first, last): no sinks, and nothing that the source has not read."""
    start = max(1, example.at_source_start)
    return start, max(start, int((example.alignment >= 0).sum()))


def interleave(streams: Sequence[Iterable[Example]]) -> Iterable[Example]:
    """Take one example of each stream in turn, until all are empty."""
    iterators = [iter(s) for s in streams]
    while iterators:
        alive = []
        for iterator in iterators:
            item = next(iterator, None)
            if item is not None:
                alive.append(iterator)
                yield item
        iterators = alive


def digest_of(documents: Sequence[Document]) -> str:
    """Identify texts, in their order, by content."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


class SavedStats:
    """Statistics on disk, written whole or not at all.

    Args:
        key: the pair and the options they belong to.
        documents: digest of the texts they were read from; None where any will do.
    """

    def __init__(self, folder: Path | None, what: str, key: str, documents: str | None = None) -> None:
        self.file = None if folder is None else folder / f"stats-{what}.safetensors"
        self.key, self.documents, self.saved_at = key, documents, time.monotonic()

    def restore(self, stats: GramStats) -> int:
        """Load into `stats`; return how many examples they hold (0 when there is nothing that fits)."""
        loaded = None if self.file is None else load_tensors(self.file)
        if loaded is None:
            return 0
        state, note = loaded
        other_texts = self.documents not in (None, note.get("documents", self.documents))
        if note["key"] != self.key or other_texts:
            return 0
        stats.load_state_dict(state)
        return int(note["examples"])

    def maybe_save(self, stats: GramStats, done: int) -> None:
        """Save when two minutes have passed."""
        if time.monotonic() - self.saved_at > SAVE_EVERY_SECONDS:
            self.save(stats, done)

    def save(self, stats: GramStats, done: int) -> None:
        """Save now."""
        if self.file is None:
            return
        note = {"key": self.key, "documents": self.documents, "examples": done}
        save_tensors(self.file, stats.state_dict(), note)
        self.saved_at = time.monotonic()


def load_statistics(
    source: LanguageModel, target: LanguageModel, options: FitOptions, work_dir: Path
) -> GramStats | None:
    """Return the training statistics that `fit` left in `work_dir`; None where there are none of this pair and options."""
    collector = Collector(source, target, base_config(source, target, options), options)
    saved = SavedStats(work_dir, "training", collector.key(options.tokens))
    stats = collector.empty()
    return stats if saved.restore(stats) else None
