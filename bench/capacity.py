"""What hand-overs between machines need: bytes on the wire, FLOPs, and from which length on a link makes them pay.

    python -m bench.capacity [--out results/capacity.json]

Arithmetic alone (`kvlingo.cost`), of public shapes: nothing is measured and no weights are loaded. `python -m bench.tables` shows
it in docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch

from kvlingo.calibration import map_weights
from kvlingo.cost import handoff_flops, least_gbit_per_s, pass_flops, remote_break_even_tokens
from kvlingo.facts import cost_of
from kvlingo.language_model import LanguageModel
from kvlingo.outline import Outline
from kvlingo.public_shapes import MapShape, empty_translator, shape_config, shape_outline

PAIRS = (
    ("Qwen3-0.6B", "Qwen3-1.7B"),
    ("Qwen3-0.6B", "Qwen3-8B"),
    ("Llama-3.2-3B", "Llama-3.1-8B"),
    ("Gemma-2-2B", "Gemma-2-9B"),
)
LINKS_GBIT = (1.0, 10.0, 100.0)
READING_TFLOPS = (5.0, 50.0, 400.0)
TOKENS = 4096
BYTES_PER_VALUE = 2


def capacity() -> dict[str, Any]:
    """Return the figures of all pairs."""
    return {
        "bytes_per_value": BYTES_PER_VALUE,
        "tokens": TOKENS,
        "links_gbit_per_s": list(LINKS_GBIT),
        "reading_tflops_per_s": list(READING_TFLOPS),
        "pairs": [of_pair(source, target) for source, target in PAIRS],
    }


def of_pair(source_name: str, target_name: str) -> dict[str, Any]:
    """Return one pair's figures, with maps of one layer, the least that is ever fitted for it."""
    source, target = (shape_outline(name, shape_config(name)) for name in (source_name, target_name))
    maps, cost = weights_of_maps(source, target), cost_of(target)
    wire = BYTES_PER_VALUE * source.geometry.features_per_token
    room = min(side.geometry.max_positions or TOKENS for side in (source, target))

    def pays_from(tflops: float, link: float) -> int | None:
        found = remote_break_even_tokens(cost, maps, wire, flops_per_s=1e12 * tflops, gbit_per_s=link)
        return found if found is not None and found <= room else None

    return {
        "source": source_name,
        "target": target_name,
        "max_positions": room,
        "wire_bytes_per_token": wire,
        "translate_flops_per_token": handoff_flops(cost, maps, TOKENS) / TOKENS,
        "reprefill_flops_per_token": pass_flops(cost, TOKENS) / TOKENS,
        "reading": [
            {
                "tflops_per_s": tflops,
                "least_gbit_per_s": least_gbit_per_s(cost, maps, wire, TOKENS, flops_per_s=1e12 * tflops),
                "pays_from_tokens": [pays_from(tflops, link) for link in LINKS_GBIT],
            }
            for tflops in READING_TFLOPS
        ],
    }


def weights_of_maps(source: Outline, target: Outline) -> list[int]:
    """Return the weights of each target layer's map from one source layer, without making them."""
    shape = MapShape("layer")
    config = shape.config(cast("LanguageModel", source), cast("LanguageModel", target))
    with torch.device("meta"):
        return map_weights(empty_translator(config, shape.kind))


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/capacity.json"))
    out = parser.parse_args().out
    out.write_text(json.dumps(capacity(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
