"""From a kept cache to the keys and values that an engine holds: read, merge, translate, rotate.

Knows tensors, stores and the target's own part: its embeddings, first layer and first tokens, from an extract of it or a copy of
its checkpoint on the CPU. A translation is what `assembling.assemble` gives, layer by layer. Does not know blocks, slots or an
engine's layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kvlingo.assembling import exact_kv, first_source_token
from kvlingo.errors import BadInput, IncompatiblePair, UnsupportedModel
from kvlingo.extracts import Extract, checkpoint_folder, open_extract
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read
from kvlingo.manifest import ModelCard
from kvlingo.models import load_model
from kvlingo.plan import HandoffPlan, plan_handoff
from kvlingo.rope import Rotary
from kvlingo.serve.external.entries import Entry, check_parts, merge, parse, unpack
from kvlingo.serve.external.matching import Link, alignment_tensor
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.stores import Store
from kvlingo.store import load_translator
from kvlingo.translator import Translator
from kvlingo.trust import embeddings_of, place_of

Made = tuple[int, Tensor, Tensor]
"""A layer, and keys and values of some last tokens."""
REMEMBERED_HEADS = 64
REHEARSED_TOKENS = 256


@dataclass(frozen=True)
class Side:
    """What a model's keys and values look like and who it is; its weights are not kept."""

    card: ModelCard
    geometry: Geometry
    rotary: Rotary


def side_of(lm: LanguageModel) -> Side:
    """Return what is to be kept of a loaded model that only gives caches away."""
    return Side(ModelCard.of(lm), lm.geometry, lm.rotary)


@dataclass(frozen=True)
class Own:
    """An engine's own model outside of the engine.

    Fields:
        lm: of an extract, who can't read; or a copy of the whole checkpoint.
        folder: where the engine's weights are.
        extract: None for such a copy.
    """

    lm: LanguageModel
    folder: Path
    extract: Extract | None = None


def open_own(name: str, dtype: torch.dtype, extract: str | None, revision: str | None = None) -> Own:
    """Open an engine's model once more, of the same revision: from its extract where there is one.

    Raises `BadInput` where the engine's weights are not where its configuration is, and as `open_extract` and `load_model`.
    """
    folder = checkpoint_folder(name, revision)
    if extract is not None:
        opened = open_extract(extract, dtype, checkpoint=folder)
        return Own(opened.lm, folder, opened)
    if not any(folder.glob("*.safetensors")):
        raise BadInput(f"{folder} holds no weights (*.safetensors); give the engine the folder that its weights are in")
    return Own(replace(load_model(str(folder), device="cpu", dtype=dtype), name=name), folder)


def map_anew(lm: LanguageModel, folder: Path) -> int:
    """Let go of what was read of a checkpoint: weights that stand in its files as they are used are mapped from there anew.

    Such weights are pages of files: they take memory as far as they are read, other processes share them, and the system takes
    them back when it needs to. Loading, probing and checking have read all; a hand-over reads rows of the embedding, the first
    layer, and the others only for first tokens that nobody knows beforehand. Returns the bytes that were let go.
    """
    weights, let_go = dict(lm.model.named_parameters()), 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in weights.keys() & set(opened.keys()):
                mapped, weight = opened.get_tensor(name), weights[name]
                if (mapped.dtype, mapped.shape) == (weight.dtype, weight.shape):
                    weight.data = mapped
                    let_go += mapped.nbytes
    return let_go


class Target:
    """The target's own part of a hand-over, and the translators to it.

    An engine tells by its blocks which tokens a sliding layer keeps (all, without a hybrid cache manager), and reads first tokens
    that are left to the worker in full: here no layer has a window.
    Raises `IncompatiblePair` or `UnsupportedModel` for a model that the translators were not fitted on.
    """

    def __init__(self, lm: LanguageModel, links: Sequence[Link], extract: Extract | None = None) -> None:
        if lm.target_refusal is not None:
            raise UnsupportedModel(f"{lm.name}: {lm.target_refusal}")
        self.translators = {link.digest: _load(link, lm) for link in links}
        self.sources = {link.digest: link.manifest.source.geometry for link in links}
        layers = tuple(replace(layer, window=None) for layer in lm.geometry.layers)
        self.lm = replace(lm, geometry=replace(lm.geometry, layers=layers))
        self._special = frozenset(lm.tokenizer.all_special_ids if extract is None else ())
        self._heads: dict[tuple[int, ...], KV] = {}
        self._extract = extract
        if extract is None and lm.tokenizer.bos_token_id is not None:
            self.head((lm.tokenizer.bos_token_id,))  # before `map_anew`: all layers are read for it

    def head(self, ids: Sequence[int]) -> KV:
        """Return the target's own position-free KV of a prompt's first few tokens.

        Special tokens, with which many prompts begin, are remembered; text is not: nobody can tell by the time what others said.
        Raises `Refused` where they come from an extract that has others.
        """
        if self._extract is not None:
            known = self._extract.beginning(ids)
            if known is None:
                raise Refused("head", f"the extract knows no prompt that begins with these {len(ids)} tokens")
            return known
        key = tuple(ids)
        found = self._heads.get(key)
        if found is None:
            found = read(self.lm, self.lm.ids(key))
            if self._special.issuperset(key) and len(self._heads) < REMEMBERED_HEADS:
                self._heads[key] = found
        return found


def _load(link: Link, lm: LanguageModel) -> Translator:
    translator, manifest = load_translator(link.folder, target=lm)
    if manifest.weights is None or manifest.weights.sha256 != link.digest:
        raise IncompatiblePair(f"{link.folder} was changed while it was read; start again")
    return translator.requires_grad_(False)


@dataclass(frozen=True)
class Carry:
    """What is to be translated: everything that a worker needs beyond its models.

    Fields:
        key, tenant: the kept cache, and whose it must be.
        sha256: of the cache that was planned with.
        digest: of the translator's weights.
        ids: the prompt's tokens up to the end of the translated ones.
        alignment: the source token of each of them.
        native: how many first tokens the engine holds already.
    """

    key: str
    tenant: str
    sha256: str
    digest: str
    ids: tuple[int, ...]
    alignment: tuple[int, ...]
    plan: HandoffPlan
    native: int


def fetch(store: Store, key: str, tenant: str) -> tuple[Entry, KV]:
    """Read a kept cache and check it. Raises `Refused`."""
    parts = [parse(data, key) for data in store.manifests(key)]
    if not parts or any(part.tenant != tenant for part in parts):
        raise Refused("gone", "the kept cache is not there any more")
    entry = check_parts(parts)
    return entry, merge(entry, [unpack(part, store.data(key, part.rank)) for part in parts])


@torch.no_grad()
def translated(carry: Carry, untrusted: int, source: KV, target: Target, first_held: Sequence[int]) -> Iterator[Made]:
    """Yield layers with their position-free keys and values in the target, [1, heads, held, dim], in the order they are made in.

    They are of the tokens from `carry.native` to the end of the translated ones; what `assembling.assemble` gives, but one layer
    at a time is in memory.

    Args:
        untrusted: how many first tokens of the source were translated themselves (`Entry.translated_until`).
        first_held: per layer how many first tokens the engine has no place for: they lie outside a sliding window.
    """
    lm, translator = target.lm, target.translators[carry.digest]
    start, stop = carry.plan.translated
    offset = first_source_token(translator.config, carry.alignment[start], untrusted)
    ids, (device, dtype) = torch.tensor(carry.ids, dtype=torch.long), place_of(translator)
    before = target.head(carry.ids[:start]).narrow(carry.native, start) if start > carry.native else None
    made = translator.stream(
        source.narrow(offset, source.tokens) if translator.config.reads_source else None,
        alignment_tensor(carry.alignment)[start:stop] - offset,
        embeddings_of(lm, translator, ids[:stop]),
        start=start,
        skip=[max(0, first - start) for first in first_held],
        native=exact_kv(carry.plan, lm, translator, ids, None, device, dtype),
        rounded=lm.dtype,
    )
    for layer, _, keys, values in made:
        held = stop - max(first_held[layer], carry.native)
        own = (None, None) if before is None else (before.keys[layer], before.values[layer])
        keys, values = (_last(b, x.to(lm.dtype), held) for b, x in zip(own, (keys, values), strict=True))
        yield layer, keys, values


def _last(before: Tensor | None, made: Tensor, tokens: int) -> Tensor:
    """Return the last tokens of what was there before and what was made, [1, heads, tokens, dim] each."""
    whole = made if before is None else torch.cat((before, made), dim=2)
    return whole[:, :, whole.shape[2] - tokens :]


def rehearse(target: Target, tokens: int = REHEARSED_TOKENS) -> None:
    """Translate a made-up cache with each translator: weights are read in and laid out before anybody waits for that."""
    steps = tuple(range(tokens))
    ids = tuple(step % target.lm.geometry.vocab_size for step in steps)
    for digest, translator in target.translators.items():
        shapes = translator.config.source.layers
        keys = tuple(torch.zeros(1, s.kv_heads, tokens, s.key_dim, dtype=target.lm.dtype) for s in shapes)
        values = tuple(torch.zeros(1, s.kv_heads, tokens, s.value_dim, dtype=target.lm.dtype) for s in shapes)
        plan = plan_handoff(list(steps))
        carry = Carry("", "", "", digest, ids, steps, plan, plan.translated[0])
        for _ in translated(carry, 0, KV(keys, values, tokens), target, [0] * len(target.lm.geometry)):
            pass


def placed(layers: Iterable[Made], stop: int, rotary: Rotary, heads: Sequence[slice]) -> Iterator[Made]:
    """Yield layers with keys and values of some of their heads, [held, heads, dim], rotated for the positions before `stop`."""
    rotary, positions = rotary.for_one_pass(), dict[int, Tensor]()
    for layer, free_keys, free_values in layers:
        mine, held = heads[layer], free_keys.shape[2]
        at = positions.setdefault(held, torch.arange(stop - held, stop))
        keys, values = rotary.apply(free_keys[:, mine], free_values[:, mine], layer, at)
        yield layer, keys[0].transpose(0, 1).contiguous(), values[0].transpose(0, 1).contiguous()


def lifted(layers: Sequence[tuple[Tensor, Tensor]], rotary: Rotary) -> KV:
    """Return the position-free KV of a conversation's first tokens from what an engine holds, [tokens, heads, dim] a layer."""
    rotary, positions = rotary.for_one_pass(), torch.arange(len(layers[0][0]))
    free = [
        rotary.strip(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer, positions)
        for layer, (keys, values) in enumerate(layers)
    ]
    return KV(tuple(k for k, _ in free), tuple(v for _, v in free), len(positions))


def head_range(heads: int, rank: int, world: int) -> slice:
    """Return which of a layer's heads a rank holds; where there are fewer heads than ranks, several ranks hold one."""
    if heads >= world:
        return slice(rank * heads // world, (rank + 1) * heads // world)
    first = rank * heads // world
    return slice(first, first + 1)
