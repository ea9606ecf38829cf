"""From logits to text: which token, what text, what is told of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.serve.protocol import Piece, Sampling, Unsupported
from kvlingo.serve.sampling import Speech, StopText, TextStream, adjust, check, distribution
from tests import tiny

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0], dtype=torch.float64)


def naive(logits: Tensor, sampling: Sampling) -> list[float]:
    """The definition, token by token."""
    weights = {i: float(((logits[i] - logits.max()) / sampling.temperature).exp()) for i in range(len(logits))}
    order = sorted(weights, key=lambda i: -weights[i])[: sampling.top_k]
    kept, reached, whole = [], 0.0, sum(weights[i] for i in order)
    for i in order:
        if reached / whole < sampling.top_p:
            kept.append(i)
        reached += weights[i]
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.3),
        Sampling(1, top_k=2),
        Sampling(1, top_p=0.8),
        Sampling(1, top_k=3, top_p=0.7),
        Sampling(1, min_p=0.2),
        Sampling(1, temperature=1.7, top_k=4, top_p=0.95, min_p=0.05),
        Sampling(1, temperature=1e-4),
        Sampling(1, top_p=1e-9),
    ],
    ids=str,
)
def test_the_distribution_is_the_definition(sampling: Sampling) -> None:
    for seed in range(20):
        logits = 3 * torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(
            distribution(logits, sampling), torch.tensor(naive(logits, sampling), dtype=torch.float64)
        )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=1e-300),
        Sampling(1, top_p=1e-300),
        Sampling(1, temperature=1e-300, top_p=1e-300, min_p=1.0, top_k=3),
    ],
    ids=str,
)
def test_what_is_too_small_for_float32_leaves_the_likeliest(sampling: Sampling) -> None:
    check(sampling, len(LOGITS))
    assert distribution(LOGITS.float(), sampling).tolist() == [0, 0, 0, 0, 1]


def test_bias_and_penalties() -> None:
    sampling = Sampling(1, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 7.0})
    expected = LOGITS + torch.tensor([-0.5 - 3 * 0.25, 0, 0, 7.0, -0.75], dtype=torch.float64)
    torch.testing.assert_close(adjust(LOGITS, sampling, Counter({0: 3, 4: 1})), expected)
    assert LOGITS[3] == -1.0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0),
        Sampling(1, temperature=-1),
        Sampling(1, top_p=0),
        Sampling(1, top_k=0),
        Sampling(1, min_p=2),
        Sampling(1, stop=("",)),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_with_is_refused(sampling: Sampling) -> None:
    check(Sampling(1), 9)
    with pytest.raises(BadInput):
        check(sampling, 9)


def test_a_bias_for_a_token_that_is_not_there_is_refused_by_its_name() -> None:
    check(Sampling(1, logit_bias={8: 1.0}), 9)
    with pytest.raises(Unsupported, match="token 9, the model has 9") as refused:
        check(Sampling(1, logit_bias={9: 1.0}), 9)
    assert refused.value.param == "logit_bias"


# --- text ------------------------------------------------------------------------------------------------------------


def decode_of(tokenizer: object) -> object:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [tiny.byte_tokenizer, tiny.merging_tokenizer])
def test_a_stream_of_text_is_the_text_and_never_cuts_a_character(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice(["the ", "naïve ", "漢字", "😀", "€", "ing", "\n", " on"]) for _ in range(20))
        stream = TextStream(decode_of(tokenizer))  # type: ignore[arg-type]
        pieces = [stream.add(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert "".join(pieces) + stream.flush() == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_any_ids_stream_to_what_they_decode_to_at_once() -> None:
    tokenizer = tiny.byte_tokenizer()
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(len(tokenizer)) for _ in range(30)]
        stream = TextStream(decode_of(tokenizer))  # type: ignore[arg-type]
        assert "".join(map(stream.add, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_stop_strings_are_found_across_pieces_and_never_told() -> None:
    rng = random.Random(2)
    stopped = 0
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(12))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        edges = sorted(rng.sample(range(13), 4))
        filter_, told = StopText(stop), ""
        for a, b in zip([0, *edges], [*edges, 12], strict=True):
            told += filter_.add(text[a:b])
        told += filter_.flush()
        complete = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        assert filter_.stopped == bool(complete)
        assert told == (text[: min(complete)[1]] if complete else text)
        stopped += filter_.stopped
    assert 100 < stopped < 500


# --- one request's speech --------------------------------------------------------------------------------------------

LM = tiny.language_model("llama")


def say(ids: Sequence[int], **changes: object) -> tuple[Speech, list[Piece]]:
    """Let a request 'choose' given ids: each is the only likely one."""
    sampling = Sampling(**{"max_new_tokens": len(ids), "temperature": 0.0, **changes})  # type: ignore[arg-type]
    speech, pieces = Speech(LM, sampling), []
    for token in ids:
        logits = torch.zeros(tiny.VOCAB)
        logits[token] = 9.0
        pieces.append(speech.next(logits))
        if speech.finish_reason:
            break
    return speech, pieces


def ids_of(text: str) -> list[int]:
    return list(LM.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_length_stop_and_end_of_text() -> None:
    assert say(ids_of("hello"))[0].finish_reason == "length"
    assert say([*ids_of("hello"), LM.tokenizer.eos_token_id, *ids_of("more")])[0].finish_reason == "stop"
    speech, pieces = say(ids_of("hello world"), stop=("lo w",))
    assert (speech.finish_reason, "".join(p.text for p in pieces)) == ("stop", "hel")
    speech, pieces = say(ids_of("hello"), stop=("low",))
    assert (speech.finish_reason, "".join(p.text for p in pieces)) == ("length", "hello")


def test_half_a_character_at_the_end_is_told_once() -> None:
    _, pieces = say(ids_of("a€")[:-1])
    assert [p.text for p in pieces] == ["a", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("text", "stop", "told"),
    [("a€b", (), "a€b"), ("abcXYd", ("XY",), "abc"), ("abcX", ("XY",), "abcX"), ("😀!", ("!",), "😀")],
)
def test_every_told_byte_has_its_token(text: str, stop: tuple[str, ...], told: str) -> None:
    _, pieces = say(ids_of(text), stop=stop, top_logprobs=2)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(p.text for p in pieces) == told
    assert b"".join(bytes(t.bytes) for t in tokens) == told.encode()
    assert all(len(t.top) == 2 and t.top[0][1] == pytest.approx(t.logprob) for t in tokens)


def test_logprobs_are_the_models_whatever_the_bias() -> None:
    logits = torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(0))
    known = logits[: len(LM.tokenizer)]
    speech = Speech(LM, Sampling(1, temperature=0.7, logit_bias={65: 100.0}, top_logprobs=0))
    (token,) = speech.next(logits).tokens
    assert token.id == 65
    assert token.logprob == pytest.approx(float(known.log_softmax(-1)[65]), abs=1e-6)


def test_a_row_that_only_pads_the_vocabulary_is_never_chosen() -> None:
    logits = torch.zeros(tiny.VOCAB)
    logits[-1] = 99.0
    speech = Speech(LM, Sampling(1, temperature=0.0))
    speech.next(logits)
    assert speech.ids[0] < len(LM.tokenizer)


def test_a_seed_repeats_and_another_does_not() -> None:
    def spoken(seed: int | None) -> list[int]:
        speech = Speech(LM, Sampling(20, seed=seed))
        for _ in range(20):
            speech.next(torch.zeros(tiny.VOCAB))
            if speech.finish_reason:
                break
        return speech.ids

    assert spoken(7) == spoken(7) != spoken(8)
    assert spoken(None) != spoken(None)
