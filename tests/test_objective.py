"""Several hand-overs from one text: each is the hand-over that its text alone would give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvlingo.alignment import align
from kvlingo.corpus import Example, common_ends, random_examples
from kvlingo.models import LanguageModel
from kvlingo.objective import Cut, draw_cuts, example_loss
from kvlingo.pairing import proportional, window
from kvlingo.reading import first_tokens, read_text
from kvlingo.translator import Translator, TranslatorConfig
from tests import tiny

NEW = 6


def pair() -> tuple[LanguageModel, LanguageModel]:
    """A source whose tokens are longer than the target's, so that not every place is one where both end."""
    return tiny.language_model("llama", tokenizer=tiny.merging_tokenizer(), seed=3, name="source"), tiny.language_model(
        "gemma3"
    )


def some_translator(source: LanguageModel, target: LanguageModel) -> Translator:
    centres = proportional(len(target.geometry), len(source.geometry))
    layers = tuple(window(c, 1, len(source.geometry)) for c in centres)
    translator = Translator(TranslatorConfig(source.geometry, target.geometry, layers, source_lags=(0, 1))).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in translator.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return translator


def text_example(chat_share: float = 0.0) -> Example:
    source, target = pair()
    return random_examples(
        tiny.documents(),
        source.tokenizer,
        target.tokenizer,
        context_tokens=(48,),
        continuation_tokens=NEW,
        chat_share=chat_share,
        seed="text",
        count=1,
    )[0]


def alone(example: Example, tokens: int) -> Example:
    """Make the hand-over after `tokens` tokens from its own text, tokenised anew."""
    source, _ = pair()
    reading = first_tokens(example.target, tokens)
    text = reading.stream[reading.contents[0][0] :].decode()
    source_reading = read_text(source.tokenizer, text)
    after = (*example.target.ids, *example.continuation)[tokens : tokens + NEW]
    return replace(
        example, source=source_reading, target=reading, continuation=after, alignment=align(source_reading, reading)
    )


def test_the_loss_of_several_hand_overs_is_the_mean_of_each_alone() -> None:
    source, target = pair()
    translator, example = some_translator(source, target), text_example()
    places = [n for n in common_ends(example) if n >= 12]
    chosen = (places[0], places[len(places) // 2], example.context_tokens)
    cuts = tuple(Cut(n, tail) for n, tail in zip(chosen, (1, 3, 2), strict=True))
    together = example_loss(translator, source, target, example, cuts, 0.3)
    each = [example_loss(translator, source, target, alone(example, cut.tokens), (replace(cut),), 0.3) for cut in cuts]
    assert len({round(float(x.detach()), 3) for x in each}) == 3, "hand-overs too alike to tell apart"
    assert float(together.detach()) == pytest.approx(float(torch.stack(each).mean().detach()), abs=1e-9)
    mine = torch.autograd.grad(together, list(translator.parameters()))
    theirs = torch.autograd.grad(torch.stack(each).mean(), list(translator.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)


def test_common_ends_are_where_both_models_have_read_the_same_bytes() -> None:
    example = text_example()
    ends = common_ends(example)
    assert example.context_tokens in ends
    assert 0 < len(ends) < example.context_tokens, (
        "every place is a common end: the tokenizers are too alike for this test"
    )
    for n in ends:
        read_by_source = example.source.spans[int(example.alignment[n - 1])][1] - example.source.contents[0][0]
        assert read_by_source == example.target.spans[n - 1][1] - example.target.contents[0][0]
    assert alone(example, ends[3]).source.ids == example.source.ids[: len(alone(example, ends[3]).source.ids)]


def test_a_chat_is_handed_over_at_its_end_only() -> None:
    chat = text_example(chat_share=1.0)
    assert len(chat.target.contents) > 1
    assert draw_cuts(chat, 4, (2,), random.Random(0)) == (Cut(chat.context_tokens, 2),)


def test_cuts_are_drawn_in_order_and_end_with_the_context() -> None:
    example = text_example()
    seen = set()
    for seed in range(20):
        cuts = draw_cuts(example, 4, (1, 8), random.Random(seed))
        tokens = [cut.tokens for cut in cuts]
        assert tokens == sorted(set(tokens))
        assert tokens[-1] == example.context_tokens
        assert len(tokens) == 4
        seen |= set(tokens)
    assert len(seen) > 8
