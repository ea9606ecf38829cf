"""What `kvlingo info` finds out without loading weights: a pair's facts, or a saved translator's.

Knows outlines, sizes and the arithmetic of cost. Facts are plain values; `sheets` shows them.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from kvlingo.alignment import TokenizerRelation, tokenizer_relation
from kvlingo.calibration import map_weights
from kvlingo.cost import TargetCost, break_even_tokens, handoff_flops, pass_flops
from kvlingo.errors import UnsupportedModel
from kvlingo.language_model import LanguageModel
from kvlingo.models import quiet_loading
from kvlingo.outline import Outline, outline
from kvlingo.shapes import FitOptions, base_config, choose_map
from kvlingo.store import read_manifest
from kvlingo.traffic import Accelerator, Target, Traffic, estimate
from kvlingo.translator import MAP_KINDS, Translator, TranslatorConfig

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# What only weights show; a family that does otherwise is refused there (`probing`, `selfcheck`).
CHECKED_AT_LOAD = "that keys follow the rotary module, causality, windows, going on from a cache"
ALIKE = 0.9  # share of all pieces that two vocabularies must have in common to be compared further


def describe_pair(source_name: str, target_name: str) -> dict[str, Any]:
    """Say what can be known of a pair without loading weights.

    Raises:
        UnsupportedModel: a model keeps no keys and values that could be translated, or can only be a source; the message says
            what it keeps.
        BadInput: a name that leads to no model.
    """
    source, target, options, config = outlined(source_name, target_name)
    cost = cost_of(target)
    maps = weights_of(config)
    return {
        "supported": True,
        "checked_at_load": CHECKED_AT_LOAD,
        "source": side_facts(source),
        "target": side_facts(target),
        "tokenizers": relation_of(source, target),
        "map_auto": {"kind": options.map_kind, "residual_width": options.residual_width},
        "num_bytes": {
            kind: {
                s: size_of(replace(config, map_kind=kind, rank=options.rank if kind == "lowrank" else 0), s)
                for s in BYTES
            }
            for kind in MAP_KINDS
        },
        "break_even_tokens": break_even_tokens(cost, maps),
        "gflops": {
            str(n): {"handoff": handoff_flops(cost, maps, n) / 1e9, "reprefill": pass_flops(cost, n) / 1e9}
            for n in (64, 256, 1024, 4096, 16384)
        },
    }


def outlined(source_name: str, target_name: str) -> tuple[Outline, Outline, FitOptions, TranslatorConfig]:
    """Return what is known of two models without weights, and the translator that `fit` would make of them."""
    quiet_loading()
    source, target = outline(source_name), outline(target_name)
    if target.target_refusal is not None:
        raise UnsupportedModel(f"{target.name} can't be a target: {target.target_refusal}")
    options = replace(
        FitOptions(key_norm=False),
        **choose_map(source.geometry, target.geometry, source.total_weights, target.total_weights),
    )
    # Without key norms, nothing but the two geometries is read here.
    return source, target, options, base_config(cast("LanguageModel", source), cast("LanguageModel", target), options)


def cost_of(target: Outline) -> TargetCost:
    """Return what one token costs a model."""
    return TargetCost(target.layer_weights, target.query_widths, [x.window for x in target.geometry.layers])


def plan_traffic(source_name: str, target_name: str, traffic: Traffic, accelerator: Accelerator) -> dict[str, Any]:
    """Estimate what hand-overs from one model to the other are worth. Raises as `describe_pair`."""
    source, target, _, config = outlined(source_name, target_name)
    widths = [layer.width for layer in target.geometry.layers]
    answering = Target(cost_of(target), weights_of(config), widths)
    return {"source": source.name, "target": target.name, **estimate(answering, traffic, accelerator)}


def side_facts(side: Outline) -> dict[str, Any]:
    """Return one model's facts as plain values."""
    return {
        "name": side.name,
        "kind": side.kind,
        "weights": side.total_weights,
        "kv_features_per_token": side.geometry.features_per_token,
        "kv_bytes_per_token_bfloat16": 2 * side.geometry.features_per_token,
        "max_positions": side.geometry.max_positions,
        "vocabulary": side.geometry.vocab_size,
        "layers": [
            {"kv_heads": x.kv_heads, "key_dim": x.key_dim, "value_dim": x.value_dim, "window": x.window}
            for x in side.geometry.layers
        ],
    }


def describe_folder(folder: Path) -> dict[str, Any]:
    """Return what is known about a saved translator, without its weights."""
    manifest = asdict(read_manifest(folder))
    texts = manifest["options"].pop("texts", {})
    manifest["options"]["num_texts"] = {name: len(found) for name, found in texts.items()}
    present = [name for name in ("token_only", "no_text") if (folder / "controls" / name).is_dir()]
    return {"folder": str(folder), **manifest, "controls": present}


def size_of(config: TranslatorConfig, storage: str = "float32") -> int:
    """Return a translator's size in bytes without making it."""
    with torch.device("meta"):
        return Translator(config).num_bytes(BYTES[storage])


def relation_of(source: Outline, target: Outline) -> str:
    """Say how two models' tokenizers are related; two vocabularies with little in common need no closer look."""
    for side in (source, target):
        if side.pieces is None:
            return f"unknown ({side.name} brings no tokenizer)"
    assert source.pieces is not None
    assert target.pieces is not None
    if len(source.pieces & target.pieces) < ALIKE * len(source.pieces | target.pieces):
        return str(TokenizerRelation("different"))
    return str(tokenizer_relation(source.load_tokenizer(), target.load_tokenizer()))


def weights_of(config: TranslatorConfig) -> list[int]:
    """Return the number of weights of each target layer's map without making it; 0 where a layer has none."""
    with torch.device("meta"):
        return map_weights(Translator(config))
