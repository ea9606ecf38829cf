"""The fast way through the maps gives what the plain way gives, for every kind, in chunks or at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo import folding
from kvlingo.errors import IncompatiblePair
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.kv import KV
from kvlingo.translator import LayerMap, SplitMap, Translator, TranslatorConfig, embedded

HIDDEN, VOCABULARY, TOKENS = 6, 11, 40
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "lowrank": {"map_kind": "lowrank", "rank": 5},
    "residual": {"residual_width": 4},
    "lowrank residual": {"map_kind": "lowrank", "rank": 3, "residual_width": 4},
    "no text": {"embedding_lags": ()},
    "text only": {"source_layers": ((), (), ())},
    "token before": {"source_lags": (0, 1)},
    "scattered layers": {"source_layers": ((0, 2), (3, 1, 0), (2,)), "source_lags": (1, 0)},
    "key norms": {"key_norms": (None, "head", "layer")},
    "ranks of their own, reduced text": {
        "map_kind": "lowrank",
        "ranks": (0, 0, 3),
        "text_rank": 4,
        "source_lags": (0, 1),
    },
    "headwise": {"map_kind": "headwise"},
    "headwise, no text": {"map_kind": "headwise", "embedding_lags": ()},
    "headwise, text only": {"map_kind": "headwise", "source_layers": ((), (), ())},
    "headwise, scattered": {"map_kind": "headwise", "source_layers": ((0, 2), (3, 1, 0), (2,)), "source_lags": (1, 0)},
    "headwise residual": {"map_kind": "headwise", "residual_width": 4, "key_norms": (None, "head", "layer")},
    "split": {"source_layers": ((0,), (2,), (3,)), "embedding_lags": ()},
    "split residual": {
        "source_layers": ((0,), (2,), (3,)),
        "embedding_lags": (),
        "residual_width": 4,
    },
}


def layer(kv_heads: int, key_dim: int, value_dim: int) -> LayerGeometry:
    return LayerGeometry(kv_heads, key_dim, value_dim, None, LayerRope(None, "half", "half", key_dim))


SOURCE = Geometry((layer(2, 4, 3),) * 4, HIDDEN, VOCABULARY, 64)
TARGET = Geometry((layer(1, 6, 5), layer(4, 2, 2), layer(2, 5, 5)), HIDDEN, VOCABULARY, 64)


def made(kind: str, dtype: torch.dtype = torch.float64) -> Translator:
    """Return maps that nothing about is 0 or 1, of features whose means are far above their spread and differ by layer."""
    torch.manual_seed(1)
    of = TranslatorConfig(SOURCE, TARGET, **{"source_layers": ((0, 1), (1, 2), (2, 3)), **KINDS[kind]})
    translator = Translator(of)
    if kind.startswith("split"):
        translator = split(translator)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.normal_()
        for number, layer_map in enumerate(translator.maps.values()):
            assert isinstance(layer_map, LayerMap)
            layer_map.feature_mean.fill_(100.0 + number)
            layer_map.feature_scale.uniform_(0.5, 2.0)
            if layer_map.norm_kind:
                layer_map.key_norm_weight.uniform_(0.5, 2.0)
    return translator.to(dtype).eval()


def split(translator: Translator) -> Translator:
    """Put maps that take keys to keys and values to values, each across heads, in the place of linear ones."""
    for number, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        read = SOURCE.layers[translator.config.source_layers[int(number)][0]]
        shape = layer_map.shape
        layer_map.linear = SplitMap((read.key_width, read.value_width), (shape.key_width, shape.value_width))
    return translator


def source_kv(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> KV:
    torch.manual_seed(2)

    def drawn(heads: int, dim: int) -> Tensor:
        return 100 + torch.randn(1, heads, tokens, dim, dtype=torch.float64).to(dtype)

    layers = SOURCE.layers
    return KV(
        tuple(drawn(x.kv_heads, x.key_dim) for x in layers),
        tuple(drawn(x.kv_heads, x.value_dim) for x in layers),
        tokens,
    )


TABLE = 100 + torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
IDS = torch.randint(VOCABULARY, (50,), generator=torch.Generator().manual_seed(4))
ALIGNMENTS = {
    "same tokens": torch.arange(5, 35),
    "repeated and left out": torch.randint(3, (30,), generator=torch.Generator().manual_seed(5))
    .cumsum(0)
    .clamp(max=39),
    "back and forth": torch.randperm(30, generator=torch.Generator().manual_seed(6)),
}


def both(translator: Translator, alignment: Tensor, source: KV | None = None, **options: Any) -> tuple[KV, KV]:
    """Return what the plain way and the fast way give."""
    dtype = next(translator.parameters()).dtype
    source = source or source_kv(dtype)
    reads = translator.config.reads_text
    rows = embedded(lambda ids: translator.read_text(TABLE[ids].to(dtype)), IDS) if reads else None
    first = KV((torch.zeros(1, 1, 30, 6, dtype=dtype),), (torch.zeros(1, 1, 30, 5, dtype=dtype),), 30)
    arguments: dict[str, Any] = {"start": 7, "native": first if reads else None, **options}
    plain = translator(source, alignment, rows, **arguments)
    with torch.no_grad():
        fast = translator(source, alignment, rows, **arguments)
    assert translator._folded is not None
    return plain, fast


def assert_close(plain: KV, fast: KV, within: float) -> None:
    assert plain.tokens == fast.tokens
    for a, b in zip((*plain.keys, *plain.values), (*fast.keys, *fast.values), strict=True):
        torch.testing.assert_close(a.detach(), b, atol=within, rtol=within)


@pytest.mark.parametrize("skip", [[0, 0, 0], [30, 4, 17], [3, 29, 30]], ids=str)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_way_gives_what_the_plain_way_gives(kind: str, alignment: str, skip: list[int]) -> None:
    assert_close(*both(made(kind), ALIGNMENTS[alignment], skip=skip), within=1e-9)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("kind", ["token before", "scattered layers", "lowrank residual"])
def test_chunks_give_what_one_piece_gives(kind: str, alignment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "CHUNK_BYTES", 1)
    monkeypatch.setattr(folding, "LEAST_ROWS", 7)
    assert_close(*both(made(kind), ALIGNMENTS[alignment], skip=[0, 2, 11]), within=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_in_single_precision_a_mean_far_above_the_spread_costs_nothing(kind: str) -> None:
    plain, fast = both(made(kind, torch.float32), ALIGNMENTS["repeated and left out"])
    exact, _ = both(made(kind), ALIGNMENTS["repeated and left out"])
    scale = max(float(x.abs().max()) for x in (*exact.keys, *exact.values))
    assert_close(plain, fast, within=2e-5 * scale)


def test_a_gap_in_the_source_costs_nothing() -> None:
    translator, tokens = made("token before"), 3000
    alignment = torch.cat((torch.arange(1, 16), torch.arange(tokens - 15, tokens)))
    source = source_kv(tokens=tokens)
    assert_close(*both(translator, alignment, source), within=1e-9)
    folded = translator._folded
    assert folded is not None
    panel = folded._source_features([1, 2], source, alignment)
    assert panel is not None
    assert len(panel.rows) == 32, "the tokens that are read, and those before them"
    panel = folded._source_features([1, 2], source, torch.arange(1, 41))
    assert panel is not None
    assert len(panel.rows) == 41


def test_only_the_source_tokens_that_are_read_need_be_there() -> None:
    whole = source_kv()
    held = replace(
        whole, keys=tuple(k[:, :, 15:] for k in whole.keys), values=tuple(v[:, :, 15:] for v in whole.values)
    )
    alignment = torch.arange(5, 35)
    translator = made("token before")
    plain, _ = both(translator, alignment, whole, skip=[30, 11, 11])
    _, fast = both(translator, alignment, held, skip=[30, 11, 11])
    assert_close(plain, fast, within=1e-9)


def test_products_are_rounded_where_the_result_is() -> None:
    """bfloat16 has 8 bits: what it costs is far below what any translation is off by, and no other target pays it."""
    translator = made("token before", torch.float32)
    exact, same = both(translator, ALIGNMENTS["same tokens"])
    _, short = both(translator, ALIGNMENTS["same tokens"], rounded=torch.bfloat16)
    assert_close(exact, same, within=1e-3)
    for layer_number in (1, 2):
        assert short.keys[layer_number].dtype == torch.bfloat16
        off = float(
            (short.keys[layer_number].float() - exact.keys[layer_number]).norm() / exact.keys[layer_number].norm()
        )
        assert 1e-4 < off < 2e-2
    assert all(p.dtype == torch.float32 for p in translator.parameters())


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("kind", ["token before", "lowrank", "headwise", "split residual"])
def test_maps_that_ask_for_it_multiply_in_bfloat16_where_that_is_fast(
    kind: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "is_fast_in_bfloat16", lambda _: is_fast)
    translator = made(kind, torch.float32)
    _, exact = both(translator, ALIGNMENTS["same tokens"])
    translator.multiply_in_bfloat16(True)
    _, asked = both(translator, ALIGNMENTS["same tokens"])
    assert {x.dtype for x in (*asked.keys, *asked.values)} == {torch.float32}
    assert translator._folded is not None
    assert translator._folded.dtype == (torch.bfloat16 if is_fast else torch.float32)
    for a, b in zip((*asked.keys[1:], *asked.values[1:]), (*exact.keys[1:], *exact.values[1:]), strict=True):
        off = float((a.float() - b).norm() / b.norm())
        assert (1e-4 < off < 2e-2) if is_fast else off == 0


def test_maps_in_half_precision_are_multiplied_in_it() -> None:
    translator = made("token before", torch.float32).half()
    translator.multiply_in_bfloat16(True)
    assert folding.product_dtype(translator.maps, torch.float16) == torch.float16
    assert folding.product_dtype(translator.maps, torch.bfloat16) == torch.float16


def test_a_source_of_another_dtype_is_read() -> None:
    translator = made("token before", torch.float32)
    short = source_kv(torch.bfloat16)
    plain, fast = both(translator, ALIGNMENTS["same tokens"], short)
    assert_close(plain, fast, within=1e-3)


# --- when it is folded anew --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["linear.down", "linear.up", "bias", "feature_mean", "feature_scale", "residual.enter.bias"]
)
def test_a_changed_map_is_folded_anew(name: str) -> None:
    translator = made("lowrank residual")
    _, before = both(translator, ALIGNMENTS["same tokens"])
    with torch.no_grad():
        translator.maps["1"].state_dict()[name].mul_(1.5)
    plain, after = both(translator, ALIGNMENTS["same tokens"])
    assert_close(plain, after, within=1e-9)
    assert not torch.allclose(before.keys[1], after.keys[1])
    translator.load_state_dict({key: value + 1 for key, value in translator.state_dict().items()})
    assert_close(*both(translator, ALIGNMENTS["same tokens"]), within=1e-9)


def test_weights_that_were_put_in_place_of_others_are_used() -> None:
    """The folded copy is of these tensors, not of whatever stood at their address."""
    translator = made("linear")
    linear = translator.maps["1"].get_submodule("linear")
    for _ in range(30):
        weight = torch.randn_like(linear.get_parameter("weight"))
        del linear.weight
        linear.register_parameter("weight", torch.nn.Parameter(weight))
        assert_close(*both(translator, ALIGNMENTS["same tokens"]), within=1e-9)


def test_nothing_is_folded_anew_for_nothing() -> None:
    translator = made("linear")
    both(translator, ALIGNMENTS["same tokens"])
    folded = translator._folded
    both(translator, ALIGNMENTS["back and forth"])
    assert translator._folded is folded
    assert translator.double()._folded is None


def test_what_is_learnt_goes_the_plain_way() -> None:
    translator = made("no text")
    assert translator(source_kv(), ALIGNMENTS["same tokens"], None).keys[1].requires_grad
    assert translator._folded is None


def test_maps_of_another_structure_go_the_plain_way() -> None:
    translator = made("no text")
    first = translator.maps["0"]
    first.linear = torch.nn.Linear(first.linear.get_parameter("weight").shape[0], TARGET.layers[0].width).double()  # type: ignore[union-attr]
    with torch.no_grad():
        translator(source_kv(), ALIGNMENTS["same tokens"], None)
    assert translator._folded is None


@pytest.mark.parametrize("kind", ["headwise", "headwise, scattered", "split"])
def test_heads_that_see_each_other_only_are_multiplied_by_themselves(kind: str) -> None:
    """No zeros are multiplied: the folded weights are those of the map, and the text's where it is read."""
    translator = made(kind)
    both(translator, ALIGNMENTS["same tokens"])
    folded = translator._folded
    assert folded is not None
    for layer_number, one in folded.maps.items():
        mine = sum(x.numel() for part in one.parts for x in (part.source, part.text) if x is not None)
        theirs = translator.maps[str(layer_number)].get_submodule("linear").parameters()
        assert mine == sum(x.numel() for x in theirs)


def test_layers_are_mapped_in_groups_that_leave_room_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = made("no text", torch.float32)
    both(translator, ALIGNMENTS["same tokens"])
    folded = translator._folded
    assert folded is not None
    row = 4 * SOURCE.layers[0].width  # bytes of one layer of one token
    monkeypatch.setattr(folding, "CHUNK_BYTES", 3 * row * 20)
    assert [list(g) for g in folded._groups([0, 1, 2], 20)] == [[0, 1], [2]], (
        "two target layers read three source layers"
    )
    assert [list(g) for g in folded._groups([0, 1, 2], 15)] == [[0, 1, 2]]
    assert [list(g) for g in folded._groups([0, 1, 2], 21)] == [[0], [1], [2]]
    assert_close(*both(translator, ALIGNMENTS["back and forth"]), within=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["no text", "linear"])
def test_what_is_missing_is_named(kind: str) -> None:
    translator = made(kind)
    native = KV((torch.zeros(1, 1, 30, 6),), (torch.zeros(1, 1, 30, 5),), 30)
    with pytest.raises(IncompatiblePair, match="source cache; give one"):
        translator(None, ALIGNMENTS["same tokens"], TABLE, native=native)
    if kind == "linear":
        with pytest.raises(IncompatiblePair, match="embeddings; give"):
            translator(source_kv(), ALIGNMENTS["same tokens"], None, native=native)


def test_too_few_tokens_do_not_fill_a_panel() -> None:
    """PyTorch would resize what it was to write into, with a warning, and leave the panel as it was."""
    with pytest.raises(ValueError, match="do not fill"):
        folding.put_centred(torch.ones(2, 3, 4), torch.zeros(8), torch.empty(5, 8))
