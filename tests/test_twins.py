"""Planted twins: two models with the same outputs and different caches, so that the exact map is known to exist.

`fit(model, twin)` alone has to find it, from text, through the whole path.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo.fitting import Fit, fit
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, read
from kvlingo.models import wrap
from kvlingo.plan import SpanKind
from kvlingo.shapes import FitOptions
from tests import tiny

SAME = 1e-9  # float64 logits of two twins
SAME_NORMED = 1e-5  # the models' own norms compute in float32, and these twins' norms see other numbers
EXACT_NATS = 1e-6
OPTIONS = FitOptions(
    reach=0,
    shift=0,
    tokens=2000,
    context_tokens=(48, 96),
    chat_share=0.2,
    held_out_share=0.2,
    held_out_examples=2,
)


# --- building twins --------------------------------------------------------------------------------------------------


def heads_of(weight: Tensor, heads: int) -> Tensor:
    """[heads * dim, inputs] -> [heads, dim, inputs]."""
    return weight.unflatten(0, (heads, -1))


def spread(per_kv_head: Tensor, query_heads: int) -> Tensor:
    """[kv heads, ...] -> [query heads, ...], the head that each query head reads."""
    return per_kv_head.repeat_interleave(query_heads // len(per_kv_head), 0)


@torch.no_grad()
def rebase_values(model: Any) -> None:
    """Write values in another basis, head by head, and undo it in the output projection."""
    for layer in model.model.layers:
        attention, config = layer.self_attn, model.config
        dim, count = attention.head_dim, config.num_key_value_heads
        basis = torch.eye(dim, dtype=torch.float64) + 0.5 * torch.randn(count, dim, dim, dtype=torch.float64)
        rows = heads_of(attention.v_proj.weight, count)
        attention.v_proj.weight.copy_((basis @ rows).flatten(0, 1))
        inverse = spread(torch.linalg.inv(basis), config.num_attention_heads)
        columns = attention.o_proj.weight.unflatten(1, (-1, dim))  # [outputs, query heads, dim]
        attention.o_proj.weight.copy_(torch.einsum("ohd,hde->ohe", columns, inverse).flatten(1))


def turn_planes(weight: Tensor, heads: int, angles: Tensor) -> Tensor:
    """Rotate the rows of each RoPE plane (i, i + dim/2) by a constant angle [heads, planes]."""
    x, y = heads_of(weight, heads).chunk(2, dim=1)
    cos, sin = angles.cos()[..., None], angles.sin()[..., None]
    return torch.cat((x * cos - y * sin, x * sin + y * cos), 1).flatten(0, 1)


@torch.no_grad()
def turn_keys(model: Any) -> None:
    """Rotate keys and queries alike inside each RoPE plane: a rotation there commutes with RoPE."""
    for layer in model.model.layers:
        attention, config = layer.self_attn, model.config
        angles = 6 * torch.rand(config.num_key_value_heads, attention.head_dim // 2, dtype=torch.float64)
        attention.k_proj.weight.copy_(turn_planes(attention.k_proj.weight, len(angles), angles))
        of_queries = spread(angles, config.num_attention_heads)
        attention.q_proj.weight.copy_(turn_planes(attention.q_proj.weight, len(of_queries), of_queries))


@torch.no_grad()
def even_key_norms(model: Any) -> None:
    """Give both dims of each plane one norm weight, so that rotating the plane commutes with the norm."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            half = len(norm.weight) // 2
            norm.weight[half:] = norm.weight[:half]


@torch.no_grad()
def rescale_key_norms(model: Any) -> None:
    """Scale each plane of the keys by the norm's weight, and the queries the other way."""
    one_plus = 1.0 if model.config.model_type.startswith("gemma") else 0.0
    for layer in model.model.layers:
        queries, keys = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
        factor = (torch.rand(len(keys) // 2, dtype=torch.float64) + 0.5).repeat(2)
        queries.copy_((queries + one_plus) / factor - one_plus)
        keys.copy_((keys + one_plus) * factor - one_plus)


@torch.no_grad()
def repeated_heads(model: Any, kv_heads: int) -> Any:
    """Return a copy in which every key-value head stands several times."""
    times = kv_heads // model.config.num_key_value_heads
    twin = tiny.scaled(tiny.llama(**{**shape_of(model), "num_key_value_heads": kv_heads}))
    copy_weights(model, twin)
    for mine, theirs in zip(twin.model.layers, model.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            weight = getattr(theirs.self_attn, name).weight
            old = heads_of(weight, model.config.num_key_value_heads)
            getattr(mine.self_attn, name).weight.copy_(old.repeat_interleave(times, 0).flatten(0, 1))
    return twin


@torch.no_grad()
def widened_heads(model: Any) -> Any:
    """Return a copy with heads twice as wide: old planes at the even places, zeros between, queries rescaled.

    The even frequencies of the wider head are the narrow head's. Attention divides by sqrt(dim), hence sqrt(2) on queries.
    """
    dim = model.config.head_dim
    kept = torch.cat((torch.arange(0, dim, 2), torch.arange(0, dim, 2) + dim))
    twin = tiny.scaled(tiny.llama(**{**shape_of(model), "head_dim": 2 * dim}))
    copy_weights(model, twin)
    for mine, theirs in zip(twin.model.layers, model.model.layers, strict=True):
        for name, gain in (("q_proj", 2**0.5), ("k_proj", 1.0), ("v_proj", 1.0)):
            old = getattr(theirs.self_attn, name).weight
            heads = heads_of(old, old.shape[0] // dim)
            wide = torch.zeros(len(heads), 2 * dim, old.shape[1], dtype=old.dtype)
            wide[:, kept] = gain * heads
            getattr(mine.self_attn, name).weight.copy_(wide.flatten(0, 1))
        old = theirs.self_attn.o_proj.weight.unflatten(1, (-1, dim))
        wide = torch.zeros(old.shape[0], old.shape[1], 2 * dim, dtype=old.dtype)
        wide[:, :, kept] = old
        mine.self_attn.o_proj.weight.copy_(wide.flatten(1))
    return twin


@torch.no_grad()
def deepened(model: Any, layers: int) -> Any:
    """Return a copy with layers added evenly whose output is zero."""
    count = model.config.num_hidden_layers
    places = [round(i * (layers - 1) / (count - 1)) for i in range(count)]
    twin = tiny.scaled(tiny.llama(**{**shape_of(model), "num_hidden_layers": layers}))
    copy_weights(model, twin)
    for index, layer in enumerate(twin.model.layers):
        if index in places:
            layer.load_state_dict(model.model.layers[places.index(index)].state_dict())
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return twin


def shape_of(model: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: getattr(model.config, name) for name in names}


def copy_weights(model: Any, twin: Any) -> None:
    """Copy every weight whose name and shape both have."""
    theirs = model.state_dict()
    mine = twin.state_dict()
    twin.load_state_dict({n: theirs[n] if n in theirs and theirs[n].shape == x.shape else x for n, x in mine.items()})


def rebased(model: Any) -> Any:
    """Return a copy with values in another basis and keys and queries turned."""
    twin = tiny.clone(model)
    rebase_values(twin)
    turn_keys(twin)
    return twin


# --- checking --------------------------------------------------------------------------------------------------------


def as_lm(model: Any, name: str = "twin") -> LanguageModel:
    return wrap(model, tiny.byte_tokenizer(), name=name)


def assert_twins(a: LanguageModel, b: LanguageModel, atol: float = SAME) -> None:
    """Same outputs, different caches, and a context that matters."""
    tiny.assert_context_matters(a)
    ids = tiny.ids_of(a, 40)
    torch.testing.assert_close(tiny.cold_logits(a, ids), tiny.cold_logits(b, ids), atol=atol, rtol=0)
    mine, theirs = read(a, ids), read(b, ids)
    same_shape = len(mine) == len(theirs) and mine.keys[1].shape == theirs.keys[1].shape
    assert not same_shape or float((mine.keys[1] - theirs.keys[1]).abs().max()) > 0.1


def assert_exact(source: LanguageModel, target: LanguageModel, fitted: Fit) -> None:
    """The target goes on from the translated cache as from its own: by fit's own judgement, and by ours."""
    assert fitted.held_out_kl_nats is not None
    assert fitted.held_out_kl_nats < EXACT_NATS
    text, tokens = tiny.text_of_tokens(70, seed=77), 70
    done = hand_off(text, source, target, fitted.translator)
    assert done.plan.fallback is None
    assert done.plan.count(SpanKind.TRANSLATED) > tokens / 2
    assert done.logits is not None
    cold = tiny.cold_logits(target, tiny.ids_of(target, tokens, seed=77))[-1]
    assert float(tiny.kl(cold[None], done.logits[None])) < EXACT_NATS


def check(a: Any, b: Any, options: FitOptions = OPTIONS) -> Fit:
    source, target = as_lm(a, "model"), as_lm(b)
    assert_twins(source, target, SAME_NORMED if options.key_norm else SAME)
    fitted = fit(source, target, tiny.documents(), options)
    assert_exact(source, target, fitted)
    return fitted


def model(**changes: Any) -> Any:
    return tiny.scaled(tiny.llama(**changes))


def with_options(**changes: Any) -> FitOptions:
    return FitOptions(**{**OPTIONS.__dict__, **changes})


# --- twins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [True, False], ids=["text", "no-text"])
def test_twin_in_another_basis(text: bool) -> None:
    one = model()
    check(one, rebased(one), OPTIONS if text else with_options(embedding_lags=()))


def test_twin_by_window_search() -> None:
    """More source layers than needed, and a centre to choose: still exact."""
    one = model()
    check(one, rebased(one), with_options(reach=1, shift=1, tokens=3000))


def test_twin_of_low_rank() -> None:
    """An exact map of full rank is within reach of the factored form."""
    one = model()
    check(one, rebased(one), with_options(map_kind="lowrank", rank=64))


def test_twin_by_heads() -> None:
    """A basis for each head is a map for each head."""
    one = model()
    check(one, rebased(one), with_options(map_kind="headwise"))


def test_twin_of_a_mlp_residual_starts_exact() -> None:
    one = model()
    check(one, rebased(one), with_options(residual_width=8))


@pytest.mark.parametrize(("few", "many"), [(2, 8), (1, 4)], ids=["gqa", "mqa"])
def test_twin_with_repeated_heads_and_back(few: int, many: int) -> None:
    one = model(num_attention_heads=8, num_key_value_heads=few)
    other = rebased(repeated_heads(one, many))
    check(one, other)
    check(other, one)


@pytest.mark.parametrize("head_dim", [8, 64])
def test_twin_with_wider_heads_and_back(head_dim: int) -> None:
    one = model(head_dim=head_dim, num_hidden_layers=2)
    other = rebased(widened_heads(one))
    check(one, other)
    check(other, one)


def test_twin_with_more_layers_and_back() -> None:
    one = model(num_hidden_layers=6)
    other = rebased(deepened(one, 10))
    options = with_options(reach=1, tokens=3000)
    check(one, other, options)
    check(other, one, options)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_twin_whose_keys_end_in_a_norm(family: str) -> None:
    """The map predicts what goes into the target's own key norm, and the norm finishes it."""
    one = tiny.clone(tiny.language_model(family).model)
    even_key_norms(one)
    other = rebased(one)
    rescale_key_norms(other)
    fitted = check(one, other, with_options(key_norm=True))
    assert fitted.translator.config.key_norms == ("head",) * len(one.model.layers)


def test_twin_over_all_heads_norm() -> None:
    """OLMo 2 norms all heads at once: only values may change their basis."""
    one = tiny.clone(tiny.language_model("olmo2").model)
    other = tiny.clone(one)
    rebase_values(other)
    with torch.no_grad():
        for layer in other.model.layers:
            attention = layer.self_attn
            factor = (torch.rand(2, 4, dtype=torch.float64) + 0.5).repeat(1, 2)  # one a plane of each key head
            attention.k_norm.weight.mul_(factor.flatten())
            attention.q_norm.weight.div_(spread(factor, 4).flatten())
    fitted = check(one, other, with_options(key_norm=True))
    assert set(fitted.translator.config.key_norms) == {"layer"}


# --- and the checks can fail -----------------------------------------------------------------------------------------


def test_twins_that_are_none_are_found_out() -> None:
    one = model()
    half_done = tiny.clone(one)
    turn_keys(half_done)
    with torch.no_grad():
        half_done.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(AssertionError):
        assert_twins(as_lm(one), as_lm(half_done))
    with pytest.raises(AssertionError):
        assert_twins(as_lm(one), as_lm(tiny.clone(one)))


def test_another_model_is_no_exact_twin() -> None:
    source, target = as_lm(model()), as_lm(tiny.scaled(tiny.llama(), seed=5))
    fitted = fit(source, target, tiny.documents(), OPTIONS)
    assert fitted.held_out_kl_nats is not None
    assert fitted.held_out_kl_nats > 1e-2
