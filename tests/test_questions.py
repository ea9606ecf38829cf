"""Questions: contexts cut before the answer, choices by likelihood, what counts, and where the items come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import passkey, tasks
from kvlingo.errors import BadInput
from kvlingo.evaluation import Arms, Controls, EvaluationOptions
from kvlingo.language_model import LanguageModel
from kvlingo.questions import (
    Answered,
    Asked,
    Question,
    answered,
    ask,
    beats,
    one_cell,
    summarise,
    table,
)
from kvlingo.translator import Translator, identity_translator
from tests import tiny

CONTEXT = tiny.text(12, seed=3) + "\n\nThe secret code is"


def arms_of(lm: LanguageModel, translator: Translator | None = None) -> Arms:
    translator = translator or identity_translator(lm.geometry, torch.float64)
    with torch.no_grad():
        return Arms(lm, lm, translator, Controls(), EvaluationOptions())


@pytest.fixture(params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param)


@torch.no_grad()
def nats_of(lm: LanguageModel, context: str, choice: str) -> float:
    ids = lm.ids(lm.tokenizer(context + choice)["input_ids"])
    count = len(lm.tokenizer(choice, add_special_tokens=False)["input_ids"])
    log_p = tiny.cold_logits(lm, ids[:-1])[-count:].log_softmax(-1)
    return float(-log_p.gather(1, ids[-count:, None]).sum())


def test_every_arm_reads_every_choice(lm: LanguageModel) -> None:
    choices = (" red", " a blue one", " it")
    found = ask(arms_of(lm), Question("cell", "c", CONTEXT, choices, 1))
    assert found is not None
    by_hand = [nats_of(lm, CONTEXT, choice) for choice in choices]
    a_byte = [n / len(choice) for n, choice in zip(by_hand, choices, strict=True)]
    for arm in ("native", "translated", "source_alone"):  # an exact translator: all the same
        assert found.answers[arm].gold_nats == pytest.approx(by_hand[1], abs=1e-7), arm
        assert found.answers[arm].is_right == (a_byte[1] == min(a_byte)), arm
    assert found.answers["no_context"].gold_nats != pytest.approx(by_hand[1], abs=1e-3)
    assert "wrong_document" not in found.answers


def what_it_says(lm: LanguageModel) -> tuple[str, str]:
    """Return a context after which the model's likeliest token is one that its tokenizer gives back, and that token."""
    for seed in range(60):
        context = tiny.text(12, seed=seed)
        (token,) = tiny.cold_greedy(lm, lm.ids(lm.tokenizer(context)["input_ids"]), 1)
        said = lm.tokenizer.decode([token])
        if said and lm.tokenizer(said, add_special_tokens=False)["input_ids"] == [token]:
            return context, said
    raise AssertionError("it never says anything")


def test_a_single_choice_asks_whether_it_is_what_comes(lm: LanguageModel) -> None:
    context, said = what_it_says(lm)
    for choice, is_right in ((said, True), (" 123456", False)):
        found = ask(arms_of(lm), Question("cell", "c", context, (choice,)), {"translated"})
        assert found is not None
        assert set(found.answers) == {"translated", "native", "source_alone"}
        assert all(answer.is_right is is_right for answer in found.answers.values())


def test_a_cut_inside_a_token_is_left_out() -> None:
    lm = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer())
    assert ask(arms_of(lm), Question("cell", "c", "some words and t", ("he end",))) is None
    assert ask(arms_of(lm), Question("cell", "c", "some words and", (" the end",))) is not None


def test_the_likeliest_choice_is_by_nats_a_byte() -> None:
    question = Question("cell", "c", "?", (" ab", " abcdefghi"), 1)
    assert answered(question, [(3.0, False), (5.0, False)]) == Answered(True, 5.0)
    assert answered(question, [(3.0, False), (11.0, False)]) == Answered(False, 11.0)


# --- summing up --------------------------------------------------------------------------------------------------------


def asked(rights: dict[str, list[bool]], cell: str = "cell") -> list[Asked]:
    count = len(rights["native"])
    return [
        Asked(
            Question(cell, f"{cell} {i}", "", ("a", "b")),
            {name: Answered(row[i], 1.0 if row[i] else 3.0) for name, row in rights.items()},
        )
        for i in range(count)
    ]


RIGHTS = {
    "native": [True] * 18 + [False] * 2,
    "translated": [True] * 15 + [False] * 5,
    "no_context": [True] * 5 + [False] * 15,
    "source_alone": [True] * 8 + [False] * 12,
}


def test_retention_and_the_share_of_the_gap_by_hand() -> None:
    found = one_cell(asked(RIGHTS), 0)
    assert found["counts"]
    told = found["arms"]["translated"]
    assert told["accuracy"]["mean"] == pytest.approx(0.75)
    assert told["retention"]["mean"] == pytest.approx(15 / 18)
    assert told["gap_recovered"]["mean"] == pytest.approx(7 / 10)
    assert told["gold_gap_recovered"]["mean"] == pytest.approx(7 / 10)
    assert told["accuracy_below_native"]["mean"] == pytest.approx(0.15)
    assert told["accuracy_below_native"]["low"] >= 0  # paired: never right where native is wrong
    assert found["arms"]["native"]["gap_recovered"]["mean"] == 1
    assert found["arms"]["source_alone"]["gap_recovered"]["mean"] == 0


@pytest.mark.parametrize("rival", ["source_alone", "no_context"])
def test_a_cell_counts_only_where_there_is_something_to_keep(rival: str) -> None:
    close = {**RIGHTS, rival: [True] * 17 + [False] * 3}
    summary = summarise([*asked(RIGHTS, "good"), *asked(close, "chance")])
    assert summary["counting"] == ["good"]
    assert summary["over_counting"]["questions"] == 20
    assert summary["over_all"]["questions"] == 40
    good, chance = table(summary)
    assert good.startswith("good (20): native 0.90, translated 0.75")
    assert chance.startswith("[chance (20):")
    json.dumps(summary, allow_nan=False)


def test_nothing_counts_and_nothing_is_made_up() -> None:
    summary = summarise(asked({**RIGHTS, "source_alone": RIGHTS["native"]}))
    assert summary["counting"] == []
    assert summary["over_counting"] is None
    assert summary["cells"]["cell"]["arms"]["translated"]["gap_recovered"] is None


def test_two_standard_errors() -> None:
    ones, mixed = torch.ones(16), torch.tensor([1.0] * 12 + [0.0] * 4)
    assert beats(ones, mixed)  # 0.25 against an error of 0.112
    assert not beats(ones, torch.tensor([1.0] * 14 + [0.0] * 2))
    assert not beats(ones[:1], ones[:1] * 0)


# --- where they come from ----------------------------------------------------------------------------------------------


def test_codes_stand_at_their_depth_and_length(lm: LanguageModel) -> None:
    documents = tiny.documents(4, 600)
    found = passkey.hide_codes(documents, lm, (150, 300), 2, seed=1)
    assert len(found) == 2 * 5 * 2
    assert len({q.choices for q in found}) == len(found)
    for question in found:
        (code,) = question.choices
        length, depth = int(question.cell.split()[0]), float(question.cell.split()[-1])
        tokens = len(lm.tokenizer(question.context)["input_ids"])
        assert length - 5 <= tokens <= length + 25
        assert question.context.count(code.strip()) == 2
        text = question.context.removesuffix(passkey.ASKED)
        before, after = text.split("The secret code is", 1)
        after = after.split(".", 2)[2]
        assert len(before.split()) / (len(before.split()) + len(after.split())) == pytest.approx(depth, abs=0.1)
        assert question == passkey.hide_codes(documents, lm, (150, 300), 2, seed=1)[found.index(question)]


TASK = {
    "name": "colours",
    "examples": [
        {"input": "What colour is grass?", "target_scores": {"green": 1, "red": 0}},
        {"input": "What colour is blood?", "target_scores": {"green": 0, "red": 1}},
        {"input": "What colour is snow?", "target_scores": {"white": 1, "red": 0, "black": 0}},
        {"input": "Which are colours?", "target_scores": {"red": 1, "blue": 1, "sad": 0}},
        {"input": "Say something.", "target": "anything"},
    ],
}


def write_task(folder: Path, task: Any) -> Path:
    (folder / "colours").mkdir(exist_ok=True)
    file = folder / "colours" / "task.json"
    file.write_text(task if isinstance(task, str) else json.dumps(task))
    return file


def test_items_have_choices_and_one_right_answer(tmp_path: Path) -> None:
    items = tasks.read_task(write_task(tmp_path, TASK))
    assert [item.asked for item in items] == ["What colour is grass?", "What colour is blood?", "What colour is snow?"]
    assert items[1].choices[items[1].right] == "red"


@pytest.mark.parametrize("task", ["not json", "[]", "{}", {"examples": [{"input": "Say something.", "target": "x"}]}])
def test_what_is_no_task_is_refused(tmp_path: Path, task: Any) -> None:
    with pytest.raises(BadInput):
        tasks.read_task(write_task(tmp_path, task))


def test_questions_show_solved_examples_but_never_themselves(tmp_path: Path) -> None:
    items = tasks.read_task(write_task(tmp_path, TASK))
    found = tasks.questions_of("colours", items, 10, 2, seed=0)
    assert len(found) == 3
    for question in found:
        *shown, last = question.context.split("\n\n")
        assert len(shown) == 2
        assert all(part.split("Answer: ")[1] in ("green", "red", "white") for part in shown)
        asked_last = last.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert not any(asked_last in part for part in shown)
        item = next(i for i in items if i.asked == asked_last)
        assert question.choices[question.right] == f" {item.choices[item.right]}"


def test_tasks_are_found_by_folder(tmp_path: Path) -> None:
    write_task(tmp_path, TASK)
    flags = ["--direction", "smollm2-gemma", "--work", "w", "--tasks", str(tmp_path)]
    assert len(tasks.load_questions(tasks.parse(flags))) == 3
    with pytest.raises(BadInput, match="no folder with a"):
        tasks.load_questions(tasks.parse([*flags[:-1], str(tmp_path / "colours")]))
