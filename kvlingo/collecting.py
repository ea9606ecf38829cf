"""Text becomes statistics: both models read it once, and sums of products are kept.

Knows examples, features and the file the sums are kept in. Does not know what is solved from them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kvlingo.corpus import Example, examples, require_examples
from kvlingo.language_model import LanguageModel, read_padded
from kvlingo.processes import ALONE, Processes
from kvlingo.shapes import FitOptions, base_config, candidate_choices, feature_names
from kvlingo.stats import GramStats, load_tensors, pieces_of, save_tensors
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
        """Return statistics of no tokens, with every product that any choice may need: none of two windows' outer ends."""
        config = self.config
        per_layer = [candidate_choices(config, layer, self.options) for layer in range(len(config.target))]
        pairs = {(a, b) for choices in per_layer for blocks in choices for a in blocks for b in blocks}
        outputs = {f"target/{layer}": config.target.layers[layer].width for layer in range(len(config.target))}
        pairs |= {
            (a, f"target/{layer}") for layer, choices in enumerate(per_layer) for blocks in choices for a in blocks
        }
        dims = {name: config.width(name) for name in self.features} | outputs
        return GramStats(dims, pairs, tuple(outputs), self._shared(dims, per_layer))

    def _shared(self, dims: Mapping[str, int], per_layer: Sequence[Sequence[tuple[str, ...]]]) -> GramStats | None:
        """Return sums over pieces for the layers without a window; None where every error counts alike."""
        whole = [layer for layer, shape in enumerate(self.config.target.layers) if shape.window is None]
        if not self.options.shared_weight or not whole:
            return None
        choices = [(f"target/{layer}", blocks) for layer in whole for blocks in per_layer[layer]]
        pairs = {(a, b) for output, blocks in choices for a in blocks for b in (*blocks, output)}
        read = {name for output, blocks in choices for name in (*blocks, output)}
        outputs = tuple(f"target/{layer}" for layer in whole)
        return GramStats({name: width for name, width in dims.items() if name in read}, pairs, outputs)

    def collect(
        self,
        documents: Sequence[Document],
        what: str,
        tokens: int,
        work_dir: Path | None,
        progress: Progress | None,
        processes: Processes = ALONE,
    ) -> GramStats:
        """Read up to `tokens` target tokens of the documents; resume from `work_dir` if a run was cut short there.

        Several processes read a piece each in turn, the same pieces as one alone would; all end up with the sums over all.
        """
        saved = SavedStats(work_dir if processes.is_first else None, what, self.key(tokens), digest_of(documents))
        stats = self.empty()
        stats.multiply_in(product_dtype(self.source, self.target))
        done = processes.told(saved.restore(stats))
        read = 0
        try:
            for number, example in enumerate(self.pieces(documents, tokens), start=1):
                start, stop = counted_tokens(example)
                read += stop - start
                if number <= done:
                    continue
                if processes.takes(number):
                    stats.add(self.blocks(example), pieces_of(stop - start, self.options.shared_tokens))
                done = number
                if number % GIVE_BACK_EVERY == 0:
                    give_back_memory()
                if number % processes.count == 0 and processes.told(saved.is_due):
                    stats.share(processes.add_up_at_first)
                    saved.save(stats, done)
                if progress is not None:
                    progress(f"reading {what} text", min(read, tokens), tokens)
        except BaseException:
            # The first of several holds its own part alone: what it saved last stands.
            if stats.is_whole and processes.count == 1:
                saved.save(stats, done)
            raise
        stats.share(processes.add_up_at_first)
        stats.share(processes.take_from_first)
        require_examples(range(stats.tokens), f"{min(self.options.context_tokens)} tokens for {what}")
        saved.save(stats, done)
        return stats

    def key(self, tokens: int) -> str:
        """Identify what the statistics of `tokens` tokens depend on, but for the texts."""
        options = asdict(self.options)
        # Sums over pieces are good for any weight; without them they are what older versions kept.
        if not options.pop("shared_weight"):
            options.pop("shared_tokens")
        facts = [self.source.fingerprint, self.target.fingerprint, tokens, options, "kinds in turn"]
        if self.options.shift:
            facts.append("products within windows")
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


def product_dtype(source: LanguageModel, target: LanguageModel) -> torch.dtype:
    """Return the dtype in which statistics multiply: float32 where both models compute in bfloat16, else float64.

    Rounding features to bfloat16 leaves noise of 1e-6 of their variance or more in every direction. Products in float32 err by
    less than that (`tests/test_stats_ridge.py`), so that no map can learn from what they lose. Features that are known to more
    digits can be told apart by dampings that would drown in it.
    """
    return torch.float32 if source.dtype == target.dtype == torch.bfloat16 else torch.float64


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

    @property
    def is_due(self) -> bool:
        """Whether two minutes have passed since it was saved."""
        return self.file is not None and time.monotonic() - self.saved_at > SAVE_EVERY_SECONDS

    def save(self, stats: GramStats, done: int) -> None:
        """Save now."""
        if self.file is None:
            return
        note = {"key": self.key, "documents": self.documents, "examples": done}
        save_tensors(self.file, stats.state_dict(), note)
        self.saved_at = time.monotonic()


def load_statistics(
    source: LanguageModel,
    target: LanguageModel,
    options: FitOptions,
    work_dir: Path,
    processes: Processes = ALONE,
) -> GramStats | None:
    """Return the training statistics that `fit` left in `work_dir`; None where there are none of this pair and options.

    Of several processes the first one reads the file, for all.
    """
    collector = Collector(source, target, base_config(source, target, options), options)
    saved = SavedStats(work_dir if processes.is_first else None, "training", collector.key(options.tokens))
    stats = collector.empty()
    if not processes.told(saved.restore(stats)):
        return None
    stats.share(processes.take_from_first)
    return stats
