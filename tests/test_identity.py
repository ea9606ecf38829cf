"""model -> itself: whatever the whole path changes is an error of the path, not of a map.

Each check is also shown to fail: with two layers swapped, and with positions off by one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from kvlingo.assembling import assemble, continuation_logits
from kvlingo.cache_writing import write_cache
from kvlingo.generation import generate
from kvlingo.handoff import hand_off
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, first_layers, native_layers, prefill, read, read_sinks
from kvlingo.plan import plan_handoff
from kvlingo.rope import Rotary
from kvlingo.states import ModelState, read_conversation, read_native
from kvlingo.translator import Translator, identity_translator
from tests import families, tiny
from tests.padded import padded_error

T = TypeVar("T")
EXACT = families.EXACTLY  # float64
BROKEN = 1e-3
PREFIXES = families.CHUNKS
NEW = (1, 5)
GREEDY = 10

FAMILY = pytest.mark.parametrize("family", families.EXACT)
# Families whose keys hold no position can't be broken by a wrong one.
ROTARY = pytest.mark.parametrize("family", [f for f in families.EXACT if f not in ("bloom", "mpt")])


def identity(lm: LanguageModel) -> Translator:
    return identity_translator(lm.geometry, torch.float64)


def through_kv(lm: LanguageModel, kv: KV, ids: Tensor, rotary: Rotary | None = None) -> Tensor:
    """Write a KV into a cache and let the model read the rest of `ids`."""
    cache = write_cache(kv, rotary or lm.rotary, lm.geometry, lm.model.config)
    return prefill(lm, ids[kv.tokens :], cache=cache, logits_to_keep=0).logits


def error(lm: LanguageModel, kv: KV, ids: Tensor, rotary: Rotary | None = None) -> float:
    got, cold = through_kv(lm, kv, ids, rotary), tiny.cold_logits(lm, ids)
    return float((got - cold[-len(got) :]).abs().max())


def alike(lm: LanguageModel) -> tuple[int, int]:
    """Return the first two layers whose tensors have the same shapes."""
    shapes = [(x.kv_heads, x.key_dim, x.value_dim) for x in lm.geometry.layers]
    return next((i, j) for i in range(len(shapes)) for j in range(i + 1, len(shapes)) if shapes[i] == shapes[j])


def exchanged(layers: Sequence[T], pair: tuple[int, int]) -> tuple[T, ...]:
    mixed = list(layers)
    mixed[pair[0]], mixed[pair[1]] = mixed[pair[1]], mixed[pair[0]]
    return tuple(mixed)


def swapped(lm: LanguageModel, kv: KV) -> KV:
    return KV(exchanged(kv.keys, alike(lm)), exchanged(kv.values, alike(lm)), kv.tokens)


class OffByOne(Rotary):
    """Writes every key one position too late."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__(rotary._angles, rotary.layers)

    def rotate(self, keys: Tensor, layer: int, positions: Tensor) -> Tensor:
        return super().rotate(keys, layer, positions + 1)

    def put(self, states: tuple[Tensor, Tensor], layer: int, positions: Tensor, room: tuple[Tensor, Tensor]) -> None:
        super().put(states, layer, positions + 1, room)


@torch.no_grad()
def planned(lm: LanguageModel, translator: Translator, ids: Tensor, tail: int, layers: int = 0) -> KV:
    """Plan a hand-over of the model to itself and assemble the cache before the tail."""
    alignment = torch.arange(len(ids))
    plan = plan_handoff(alignment.tolist(), tail=tail, native_layers=layers)
    return assemble(plan, lm, translator, read(lm, ids[: len(ids) - tail]), alignment, ids)


# --- exact -----------------------------------------------------------------------------------------------------------


@FAMILY
def test_identity_of_reading_and_writing(family: str) -> None:
    lm = families.language_model(family)
    for prefix in PREFIXES:
        for new in NEW:
            ids = tiny.ids_of(lm, prefix + new, seed=prefix)
            assert error(lm, read(lm, ids[:prefix]), ids) < families.allowed(family), (prefix, new)


@FAMILY
def test_identity_of_a_hand_off(family: str) -> None:
    lm = families.language_model(family)
    translator = identity(lm)
    for prefix in PREFIXES:
        for new in NEW:
            text = tiny.text_of_tokens(prefix + new, seed=prefix)
            ids = tiny.ids_of(lm, prefix + new, seed=prefix)
            done = hand_off(text, lm, lm, translator, tail=new)
            assert done.plan.fallback is None
            assert done.plan.translated == (1, prefix)
            assert done.state.cache.get_seq_length() == prefix + new
            assert done.logits is not None
            gap = float((done.logits - tiny.cold_logits(lm, ids)[-1]).abs().max())
            assert gap < families.allowed(family), (prefix, new)


@FAMILY
def test_identity_of_a_continuation_and_native_layers(family: str) -> None:
    lm = families.language_model(family)
    ids, translator = tiny.ids_of(lm, 35), identity(lm)
    cold = tiny.cold_logits(lm, ids)
    for tail in NEW:
        context = ids[:30]
        for layers in (0, 1, 2):
            kv = planned(lm, translator, context, tail, layers)
            got = continuation_logits(lm, kv, context[-tail:], ids[30:])
            assert float((got - cold[29:34]).abs().max()) < families.allowed(family), (tail, layers)


@FAMILY
def test_identity_of_greedy_tokens(family: str) -> None:
    lm = families.language_model(family)
    translator = identity(lm)
    for prefix in (tiny.WINDOW - 1, 30):
        text = tiny.text_of_tokens(prefix + 1, seed=prefix)
        done = hand_off(text, lm, lm, translator)
        assert done.logits is not None
        stream = generate(lm, done.state, done.logits, max_new_tokens=GREEDY, stop_at_eos=False)
        stream.text()
        assert stream.ids == tiny.cold_greedy(lm, tiny.ids_of(lm, prefix + 1, seed=prefix), GREEDY)


@FAMILY
def test_identity_of_a_padded_batch(family: str) -> None:
    """Three rows shorter than the window, as long, and longer, padded on the left, read and gone on from side by side."""
    one = families.FAMILIES[family]
    lm = families.language_model(family, one.padded)
    within = families.allowed(family) if one.padded == torch.float64 else 1e-3
    for new in NEW:
        assert padded_error(lm, (tiny.WINDOW - 1, tiny.WINDOW, 30), new) < within, new


@FAMILY
def test_identity_of_a_padded_batch_fails_with_two_layers_swapped(family: str) -> None:
    lm = families.language_model(family, families.FAMILIES[family].padded)
    assert padded_error(lm, (tiny.WINDOW - 1, tiny.WINDOW, 30), 5, lambda kv: swapped(lm, kv)) > 10 * BROKEN


@FAMILY
def test_identity_of_the_first_layers(family: str) -> None:
    lm = families.language_model(family)
    ids = tiny.ids_of(lm, 30)
    whole, within = read(lm, ids), families.allowed(family)
    for count in (1, 2):
        part = native_layers(lm, ids, count)
        assert len(part) == count
        assert part.tokens == 30
        for layer in range(count):
            assert part.held(layer) == 30
            torch.testing.assert_close(part.keys[layer], whole.keys[layer], atol=within, rtol=0)
            torch.testing.assert_close(part.values[layer], whole.values[layer], atol=within, rtol=0)


def test_layer_zero_is_read_without_its_mlp_and_leaves_the_cache_layers_alone() -> None:
    """Nothing after layer 0's keys and values is computed: three times the work of what is needed."""
    lm = tiny.language_model("gemma3")
    ids, seen = tiny.ids_of(lm, 12), list[str]()
    layer = lm.model.model.layers[0]
    hooks = [m.register_forward_pre_hook(lambda *_, name=n: seen.append(name)) for n, m in layer.named_modules()]
    native_layers(lm, ids, 1)
    assert "self_attn.k_proj" in seen
    assert not any(name.startswith("mlp") or name == "self_attn.o_proj" for name in seen)
    native_layers(lm, ids, 2)
    assert any(name.startswith("mlp") for name in seen)
    for hook in hooks:
        hook.remove()


def test_what_many_conversations_begin_with_is_read_once_and_text_is_not_remembered() -> None:
    lm = replace(tiny.language_model("gemma3"), sinks={})
    ids, passes = tiny.ids_of(lm, 12), list[int]()
    wanted = read(lm, ids[:3])
    hook = lm.model.model.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(3):
        torch.testing.assert_close(read_sinks(lm, ids[:3], opening=3).keys[1], wanted.keys[1], atol=0, rtol=0)
    assert len(passes) == 1
    for _ in range(2):
        read_sinks(lm, ids[:4], opening=3)  # one token of a text among them
        read_sinks(lm, ids[:12], opening=12)  # longer than any template's beginning
    assert len(passes) == 5
    hook.remove()
    assert list(lm.sinks) == [(lm.dtype, lm.device, *ids[:3].tolist())]


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic", "gemma3", "deepseek-v3"])
def test_identity_with_source_layers_that_no_map_reads(family: str) -> None:
    """With the first layer native, the source's first layer is not read at all: not even its angles are asked for."""
    lm, text = families.language_model(family), tiny.text_of_tokens(30)
    done = hand_off(text, lm, lm, identity(lm), native_layers=1)
    assert done.plan.fallback is None
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=families.allowed(family), rtol=0)


def test_a_model_of_other_weights_in_place_is_not_remembered() -> None:
    lm = replace(tiny.language_model("llama"), sinks={})
    ids = tiny.ids_of(lm, 3)
    read_sinks(lm, ids, opening=3)
    lower = replace(lm, model=copy.deepcopy(lm.model).float())
    assert read_sinks(lower, ids, opening=3).keys[0].dtype == torch.float32


def test_a_chat_opens_with_its_template_and_a_text_with_bos_alone() -> None:
    lm = replace(tiny.language_model("gemma3"), sinks={})
    chat = read_conversation([{"role": "user", "content": "hello"}], lm, add_generation_prompt=True)
    assert b"hello" not in lm.tokenizer.decode(chat.ids[: chat.opening]).encode()
    assert lm.tokenizer.decode(chat.ids[chat.opening :]).startswith("hello")
    text = read_conversation("hello", lm, add_generation_prompt=True)
    assert text.opening == sum(i == lm.tokenizer.bos_token_id for i in text.ids)
    for said in ("hello there, you two", "another text altogether"):
        state = read_native([{"role": "user", "content": said}], lm)
        hand_off([{"role": "user", "content": said}], lm, lm, identity(lm), source_state=state)
    assert len(lm.sinks) <= 1, "nothing that one of them said"


def test_the_first_layers_share_the_weights_and_leave_the_model_alone() -> None:
    lm = tiny.language_model("gemma3")
    before = len(lm.model.model.layers), lm.model.config.num_hidden_layers, list(lm.model.config.layer_types)
    mine = {p.data_ptr() for p in lm.model.parameters()}
    assert {p.data_ptr() for p in first_layers(lm.model, 2).parameters()} <= mine
    assert before == (len(lm.model.model.layers), lm.model.config.num_hidden_layers, lm.model.config.layer_types)


def test_identity_over_two_hand_offs_with_what_was_said_between() -> None:
    lm = tiny.language_model("gemma3")
    translator, text = identity(lm), tiny.text_of_tokens(20)
    first = hand_off(text, lm, lm, translator)
    assert first.logits is not None
    stream = generate(lm, first.state, first.logits, max_new_tokens=6, stop_at_eos=False)
    stream.text()
    held = stream.state.reading.ids
    assert held == tuple(tiny.ids_of(lm, 20).tolist() + stream.ids[:-1])
    following = prefill(lm, lm.ids([stream.ids[-1]]), cache=stream.state.cache).logits[-1]
    cold = tiny.cold_logits(lm, torch.tensor([*held, stream.ids[-1]]))[-1]
    assert float((following - cold).abs().max()) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@FAMILY
def test_identity_at_the_noise_floor_of_smaller_dtypes(family: str, dtype: torch.dtype) -> None:
    """No further from cold than the model's own chunked prefill is, give or take."""
    lm = families.language_model(family, dtype)
    ids = tiny.ids_of(lm, 35)
    cold = tiny.cold_logits(lm, ids)[-5:]
    chunked = prefill(lm, ids[30:], cache=prefill(lm, ids[:30]).cache, logits_to_keep=0).logits
    got = through_kv(lm, read(lm, ids[:30]), ids)
    floor = tiny.kl(cold.double(), chunked.double()).max()
    allowed = max(3 * float(floor), {torch.float32: 1e-9, torch.bfloat16: 2e-2}[dtype])
    assert float(tiny.kl(cold.double(), got.double()).max()) <= allowed


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@FAMILY
def test_identity_whatever_computes_attention(family: str, implementation: str) -> None:
    """The same cache serves every attention implementation that the family has."""
    lm = families.language_model(family)
    before = lm.model.config._attn_implementation
    try:
        lm.model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{family} has no {implementation} attention in transformers")
    try:
        within = max(families.FAMILIES[family].within, families.allowed_now(lm))
        for prefix in PREFIXES:
            ids = tiny.ids_of(lm, prefix + 5, seed=prefix)
            assert error(lm, read(lm, ids[:prefix]), ids) < within < BROKEN, prefix
    finally:
        lm.model.set_attn_implementation(before)


# --- and the checks can fail -----------------------------------------------------------------------------------------


@FAMILY
def test_identity_fails_with_two_layers_swapped(family: str) -> None:
    lm = families.language_model(family)
    for prefix in PREFIXES:
        ids = tiny.ids_of(lm, prefix + 5, seed=prefix)
        assert error(lm, swapped(lm, read(lm, ids[:prefix])), ids) > BROKEN, prefix


@ROTARY
def test_identity_fails_with_positions_off_by_one(family: str) -> None:
    lm = families.language_model(family)
    for prefix in PREFIXES:
        if family == "llama4" and prefix % tiny.WINDOW == 0:
            continue  # a new chunk sees nothing of the one before, and its other layers have no positions
        ids = tiny.ids_of(lm, prefix + 5, seed=prefix)
        assert error(lm, read(lm, ids[:prefix]), ids, OffByOne(lm.rotary)) > BROKEN, prefix


@ROTARY
def test_identity_of_a_hand_off_fails_when_it_should(family: str) -> None:
    lm = families.language_model(family)
    text, ids = tiny.text_of_tokens(31), tiny.ids_of(lm, 31)
    cold = tiny.cold_logits(lm, ids)[-1]
    state = read_native(text, lm)
    crossed = identity(lm)
    crossed.config = replace(crossed.config, source_layers=exchanged(crossed.config.source_layers, alike(lm)))
    shifted = replace(lm, rotary=OffByOne(lm.rotary))
    for broken in (
        hand_off(text, lm, lm, crossed, source_state=state),
        hand_off(text, lm, shifted, identity(lm), source_state=state),
        hand_off(text, lm, lm, identity(lm), source_state=of_another_text(lm)),
    ):
        assert broken.plan.fallback is None
        assert broken.logits is not None
        assert float((broken.logits - cold).abs().max()) > BROKEN


def of_another_text(lm: LanguageModel) -> ModelState:
    """A state that claims to hold one text and holds another."""
    state, other = read_native(tiny.text_of_tokens(31), lm), read_native(tiny.text_of_tokens(31, seed=9), lm)
    return replace(state, cache=other.cache)
