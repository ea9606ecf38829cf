"""Hand-overs between two system prompts: the target's own part is its own, and what is shared is translated."""

from __future__ import annotations

import json

import pytest
import torch

from bench.agents import agent_example, evaluate_agents
from kvlingo.errors import BadInput
from kvlingo.evaluation import Controls, EvaluationOptions, plan_of
from kvlingo.language_model import LanguageModel
from kvlingo.plan import Provenance, SpanKind
from kvlingo.translator import identity_translator
from tests import tiny

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
OPTIONS = EvaluationOptions(context_tokens=120, continuation_tokens=16, documents=4, attention_documents=0, passkeys=0)
PROMPTS = ("Copy names.", "You are an editor of letters.")


@pytest.fixture(params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param, tokenizer=tiny.byte_tokenizer(chat_template=CHAT))


def test_the_target_reads_its_own_prompt_and_nothing_of_what_is_shared(lm: LanguageModel) -> None:
    example = agent_example(tiny.documents(4, 100)[0], lm, lm, OPTIONS, PROMPTS)
    assert example is not None
    plan = plan_of(example, OPTIONS)
    start, stop = plan.translated
    spelled = [example.target.stream[a:b] for a, b in example.target.spans]
    assert PROMPTS[1].encode() in b"".join(spelled[:start])
    shared = [example.target.stream[a:b] for a, b in example.target.contents]
    assert shared[0].startswith(b"".join(spelled[start : start + 10]))
    assert PROMPTS[0].encode() in example.source.stream
    assert PROMPTS[0].encode() not in example.target.stream
    first = plan.spans[0]
    assert (first.kind, first.provenance, first.stop) == (SpanKind.RECOMPUTED, Provenance.EXACT, start)
    # The same words feed each other, though they stand at other places.
    for place in (start, start + 7, stop - 40):
        fed = int(example.alignment[place])
        assert example.source.stream[slice(*example.source.spans[fed])] == spelled[place]


def test_another_prompt_costs_something_and_the_same_nothing(lm: LanguageModel) -> None:
    with torch.no_grad():
        exact = identity_translator(lm.geometry, torch.float64)
        record = evaluate_agents(lm, lm, exact, tiny.documents(4, 100), Controls(), OPTIONS, prompts=PROMPTS)
    json.dumps(record, allow_nan=False)
    kl = {name: figures["kl_nats"]["mean"] for name, figures in record["arms"].items()}
    assert kl["native"] == pytest.approx(0, abs=1e-9)
    assert kl["same_prompt"] == pytest.approx(0, abs=1e-7)  # an exact map of the same conversation
    assert kl["translated"] > 1e-4  # exact keys and values, made under another prompt
    assert kl["native_other_prompt"] > 1e-4
    assert kl["wrong_document"] > kl["translated"]
    cost = record["other_prompt_costs_kl_nats"]
    assert cost["mean"] == pytest.approx(kl["translated"] - kl["same_prompt"])
    assert record["num_documents"] == 4


def test_texts_that_are_too_short_are_refused(lm: LanguageModel) -> None:
    exact = identity_translator(lm.geometry, torch.float64)
    with pytest.raises(BadInput, match="no text has 136 tokens"):
        evaluate_agents(lm, lm, exact, tiny.documents(2, 10), Controls(), OPTIONS)
