"""What can be fitted: options, and the shapes of translator they lead to.

Knows which source layers and features a target layer may read. Does not know statistics or how a map is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvlingo.errors import BadInput
from kvlingo.geometry import Geometry
from kvlingo.language_model import LanguageModel
from kvlingo.pairing import proportional, window
from kvlingo.ridge import DAMPINGS
from kvlingo.translator import MAP_KINDS, MapKind, TranslatorConfig

RESIDUAL_WIDTH = 512


@dataclass(frozen=True)
class FitOptions:
    """What to fit and on how much text.

    Fields:
        reach: a target layer reads the source layers centre - reach … centre + reach.
        shift: how far the centre may move from the proportional layer, chosen on held-out documents.
        tokens: target tokens to read; the rest of the text is left.
        context_tokens: lengths of the pieces the text is read in.
        held_out_share: share of the documents' clusters kept for choosing; held_out_examples of them are judged by KL.
        shared_weight: how much more an error counts that `shared_tokens` neighbouring tokens share, in layers without a window.
            Ridge then minimises Σ_t |e_t|² + shared_weight · Σ_pieces m |ē|², where ē is the mean error of the m tokens of a
            piece. Attention averages over tokens: errors of their own cancel there, shared ones do not; and an offset that many
            keys have in common moves attention between all of them and the tokens that the target has read itself.
        key_norm: whether keys end in the target's own key norm, where it has one; None lets held-out KL choose.
    """

    reach: int = 1
    shift: int = 1
    source_lags: tuple[int, ...] = (0,)
    embedding_lags: tuple[int, ...] = (0, 1)
    map_kind: MapKind = "linear"
    rank: int = 256
    residual_width: int = 0
    tokens: int = 150_000
    context_tokens: tuple[int, ...] = (192, 512, 1024)
    chat_share: float = 0.15
    shared_weight: float = 0.0
    shared_tokens: int = 16
    dampings: tuple[float, ...] = DAMPINGS
    held_out_share: float = 0.1
    held_out_examples: int = 8
    key_norm: bool | None = None
    seed: int = 0


def options_from_json(data: Mapping[str, Any]) -> FitOptions:
    """Restore the options that `dataclasses.asdict` gave and JSON kept."""
    known = {f.name for f in fields(FitOptions)}
    restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
    return FitOptions(**restored)


def choose_map(source: Geometry, target: Geometry, source_weights: int, target_weights: int) -> dict[str, Any]:
    """Return the `FitOptions` of `--map auto`: a linear map, with a residual to try where the linear one may not be enough.

    Linear where the target's cache has no more features than the source's, or where a larger model hands over to a smaller
    one; from small to large an MLP residual is tried too, and distilling drops it unless held-out KL improves.
    """
    grows = target.features_per_token > source.features_per_token and target_weights > source_weights
    return {"map_kind": "linear", "residual_width": RESIDUAL_WIDTH if grows else 0}


def base_config(source: LanguageModel, target: LanguageModel, options: FitOptions) -> TranslatorConfig:
    """Return the translator's shape with the proportional pairing."""
    if options.map_kind not in MAP_KINDS:
        raise BadInput(f"unknown map kind {options.map_kind!r}; use one of {', '.join(MAP_KINDS)} or auto")
    if options.shared_weight < 0 or options.shared_tokens < 1:
        raise BadInput(
            f"errors that neighbours share: a weight of at least 0 and pieces of at least 1 token are wanted, got "
            f"shared_weight={options.shared_weight:g} and shared_tokens={options.shared_tokens}"
        )
    centres = proportional(len(target.geometry), len(source.geometry))
    return TranslatorConfig(
        source=source.geometry,
        target=target.geometry,
        source_layers=tuple(window(c, options.reach, len(source.geometry)) for c in centres),
        source_lags=options.source_lags,
        embedding_lags=options.embedding_lags,
        map_kind=options.map_kind,
        rank=options.rank if options.map_kind == "lowrank" else 0,
        residual_width=options.residual_width,
        fitted_tokens=max(options.context_tokens),
    )


def norm_choices(config: TranslatorConfig, target: LanguageModel, options: FitOptions) -> list[TranslatorConfig]:
    """Return the shapes to judge: keys predicted as they are, or ending in the target's own norm where it has one."""
    kinds = tuple(norm_kind(target, layer) for layer in range(len(target.geometry)))
    normed = replace(config, key_norms=kinds)
    if not any(kinds) or options.key_norm is False:
        return [config]
    return [normed] if options.key_norm else [config, normed]


def norm_kind(lm: LanguageModel, layer: int) -> str | None:
    """Say whether a layer's keys end in a norm per head or over all heads."""
    weight = lm.key_norms[layer]
    if weight is None:
        return None
    return "head" if weight.numel() == lm.geometry.layers[layer].key_dim else "layer"


def source_free(config: TranslatorConfig) -> TranslatorConfig:
    """Return the token-only control's shape: the same class, the source left out."""
    return replace(config, source_layers=tuple(() for _ in config.source_layers))


def text_free(config: TranslatorConfig) -> TranslatorConfig:
    """Return the privacy split's shape: the same class, the text left out."""
    return replace(config, embedding_lags=())


def with_layers(config: TranslatorConfig, layer: int, source_layers: tuple[int, ...]) -> TranslatorConfig:
    """Return the config with one target layer reading other source layers."""
    layers = list(config.source_layers)
    layers[layer] = source_layers
    return replace(config, source_layers=tuple(layers))


# --- the features that any choice may read ---


def candidate_centres(config: TranslatorConfig, layer: int, shift: int) -> tuple[int, ...]:
    """Return the proportional source layer and its neighbours up to `shift` away, nearest first."""
    count = len(config.source)
    centre = proportional(len(config.target), count)[layer]
    offsets = sorted(range(-shift, shift + 1), key=lambda d: (abs(d), d))
    return tuple(centre + d for d in offsets if 0 <= centre + d < count)


def candidate_choices(config: TranslatorConfig, layer: int, options: FitOptions) -> list[tuple[str, ...]]:
    """Return the feature blocks of every choice there is for this layer: one window of source layers, and the text."""
    centres = candidate_centres(config, layer, options.shift)
    windows = [window(centre, options.reach, len(config.source)) for centre in centres]
    return [with_layers(config, layer, chosen).blocks(layer) for chosen in windows]


def candidate_blocks(config: TranslatorConfig, layer: int, options: FitOptions) -> tuple[str, ...]:
    """Return every feature block that any choice for this layer may use."""
    return tuple(sorted({block for choice in candidate_choices(config, layer, options) for block in choice}))


def feature_names(config: TranslatorConfig, options: FitOptions) -> tuple[str, ...]:
    """Return all feature blocks of all layers, neighbours side by side: source layers in order, then embeddings."""
    names = {b for i in range(len(config.target)) for b in candidate_blocks(config, i, options)}
    return tuple(sorted(names, key=lambda name: (name.startswith("embedding"), [int(x) for x in name.split("/")[1:]])))
