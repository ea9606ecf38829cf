"""The model's own `generate()` after a hand-over: right from the first step, or a clear error; never quietly off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.generation import generate_arguments
from kvlingo.handoff import HandOff, hand_off
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import reprefill_plan
from kvlingo.probing import cache_argument
from kvlingo.states import ModelState, read_native
from kvlingo.translator import identity_translator
from tests import tiny

ROUNDED = 1e-5  # generate() gives logits back in float32
STEPS = 8
FAMILY = pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
LENGTHS = (tiny.WINDOW - 1, tiny.WINDOW, 30)


def handed(lm: LanguageModel, tokens: int, tail: int = 1) -> HandOff:
    done = hand_off(tiny.text_of_tokens(tokens), lm, lm, identity_translator(lm.geometry, torch.float64), tail=tail)
    assert done.plan.fallback is None
    return done


def run_generate(lm: LanguageModel, arguments: dict[str, Any]) -> tuple[list[int], Tensor]:
    """Return the ids of 8 steps and the logits [steps, vocabulary] they were chosen by."""
    out = lm.model.generate(
        **arguments,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, -STEPS:].tolist(), torch.cat(out.logits)


def assert_cold(lm: LanguageModel, ids: Tensor, got: tuple[list[int], Tensor]) -> None:
    chosen, logits = got
    assert chosen == tiny.cold_greedy(lm, ids, STEPS)
    cold = tiny.cold_logits(lm, torch.cat((ids, torch.tensor(chosen[:-1]))))[-STEPS:]
    assert float((logits - cold).abs().max()) < ROUNDED


@FAMILY
@pytest.mark.parametrize("tokens", LENGTHS)
def test_all_ids_and_a_full_mask(family: str, tokens: int) -> None:
    lm = tiny.language_model(family)
    ids, done = tiny.ids_of(lm, tokens), handed(lm, tokens)
    full = torch.ones(1, tokens)
    for arguments in (generate_arguments(lm, done.state), generate_arguments(lm, done.state, ids.tolist(), full)):
        assert_cold(lm, ids, run_generate(lm, arguments))
    # The state is as it was: the same again.
    assert done.state.cache.get_seq_length() == tokens
    assert_cold(lm, ids, run_generate(lm, generate_arguments(lm, done.state)))


@FAMILY
def test_new_ids_after_the_cached_ones(family: str) -> None:
    lm = tiny.language_model(family)
    ids, done = tiny.ids_of(lm, 34), handed(lm, 30)
    assert_cold(lm, ids, run_generate(lm, generate_arguments(lm, done.state, ids.tolist())))


@FAMILY
@pytest.mark.parametrize("mask", ["full", "tail", None])
def test_tail_ids_are_refused(family: str, mask: str | None) -> None:
    lm = tiny.language_model(family)
    ids, done = tiny.ids_of(lm, 34), handed(lm, 30)
    given = {"full": torch.ones(1, 34), "tail": torch.ones(1, 4), None: None}[mask]
    with pytest.raises(BadInput, match=r"got 4 ids that don't begin with the 30 in the cache; give all ids"):
        generate_arguments(lm, done.state, ids[30:].tolist(), given)


def test_a_mask_of_another_length_or_with_holes_is_refused() -> None:
    lm = tiny.language_model("llama")
    ids, done = tiny.ids_of(lm, 34), handed(lm, 30)
    holes = torch.ones(1, 34)
    holes[0, 3] = 0
    for mask in (torch.ones(1, 4), torch.ones(1, 30), holes):
        with pytest.raises(BadInput, match=r"attention mask of \d+ entries.*34 ids"):
            generate_arguments(lm, done.state, ids.tolist(), mask)


def test_ids_of_another_conversation_are_refused() -> None:
    lm = tiny.language_model("llama")
    done = handed(lm, 30)
    with pytest.raises(BadInput, match="don't begin with the 30 in the cache"):
        generate_arguments(lm, done.state, tiny.ids_of(lm, 34, seed=7).tolist())
    with pytest.raises(BadInput, match="got 20 ids"):
        generate_arguments(lm, done.state, tiny.ids_of(lm, 20).tolist())


def test_a_cache_that_can_not_give_its_last_token_back_is_refused() -> None:
    """Past its window, a cache as the model makes it holds just enough to go on: nothing can be read again."""
    lm = tiny.language_model("mistral")
    state = read_native(tiny.text_of_tokens(30), lm)
    slid = ModelState(state.reading, prefill(lm, tiny.ids_of(lm, 30)).cache, reprefill_plan(30, "x").spans)
    with pytest.raises(UnsupportedCache, match="out of its window"):
        generate_arguments(lm, slid)
    more = tiny.ids_of(lm, 31)
    assert_cold(lm, more, run_generate(lm, generate_arguments(lm, slid, more.tolist())))


def test_what_generate_does_with_a_wrong_cache_shows() -> None:
    """The checks above would see keys that stand one position off."""
    lm = tiny.language_model("llama")
    ids, done = tiny.ids_of(lm, 30), handed(lm, 30)
    arguments = generate_arguments(lm, done.state)
    for layer in arguments[cache_argument(lm.model)].layers:
        layer.keys = layer.keys.roll(1, 2)
    with pytest.raises(AssertionError):
        assert_cold(lm, ids, run_generate(lm, arguments))
