"""How little each translated token can be trusted, by signals that cost next to nothing.

Knows what a translation was made from and what came of it. A signal is worth something only if reading the tokens that it names
brings the target closer to itself than reading as many others (`frontier` tests it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.kv import KV, flatten_heads
from kvlingo.language_model import LanguageModel
from kvlingo.plan import HandoffPlan
from kvlingo.translator import Block, LayerMap, Translator, dense, embedded, feature_blocks


@dataclass(frozen=True)
class Evidence:
    """What is known of a hand-over's middle before the target has read anything of it.

    Fields:
        middle: its KV as translated, every layer in full.
        alignment: [middle tokens] source token of each.
        start: place of the first of them in the conversation.
        exact: how many first layers of `middle` are the target's own.
        source_nats: [source tokens] how much each surprised the source, where that is known.
        truth: the target's own KV of the middle, where an experiment knows it.
    """

    target: LanguageModel
    translator: Translator
    middle: KV
    source_kv: KV | None
    alignment: Tensor
    embeddings: Block | None
    start: int
    exact: int
    source_nats: Tensor | None = None
    truth: KV | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens in the middle."""
        return self.middle.tokens


def exact_layers(plan: HandoffPlan, translator: Translator) -> int:
    """Return how many first target layers are computed by the target itself."""
    return max(plan.native_layers, translator.config.first_layer)


def embeddings_of(target: LanguageModel, translator: Translator, ids: Tensor) -> Block | None:
    """Return the target's embeddings of a conversation as a translator reads them; None for one that doesn't."""
    if not translator.config.reads_text:
        return None
    device, dtype = place_of(translator)
    return embedded(lambda distinct: translator.read_text(target.embed(distinct).to(device, dtype)), ids)


def place_of(translator: Translator) -> tuple[torch.device, torch.dtype]:
    """Return where a translator computes, and in which dtype."""
    buffer = next(translator.buffers())
    return buffer.device, buffer.dtype


def first_layers_of(kv: KV, layers: int) -> KV:
    """Return the first `layers` layers of a KV."""
    return KV(kv.keys[:layers], kv.values[:layers], kv.tokens)


def doubts(evidence: Evidence, by: str) -> Tensor:
    """Return how little each token of the middle is trusted: [tokens], higher is less, of no particular unit.

    Raises:
        BadInput: there is no such signal, or not for this pair and this dial.
    """
    if by not in SIGNALS:
        raise BadInput(f"there is no signal {by!r}; use one of {', '.join(SIGNALS)}, or spread, or random")
    return SIGNALS[by](evidence)


def distance(evidence: Evidence) -> Tensor:
    """Return how far features lie from the training text's mean: mean square, each feature by its own deviation."""
    per_layer = feature_distances(
        evidence.translator,
        evidence.source_kv,
        evidence.alignment,
        evidence.embeddings,
        start=evidence.start,
        exact=evidence.exact,
    )
    return over_layers(evidence, per_layer)


def feature_distances(
    translator: Translator,
    source_kv: KV | None,
    alignment: Tensor,
    embeddings: Block | None,
    *,
    start: int,
    exact: int,
) -> dict[int, Tensor]:
    """Return for each layer with a map the mean square of each token's standardised features: [tokens], 1 on training text.

    Layers that read the same block share its mean and deviation: they are of the same text.
    """
    config = translator.config
    layers = range(max(exact, config.first_layer), len(config.target))
    read_by = {block: layer for layer in reversed(layers) for block in config.blocks(layer)}
    blocks = feature_blocks(list(read_by), source=source_kv, alignment=alignment, embeddings=embeddings, start=start)
    squares = {}
    for block, layer in read_by.items():
        layer_map = translator.maps[str(layer)]
        assert isinstance(layer_map, LayerMap)
        names = config.blocks(layer)
        first = sum(config.width(name) for name in names[: names.index(block)])
        part = slice(first, first + config.width(block))
        x = (dense(blocks[block]) - layer_map.feature_mean[part]) / layer_map.feature_scale[part]
        squares[block] = x.detach().square().sum(-1)
    return {
        layer: torch.stack([squares[name] for name in config.blocks(layer)]).sum(0) / config.feature_width(layer)
        for layer in layers
    }


def key_norm(evidence: Evidence) -> Tensor:
    """Return how far translated keys are from the length that the target's own key norm gives to all of its keys.

    A ridge map shrinks what it is not sure of. Only for targets with key norms, and maps that don't end in them.
    """
    per_layer = {}
    for layer in range(evidence.exact, len(evidence.middle)):
        weight = evidence.target.key_norms[layer]
        layer_map = evidence.translator.maps[str(layer)]
        assert isinstance(layer_map, LayerMap)
        if weight is None or layer_map.norm_kind is not None:
            continue
        keys = evidence.middle.keys[layer]
        plain = flatten_heads(keys)[0] if weight.numel() != keys.shape[-1] else keys[0].transpose(0, 1)
        length = 0.5 * (plain / weight.to(plain)).square().mean(-1).clamp(min=1e-30).log()
        per_layer[layer] = length.abs() if length.ndim == 1 else length.abs().mean(-1)
    if not per_layer:
        raise BadInput(
            f"the signal key_norm needs keys of {evidence.target.name} that end in a norm, and maps that don't; "
            "use another: --anchors-by distance"
        )
    return over_layers(evidence, per_layer)


def surprise(evidence: Evidence) -> Tensor:
    """Return how much the source was surprised by what it read there."""
    if evidence.source_nats is None:
        raise BadInput(
            "the signal surprise needs the source's own predictions of what it read; use distance or key_norm"
        )
    return evidence.source_nats[evidence.alignment.to(evidence.source_nats.device)].float()


def deviation(evidence: Evidence) -> Tensor:
    """Return how far the maps are from the target's first layers, where those are its own.

    Wants two native layers at least: layer 0 depends on the token alone.
    """
    config = evidence.translator.config
    layers = range(max(1, config.first_layer), evidence.exact)
    if not layers:
        raise BadInput("the signal deviation compares maps with native layers; give at least 2: --native-layers 2")
    per_layer = {}
    for layer in layers:
        keys, values = mapped(evidence, layer)
        per_layer[layer] = _gap(evidence.middle, KV((keys,), (values,), evidence.tokens), layer, 0)
    return torch.stack(list(per_layer.values())).mean(0)


def oracle(evidence: Evidence) -> Tensor:
    """Return how far the translation is from the target's own cache: what no hand-over can know."""
    if evidence.truth is None:
        raise BadInput("the signal oracle needs the target's own cache; it is for experiments")
    layers = range(evidence.exact, len(evidence.middle))
    return over_layers(evidence, {i: _gap(evidence.truth, evidence.middle, i, i) for i in layers})


SIGNALS: Mapping[str, Callable[[Evidence], Tensor]] = {
    "distance": distance,
    "key_norm": key_norm,
    "surprise": surprise,
    "deviation": deviation,
    "oracle": oracle,
}


def mapped(evidence: Evidence, layer: int) -> tuple[Tensor, Tensor]:
    """Return what a layer's map makes of the middle."""
    layer_map = evidence.translator.maps[str(layer)]
    assert isinstance(layer_map, LayerMap)
    names = evidence.translator.config.blocks(layer)
    blocks = feature_blocks(
        names,
        source=evidence.source_kv,
        alignment=evidence.alignment,
        embeddings=evidence.embeddings,
        start=evidence.start,
    )
    keys, values = layer_map(torch.cat([dense(blocks[name]) for name in names], dim=-1).to(layer_map.bias.dtype))
    return keys, values


def _gap(native: KV, other: KV, layer: int, other_layer: int) -> Tensor:
    """Return each token's mean squared difference in units of the native features' variance over the tokens: [tokens]."""
    x, y = native.flat(layer)[0].float(), other.flat(other_layer)[0].float()
    variance = x.var(0, correction=0).clamp(min=1e-12)
    return ((x - y.to(x)).square() / variance).mean(-1)


def over_layers(evidence: Evidence, per_layer: Mapping[int, Tensor]) -> Tensor:
    """Return the mean over the layers that still hold a token when the tail is read; 0 for a token that none holds."""
    total = torch.zeros(evidence.tokens, dtype=torch.float64)
    count = torch.zeros(evidence.tokens, dtype=torch.float64)
    for layer, values in per_layer.items():
        shape = evidence.target.geometry.layers[layer]
        first = max(0, shape.first_held(evidence.start + evidence.tokens) - evidence.start)
        total[first:] += values[first:].detach().double().cpu()
        count[first:] += 1
    return total / count.clamp(min=1)
