"""The maps against loops over tokens, heads and features."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo.errors import IncompatiblePair
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.kv import KV
from kvlingo.translator import (
    LayerMap,
    Translator,
    TranslatorConfig,
    check_geometry,
    embedded,
    feature_blocks,
    first_read,
    head_columns,
    identity_translator,
    rms_normalise,
)

TOKENS, SOURCE_TOKENS, HIDDEN = 7, 9, 6
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"map_kind": "linear"},
    "headwise": {"map_kind": "headwise"},
    "lowrank": {"map_kind": "lowrank", "rank": 5},
    "residual": {"map_kind": "linear", "residual_width": 4},
}


def geometry(layers: int, kv_heads: int, key_dim: int, value_dim: int, window: int | None = None) -> Geometry:
    rope = LayerRope(None, "half", "half", key_dim)
    return Geometry(
        tuple(LayerGeometry(kv_heads, key_dim, value_dim, window, rope) for _ in range(layers)), HIDDEN, 50, 64
    )


SOURCE, TARGET = geometry(3, 2, 4, 3), geometry(2, 4, 6, 5)


def config(**changes: Any) -> TranslatorConfig:
    return TranslatorConfig(SOURCE, TARGET, **{"source_layers": ((0, 1), (1, 2)), **changes})


def randomised(translator: Translator) -> Translator:
    """Draw every parameter and buffer, so that nothing stays at a value that hides mistakes."""
    with torch.no_grad():
        for name, x in [*translator.named_parameters(), *translator.named_buffers()]:
            if x.is_floating_point():
                x.copy_(
                    torch.randn_like(x) if not name.endswith(("scale", "norm_weight")) else torch.rand_like(x) + 0.5
                )
    return translator.eval()


def source_kv(tokens: int = SOURCE_TOKENS, of: Geometry = SOURCE) -> KV:
    layers = of.layers
    return KV(
        tuple(torch.randn(1, x.kv_heads, tokens, x.key_dim, dtype=torch.float64) for x in layers),
        tuple(torch.randn(1, x.kv_heads, tokens, x.value_dim, dtype=torch.float64) for x in layers),
        tokens,
    )


def made(**changes: Any) -> Translator:
    return randomised(Translator(config(**changes)).double())


ALIGNMENT = torch.tensor([1, 1, 2, 4, 5, 7, 8])
EMBEDDINGS = torch.randn(20, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
START = 3


def layer_zero() -> KV:
    shape = TARGET.layers[0]
    return KV(
        (torch.randn(1, shape.kv_heads, TOKENS, shape.key_dim, dtype=torch.float64),),
        (torch.randn(1, shape.kv_heads, TOKENS, shape.value_dim, dtype=torch.float64),),
        TOKENS,
    )


# --- naive -----------------------------------------------------------------------------------------------------------


def naive_features(of: TranslatorConfig, layer: int, source: KV, token: int) -> list[float]:
    """Walk over blocks, lags and heads with plain loops."""
    out: list[float] = []
    for s in of.source_layers[layer]:
        for lag in of.source_lags:
            place = max(int(ALIGNMENT[token]) - lag, 0)
            for x in (source.keys[s], source.values[s]):
                for head in range(x.shape[1]):
                    out += x[0, head, place].tolist()
    for lag in of.embedding_lags:
        out += EMBEDDINGS[max(START + token - lag, 0)].tolist()
    return out


def naive_map(layer_map: LayerMap, of: TranslatorConfig, layer: int, features: list[float]) -> Tensor:
    """Apply one map to one token: [width]."""
    shape = layer_map.shape
    x = [
        (f - float(m)) / float(s)
        for f, m, s in zip(features, layer_map.feature_mean, layer_map.feature_scale, strict=True)
    ]
    linear: Any = layer_map.linear
    y = [float(b) for b in layer_map.bias]
    if of.map_kind == "linear":
        dense = linear.weight
    elif of.map_kind == "lowrank":
        dense = linear.down @ linear.up
    else:
        dense = naive_headwise(linear, of, layer, len(x))
    for column in range(shape.width):
        y[column] += sum(x[row] * float(dense[row, column]) for row in range(len(x)))
    if layer_map.residual is not None:
        hidden = layer_map.residual.enter.weight @ torch.tensor(x, dtype=torch.float64) + layer_map.residual.enter.bias
        active = torch.tensor(
            [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden.tolist()], dtype=torch.float64
        )
        y = [a + float(b) for a, b in zip(y, layer_map.residual.leave.weight @ active, strict=True)]
    return torch.tensor(y, dtype=torch.float64)


def naive_headwise(linear: Any, of: TranslatorConfig, layer: int, inputs: int) -> Tensor:
    """Spread the heads' small maps over one large matrix: target head h reads source head h * 2 // 4."""
    shape = of.target.layers[layer]
    dense = torch.zeros(inputs, shape.width, dtype=torch.float64)
    for head in range(shape.kv_heads):
        paired = head * 2 // 4
        for values, parameter, first, dim in (
            (False, linear.key_weight[head], head * shape.key_dim, shape.key_dim),
            (True, linear.value_weight[head], shape.key_width + head * shape.value_dim, shape.value_dim),
        ):
            rows: list[int] = []
            offset = 0
            for _ in of.source_layers[layer]:
                for _ in of.source_lags:
                    width = 2 * 4 + 2 * 3
                    rows += [
                        offset + (8 + paired * 3 + i if values else paired * 4 + i) for i in range(3 if values else 4)
                    ]
                    offset += width
            rows += range(offset, inputs)
            dense[rows, first : first + dim] += parameter
    return dense


@torch.no_grad()
def naive(translator: Translator, source: KV, layer: int) -> tuple[Tensor, Tensor]:
    of = translator.config
    layer_map: Any = translator.maps[str(layer)]
    rows = [naive_map(layer_map, of, layer, naive_features(of, layer, source, t)) for t in range(TOKENS)]
    shape = of.target.layers[layer]
    keys = torch.zeros(1, shape.kv_heads, TOKENS, shape.key_dim, dtype=torch.float64)
    values = torch.zeros(1, shape.kv_heads, TOKENS, shape.value_dim, dtype=torch.float64)
    for t, row in enumerate(rows):
        part = row[: shape.key_width]
        if layer_map.norm_kind == "layer":
            part = part / part.square().mean().sqrt() * layer_map.key_norm_weight
        for head in range(shape.kv_heads):
            one = part[head * shape.key_dim : (head + 1) * shape.key_dim]
            if layer_map.norm_kind == "head":
                one = one / one.square().mean().sqrt() * layer_map.key_norm_weight
            keys[0, head, t] = one
            first = shape.key_width + head * shape.value_dim
            values[0, head, t] = row[first : first + shape.value_dim]
    return keys, values


@pytest.mark.parametrize("norm", [None, "head", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_naive_self(kind: str, norm: str | None) -> None:
    translator = made(**KINDS[kind], source_lags=(0, 1), key_norms=(norm, norm))
    source, first = source_kv(), layer_zero()
    out = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=first)
    assert out.tokens == TOKENS
    assert torch.equal(out.keys[0], first.keys[0])
    keys, values = naive(translator, source, 1)
    torch.testing.assert_close(out.keys[1], keys, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(out.values[1], values, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("lags", [{"embedding_lags": ()}, {"embedding_lags": (0, 1, 2)}, {"source_lags": (0, 2)}])
def test_features_are_named_and_optional(lags: dict[str, Any]) -> None:
    translator = made(**lags)
    source, first = source_kv(), layer_zero()
    native = first if translator.config.reads_text else None
    out = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=native)
    for layer in range(translator.config.first_layer, 2):
        keys, values = naive(translator, source, layer)
        torch.testing.assert_close(out.keys[layer], keys, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(out.values[layer], values, atol=1e-9, rtol=1e-9)


def test_the_token_only_control_reads_no_source() -> None:
    translator = made(source_layers=((), ()))
    assert not translator.config.reads_source
    assert translator.config.feature_width(1) == 2 * HIDDEN
    out = translator(None, ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero())
    keys, _ = naive(translator, source_kv(), 1)
    torch.testing.assert_close(out.keys[1], keys, atol=1e-9, rtol=1e-9)


def test_key_and_value_dims_that_agree_take_the_same_path() -> None:
    same = geometry(3, 2, 4, 4)
    of = replace(config(embedding_lags=()), source=same)
    source = source_kv(of=same)
    blocks = feature_blocks(of.blocks(1), source=source, alignment=ALIGNMENT, embeddings=None)
    for name, layer in (("source/1/0", 1), ("source/2/0", 2)):
        torch.testing.assert_close(blocks[name], source.flat(layer)[0][ALIGNMENT], atol=0, rtol=0)


def test_before_the_first_token_lagged_blocks_repeat_it() -> None:
    source = source_kv()
    blocks = feature_blocks(
        ("source/0/1", "embedding/1"), source=source, alignment=torch.tensor([0, 1]), embeddings=EMBEDDINGS, start=0
    )
    assert torch.equal(blocks["source/0/1"][0], source.flat(0)[0, 0])
    assert torch.equal(blocks["source/0/1"][1], source.flat(0)[0, 0])
    assert torch.equal(blocks["embedding/1"], EMBEDDINGS[[0, 0]])


# --- windows and native layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_is_cutting(kind: str) -> None:
    translator, source, first = made(**KINDS[kind]), source_kv(), layer_zero()
    whole = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=first)
    skip = [2, 4]
    part = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=first, skip=skip)
    assert part.tokens == TOKENS
    for layer, count in enumerate(skip):
        assert part.held(layer) == TOKENS - count
        torch.testing.assert_close(part.keys[layer], whole.keys[layer][:, :, count:], atol=1e-12, rtol=0)
        torch.testing.assert_close(part.values[layer], whole.values[layer][:, :, count:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [[0, 0], [2, 5], [7, 7]])
def test_embeddings_given_once_for_each_distinct_token(kind: str, skip: list[int]) -> None:
    """The fast path, products made once for rows that are alike, gives what the plain one does."""
    ids = torch.tensor([4, 1, 4, 4, 0, 1, 2, 4, 4, 3, 1, 4])
    table = torch.randn(5, HIDDEN, dtype=torch.float64)
    translator, source, first = made(**KINDS[kind]), source_kv(), layer_zero()
    once = embedded(lambda distinct: table[distinct], ids)
    assert len(once.rows) == 5
    with torch.no_grad():
        wanted = translator(source, ALIGNMENT, table[ids], start=START, native=first, skip=skip)
        got = translator(source, ALIGNMENT, once, start=START, native=first, skip=skip)
    for a, b in zip((*got.keys, *got.values), (*wanted.keys, *wanted.values), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    learnt = translator(source, ALIGNMENT, once, start=START, native=first, skip=skip)
    torch.testing.assert_close(learnt.keys[1], wanted.keys[1], atol=1e-12, rtol=0)


def test_products_are_rounded_only_for_a_target_that_reads_so() -> None:
    """bfloat16 has 8 bits: what it costs is far below what any translation is off by, and no other target pays it."""
    translator, source, first = made().float(), source_kv(), layer_zero()
    source, first = source.to(dtype=torch.float32), first.to(dtype=torch.float32)

    def keys(rounded: torch.dtype | None) -> Tensor:
        with torch.no_grad():
            return translator(source, ALIGNMENT, EMBEDDINGS.float(), start=START, native=first, rounded=rounded).keys[1]

    exact = keys(None)
    off = float((keys(torch.bfloat16) - exact).norm() / exact.norm())
    assert 1e-4 < off < 1e-2
    assert torch.equal(keys(torch.float32), exact), "the weights in bfloat16 are not used again"
    assert all(p.dtype == torch.float32 for p in translator.parameters())


@torch.no_grad()
def test_weights_that_were_put_in_place_of_others_are_used() -> None:
    """The folded copy is of these tensors, not of whatever stood at their address."""
    translator, source = made(), source_kv()

    def keys() -> Tensor:
        return translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero()).keys[1]

    linear = translator.maps["1"].get_submodule("linear")
    for _ in range(30):
        old = keys()
        weight = torch.randn_like(linear.get_parameter("weight"))
        del linear.weight
        linear.register_parameter("weight", torch.nn.Parameter(weight))
        assert not torch.allclose(keys(), old)
    old = keys()
    linear.get_parameter("weight").mul_(2)
    assert not torch.allclose(keys(), old)


@pytest.mark.parametrize("lags", [(0,), (0, 2)])
@pytest.mark.parametrize("skip", [[0, 0], [2, 5], [6, 7], [9, 9]])
def test_source_tokens_that_no_map_reads_can_be_left_out(skip: list[int], lags: tuple[int, ...]) -> None:
    """What `first_read` tells is enough, and nothing of it could be spared."""
    of = config(source_lags=lags)
    translator, source = randomised(Translator(of).double()), source_kv()
    wanted = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero(), skip=skip)
    first = first_read(of, skip, 1, ALIGNMENT, SOURCE_TOKENS)
    assert first[0] == SOURCE_TOKENS, "layer 0 of the source feeds layer 0 of the target alone, which is native"
    short = cut_to(source, first)
    got = translator(short, ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero(), skip=skip)
    assert torch.equal(got.keys[1], wanted.keys[1])
    if skip[1] < TOKENS:
        assert first[1] == max(0, int(ALIGNMENT[skip[1]]) - max(lags))
        pairs = zip(source.keys, first, strict=True)
        loud = [k.index_fill(2, torch.tensor([at]), 9.0) if at < SOURCE_TOKENS else k for k, at in pairs]
        moved = translator(
            KV(tuple(loud), source.values, SOURCE_TOKENS),
            ALIGNMENT,
            EMBEDDINGS,
            start=START,
            native=layer_zero(),
            skip=skip,
        )
        assert not torch.equal(moved.keys[1], wanted.keys[1])


def cut_to(kv: KV, first: list[int]) -> KV:
    return KV(
        tuple(k[:, :, at:] for k, at in zip(kv.keys, first, strict=True)),
        tuple(v[:, :, at:] for v, at in zip(kv.values, first, strict=True)),
        kv.tokens,
    )


@pytest.mark.parametrize("skip", [[7, 7], [9, 9]])
def test_skipping_all_and_more(skip: list[int]) -> None:
    """A window may begin after the translated span."""
    translator, source, first = made(), source_kv(), layer_zero()
    clipped = [min(s, TOKENS) for s in skip]
    wanted = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=first, skip=clipped)
    got = translator(source, ALIGNMENT, EMBEDDINGS, start=START, native=first, skip=skip)
    for layer in range(2):
        assert got.held(layer) == TOKENS - clipped[layer]
        assert torch.equal(got.keys[layer], wanted.keys[layer])


def test_native_layers_are_used_as_they_are() -> None:
    translator = made(embedding_lags=())
    source, first = source_kv(), layer_zero()
    mapped = translator(source, ALIGNMENT, None)
    native = translator(source, ALIGNMENT, None, native=first)
    assert torch.equal(native.keys[0], first.keys[0])
    assert not torch.equal(mapped.keys[0], first.keys[0])
    assert torch.equal(native.keys[1], mapped.keys[1])


def test_what_is_missing_is_said() -> None:
    with pytest.raises(IncompatiblePair, match="no map for layer 0"):
        made()(source_kv(), ALIGNMENT, EMBEDDINGS)
    with pytest.raises(IncompatiblePair, match="give the target's token ids"):
        made()(source_kv(), ALIGNMENT, None, native=layer_zero())
    with pytest.raises(IncompatiblePair, match="give one"):
        made()(None, ALIGNMENT, EMBEDDINGS, native=layer_zero())


# --- norms -----------------------------------------------------------------------------------------------------------


def test_normalising_keeps_a_unit_vector_and_survives_zero() -> None:
    unit = rms_normalise(torch.randn(3, 8, dtype=torch.float64))
    torch.testing.assert_close(rms_normalise(unit), unit, atol=1e-14, rtol=0)
    assert bool(torch.isfinite(rms_normalise(torch.zeros(2, 4))).all())


# --- the object ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_starts_at_zero_and_maps_at_the_bias(kind: str) -> None:
    translator = Translator(config(**KINDS[kind])).double()
    out = translator(source_kv(), ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero())
    assert float(out.keys[1].abs().max()) == 0
    assert float(out.values[1].abs().max()) == 0


def test_gradients_reach_every_parameter_of_every_map() -> None:
    for kind, options in KINDS.items():
        translator = made(**options)
        out = translator(source_kv(), ALIGNMENT, EMBEDDINGS, start=START, native=layer_zero())
        (out.keys[1].square().sum() + out.values[1].square().sum()).backward()
        for name, parameter in translator.named_parameters():
            assert parameter.grad is not None, (kind, name)
            assert float(parameter.grad.abs().max()) > 0, (kind, name)


def test_a_config_survives_json() -> None:
    for options in KINDS.values():
        of = config(**options, key_norms=(None, "head"))
        assert TranslatorConfig.from_json(json.loads(json.dumps(of.to_json()))) == of


def test_geometries_are_checked() -> None:
    of = config()
    check_geometry(of, SOURCE, TARGET)
    check_geometry(of, replace(SOURCE, max_positions=9), TARGET)
    with pytest.raises(IncompatiblePair, match=r"target has 2 layers of 44 features, got 3 of 14"):
        check_geometry(of, SOURCE, SOURCE)
    with pytest.raises(IncompatiblePair, match="source has"):
        check_geometry(of, geometry(3, 2, 4, 3, window=16), TARGET)


def test_head_columns_pair_heads_proportionally() -> None:
    source = SOURCE.layers[0]
    assert [list(head_columns(source, h, 4, False)) for h in range(4)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [list(head_columns(source, h, 2, True)) for h in range(2)] == [[8, 9, 10], [11, 12, 13]]
    assert list(head_columns(source, 0, 1, False)) == [0, 1, 2, 3]


def test_size_counts_parameters() -> None:
    translator = made()
    weights = translator.config.feature_width(1) * TARGET.layers[1].width + TARGET.layers[1].width
    assert translator.num_bytes() == 4 * weights
    assert translator.num_bytes(2) == 2 * weights


def test_the_identity_translator_copies() -> None:
    translator, source = identity_translator(SOURCE, torch.float64), source_kv()
    out = translator(source, torch.arange(SOURCE_TOKENS), None)
    for mine, theirs in zip((*out.keys, *out.values), (*source.keys, *source.values), strict=True):
        assert torch.equal(mine, theirs)
