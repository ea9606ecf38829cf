"""lm-evaluation-harness through the `kvlingo` model type: an exact translator gives its own model's numbers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kvlingo import cli
from kvlingo.errors import BadInput
from kvlingo.harness_arms import Cast, check_arm
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard
from kvlingo.prompts import Prompts
from kvlingo.reading import read_chat, read_text
from kvlingo.store import save_translator
from kvlingo.translator import Translator, identity_translator
from tests import tiny

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'kvlingo[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvlingo import harness
from kvlingo.harness_model import KVLingoLM

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CONTEXTS = [tiny.text(30, seed=1), tiny.text(9, seed=2) + "  ", tiny.text(45, seed=3) + "\nAnswer:", ""]
CONTINUATIONS = [" the river", " a", " copper and glass", "then the stone"]
PAIRS = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["llama", "gemma3", "merging"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    if request.param == "merging":  # tokens longer than a byte, and no BOS
        return tiny.language_model("llama", tokenizer=tiny.merging_tokenizer(), seed=3)
    return tiny.language_model(request.param)


def requests(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def reference(lm: LanguageModel, **options: Any) -> HFLM:
    tokenizer = lm.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "</s>"
    return HFLM(pretrained=lm.model, tokenizer=tokenizer, max_length=512, **options)


def ours(lm: LanguageModel, arm: str = "translated", by: Translator | None = None, **options: Any) -> KVLingoLM:
    by = by or identity_translator(lm.geometry, torch.float64)
    return KVLingoLM(arm=arm, cast=Cast(lm, lm, None), by=by, max_length=512, **options)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arm", ["translated", "native"])
def test_likelihoods_are_those_of_the_model_itself(lm: LanguageModel, arm: str, batch: int) -> None:
    mine = ours(lm, arm, batch_size=batch)
    found = mine.loglikelihood(requests("loglikelihood", PAIRS))
    wanted = reference(lm).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], abs=1e-6)
    assert [one[1] for one in found] == [one[1] for one in wanted]
    held = mine.get_model_info()["kvlingo"]
    assert held["contexts"] == len(CONTEXTS)  # what follows one context shares what is held of it
    assert (held["translated_tokens"] > 100) == (arm == "translated")
    assert held["moved_cuts"] == 0


def test_the_likelihoods_would_show_a_wrong_translation(lm: LanguageModel) -> None:
    wrong = identity_translator(lm.geometry, torch.float64)
    with torch.no_grad():
        for parameter in wrong.parameters():
            parameter.mul_(0.9)
    found = ours(lm, by=wrong).loglikelihood(requests("loglikelihood", PAIRS[:4]))
    wanted = reference(lm).loglikelihood(requests("loglikelihood", PAIRS[:4]), disable_tqdm=True)
    assert max(abs(a[0] - b[0]) for a, b in zip(found, wanted, strict=True)) > 1e-2


def what_it_says(lm: LanguageModel) -> tuple[str, str]:
    """Return a context after which the likeliest token is one that the tokenizer gives back, and that token."""
    for seed in range(60):
        context = tiny.text(12, seed=seed)
        (token,) = tiny.cold_greedy(lm, lm.ids(read_text(lm.tokenizer, context).ids), 1)
        said = lm.tokenizer.decode([token])
        if said and read_text(lm.tokenizer, context + said).ids == (*read_text(lm.tokenizer, context).ids, token):
            return context, said
    raise AssertionError("it never says anything")


@pytest.mark.parametrize("arm", ["translated", "native"])
def test_what_is_likeliest_is_told(lm: LanguageModel, arm: str) -> None:
    context, said = what_it_says(lm)
    pairs = [(context, said), (context, " xyz")]
    found = ours(lm, arm).loglikelihood(requests("loglikelihood", pairs))
    wanted = reference(lm).loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [one[1] for one in found] == [one[1] for one in wanted] == [True, False]


@pytest.mark.parametrize("arm", ["translated", "native"])
def test_long_contexts_lose_the_same_first_tokens(lm: LanguageModel, arm: str) -> None:
    if arm == "translated" and lm.tokenizer("a")["input_ids"][0] == lm.tokenizer.bos_token_id:
        pytest.skip(
            "the source reads what is left of a text as a text, with its own BOS; the target's is cut off, as lm-eval does"
        )
    pairs = [(tiny.text(300, seed=5), " the end")]
    mine = ours(lm, arm)
    (found,) = mine.loglikelihood(requests("loglikelihood", pairs))
    (wanted,) = reference(lm).loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)
    assert mine.get_model_info()["kvlingo"]["tokens"] < 512


ENDINGS = [{"until": ["the"], "max_gen_toks": 24}, {"until": [], "max_gen_toks": 10, "do_sample": False}]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arm", ["translated", "native"])
def test_answers_are_those_of_the_model_itself(lm: LanguageModel, arm: str, batch: int) -> None:
    asked = [(context, dict(ending)) for context in CONTEXTS[:3] for ending in ENDINGS]
    found = ours(lm, arm, batch_size=batch).generate_until(requests("generate_until", asked))
    wanted = reference(lm).generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found == wanted
    assert any(found)


def test_an_answer_ends_where_its_task_says(lm: LanguageModel) -> None:
    (whole,) = ours(lm).generate_until(requests("generate_until", [(CONTEXTS[0], {"max_gen_toks": 24})]))
    stop = whole[5:7]
    (cut,) = ours(lm).generate_until(requests("generate_until", [(CONTEXTS[0], {"until": stop, "max_gen_toks": 24})]))
    assert cut == whole.split(stop)[0]


@pytest.mark.parametrize("stride", [7, 64])
@pytest.mark.parametrize("arm", ["translated", "native"])
def test_whole_texts_are_scored_as_the_model_does(lm: LanguageModel, arm: str, stride: int) -> None:
    texts = [(tiny.text(20, seed=8),)]
    if arm == "native":
        texts.append((tiny.text(90, seed=9),))  # of several windows
    elif lm.tokenizer("a")["input_ids"][0] != lm.tokenizer.bos_token_id:
        pytest.skip("lm-eval puts a prefix before the target's text; the source reads the text as it does, without one")
    mine = KVLingoLM(
        arm=arm,
        cast=Cast(lm, lm, None),
        by=identity_translator(lm.geometry, torch.float64),
        max_length=200,
        rolling_stride=stride,
    )
    found = mine.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    # Where a tokenizer adds BOS, the harness's own model would read two of them.
    other = HFLM(pretrained=lm.model, tokenizer=reference(lm).tokenizer, max_length=200, add_bos_token=False)
    wanted = other.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert (mine.get_model_info()["kvlingo"]["translated_tokens"] > 0) == (arm == "translated")


def test_other_arms_answer_on_what_they_have() -> None:
    source, target = tiny.unrelated_pair()
    cast = Cast(source, target, None)
    pairs = requests("loglikelihood", PAIRS[:4])
    alone = KVLingoLM(arm="source", cast=cast, max_length=512).loglikelihood(pairs)
    wanted = reference(source).loglikelihood(pairs, disable_tqdm=True)
    assert [value for value, _ in alone] == pytest.approx([value for value, _ in wanted], abs=1e-3)
    nothing = KVLingoLM(arm="no-context", cast=cast, max_length=512)
    found = nothing.loglikelihood(pairs)
    first = target.ids(read_text(target.tokenizer, CONTEXTS[0]).ids[:1])
    for (value, _), continuation in zip(found, CONTINUATIONS, strict=True):
        follow = target.ids(target.tokenizer(continuation, add_special_tokens=False)["input_ids"])
        logits = tiny.cold_logits(target, torch.cat((first, follow[:-1])))
        assert value == pytest.approx(float(logits.log_softmax(-1).gather(1, follow[:, None]).sum()), abs=1e-3)
    assert nothing.get_model_info()["kvlingo"]["tokens"] == 1


# --- where a context ends ------------------------------------------------------------------------------------------------


def test_a_token_over_the_cut_is_scored_whole() -> None:
    lm = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer(), seed=3)
    prompt = Prompts(lm.tokenizer, 512).pair("some words and t", "he end")
    whole = read_text(lm.tokenizer, "some words and the end")
    assert prompt.is_merged
    assert prompt.context.reading.ids + prompt.follow == whole.ids
    assert prompt.context.conversation == "some words and"
    assert lm.tokenizer.decode(prompt.follow) == " the end"
    mine = ours(lm)
    (found,) = mine.loglikelihood(requests("loglikelihood", [("some words and t", "he end")]))
    ids, count = lm.ids(whole.ids), len(prompt.follow)
    log_p = tiny.cold_logits(lm, ids[:-1])[-count:].log_softmax(-1)
    assert found[0] == pytest.approx(float(log_p.gather(1, ids[-count:, None]).sum()), abs=1e-6)
    assert mine.get_model_info()["kvlingo"]["moved_cuts"] == 1


def test_spaces_before_the_cut_are_scored(lm: LanguageModel) -> None:
    prompt = Prompts(lm.tokenizer, 512).pair("some words \n", "and more")
    assert prompt.context.conversation == "some words"
    assert lm.tokenizer.decode(prompt.follow) == " \nand more"


def test_every_token_of_a_text_is_scored_once(lm: LanguageModel) -> None:
    text = tiny.text(60, seed=4)
    ids = tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
    for limit, stride in ((40, 7), (40, 40), (1000, 64)):
        prompts = list(Prompts(lm.tokenizer, limit).windows(text, stride))
        assert sum((prompt.follow for prompt in prompts), ()) == ids
        assert all(len(p.context.reading) + len(p.follow) <= limit + 1 for p in prompts)


def test_nothing_to_score_is_refused(lm: LanguageModel) -> None:
    prompts = Prompts(lm.tokenizer, 64)
    with pytest.raises(BadInput, match="nothing to score"):
        prompts.pair("words", "")
    with pytest.raises(BadInput, match="no room"):
        prompts.context("words", room=0)


# --- chats ---------------------------------------------------------------------------------------------------------------


def talk(seed: int = 0) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": tiny.text(12, seed=seed)},
        {"role": "assistant", "content": tiny.text(8, seed=seed + 1)},
        {"role": "user", "content": tiny.text(15, seed=seed + 2)},
    ]


@pytest.mark.parametrize("begun", [False, True])
def test_a_chat_gets_from_template_to_template(begun: bool) -> None:
    """The source has another template and reads the messages in its own; an exact map can't be had there, so ids are compared."""
    other = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    source = tiny.language_model("llama", tokenizer=tiny.byte_tokenizer(chat_template=other))
    target = tiny.language_model("llama", tokenizer=tiny.byte_tokenizer(chat_template=CHAT))
    mine = KVLingoLM(cast=Cast(source, target, None), by=identity_translator(target.geometry, torch.float64))
    messages = [*talk(), *([{"role": "assistant", "content": "So the"}] if begun else [])]
    rendered = mine.apply_chat_template(messages, add_generation_prompt=not begun)
    context = mine.prompts.context(rendered, room=2000)
    assert context.conversation == talk()
    assert context.reading.ids == read_text(target.tokenizer, rendered).ids
    contents = [context.reading.stream[a:b].decode() for a, b in context.reading.contents]
    assert contents == [m["content"] for m in messages]
    (held,) = mine.holder.hold([context])
    assert held.tokens == len(context.reading)
    told = mine.get_model_info()["kvlingo"]
    assert told["read_again"] == {}
    words = sum(len(m["content"]) for m in talk())
    assert words * 0.9 < told["translated_tokens"] < len(rendered)


@pytest.mark.parametrize("arm", ["translated", "native"])
def test_chats_are_answered_as_the_model_does(arm: str) -> None:
    lm = tiny.language_model("gemma3", tokenizer=tiny.byte_tokenizer(chat_template=CHAT))
    mine, other = ours(lm, arm), reference(lm)
    rendered = [mine.apply_chat_template(talk(seed)) for seed in range(3)]
    assert rendered == [other.apply_chat_template(talk(seed)) for seed in range(3)]
    pairs = requests("loglikelihood", [(text, " the river") for text in rendered])
    wanted = other.loglikelihood(pairs, disable_tqdm=True)
    assert [a for a, _ in mine.loglikelihood(pairs)] == pytest.approx([a for a, _ in wanted], abs=1e-6)
    asked = requests("generate_until", [(text, {"max_gen_toks": 12}) for text in rendered])
    assert mine.generate_until(asked) == other.generate_until(asked, disable_tqdm=True)
    assert mine.get_model_info()["kvlingo"]["read_again"] == {}


def test_a_source_that_can_not_read_a_chat_is_counted() -> None:
    refusing = "{{ raise_exception('no system') if messages[0]['role'] == 'system' else messages[0]['content'] }}"
    source = tiny.language_model("llama", tokenizer=tiny.byte_tokenizer(chat_template=refusing))
    target = tiny.language_model("llama", tokenizer=tiny.byte_tokenizer(chat_template=CHAT))
    mine = KVLingoLM(cast=Cast(source, target, None), by=identity_translator(target.geometry, torch.float64))
    rendered = mine.apply_chat_template([{"role": "system", "content": "Be brief."}, *talk()])
    pairs = requests("loglikelihood", [(rendered, " the river")])
    (found,) = mine.loglikelihood(pairs)
    (reason,) = mine.get_model_info()["kvlingo"]["read_again"]
    assert "no system" in reason
    assert found[0] == pytest.approx(reference(target).loglikelihood(pairs, disable_tqdm=True)[0][0], abs=1e-6)


def test_a_system_message_that_the_template_refuses_is_left_out() -> None:
    refusing = (
        "{% for m in messages %}{{ raise_exception('no') if m['role'] == 'system' }}{{ m['content'] }}\n{% endfor %}"
    )
    prompts = Prompts(tiny.byte_tokenizer(chat_template=refusing), 512)
    assert (
        prompts.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], True) == "Hi\n"
    )


def test_a_chat_that_was_cut_is_read_by_the_target(lm: LanguageModel) -> None:
    prompts = Prompts(lm.tokenizer, 512)
    rendered = prompts.render(talk(), True)
    context = prompts.context(rendered, room=20)
    assert context.conversation is None
    assert len(context.reading) == 20
    assert read_chat(lm.tokenizer, talk()).ids[-20:] == context.reading.ids


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arm": "magic"}, "no arm 'magic'"),
        ({"batch_size": "auto"}, "batch_size is 'auto'"),
        ({"colour": "red"}, "no 'colour'"),
        ({"arm": "translated"}, "needs source=MODEL"),
        ({"arm": "native"}, "needs target=MODEL"),
        ({"arm": "ridge", "source": "x", "target": "y"}, "translator=DIR"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_what_can_not_be_asked_is_refused_by_name(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny.language_model("llama")
    monkeypatch.setattr("kvlingo.harness_arms.load_model", lambda *_, **__: tiny.clone(lm))
    with pytest.raises(BadInput, match=words):
        KVLingoLM(**options)


def test_generation_options_that_would_be_ignored_are_refused(lm: LanguageModel) -> None:
    with pytest.raises(BadInput, match="'num_beams'"):
        ours(lm, "native").generate_until(requests("generate_until", [("a text", {"num_beams": 4})]))


def test_arms_have_names_with_either_line() -> None:
    assert check_arm("token_only") == check_arm("token-only") == "token-only"


# --- tasks ---------------------------------------------------------------------------------------------------------------

CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""


def write_tasks(folder: Path) -> tuple[str, ...]:
    """Write a task of every kind that reads nothing from a network."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"question": tiny.text(20, seed=n), "choices": [" river", " stone", " lamps"], "answer": n % 3}
        for n in range(6)
    ]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    places = {"data": data, "cache": folder / "cache"}
    kinds = {
        "choose": ("multiple_choice", "acc"),
        "say": ("generate_until", "exact_match"),
        "whole": ("loglikelihood_rolling", "bits_per_byte"),
    }
    for name, (output, metric) in kinds.items():
        text = CHOICES.format(name=f"local_{name}", output=output, metric=metric, **places)
        text += {
            "choose": 'doc_to_choice: "{{choices}}"\n',
            "say": 'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\n',
            "whole": "",
        }[name]
        if name == "whole":
            text = text.replace('doc_to_text: "{{question}}\\nAnswer:"', 'doc_to_text: ""')
            text = text.replace('"{{answer}}"', '"{{question}}"').replace(
                "aggregation: mean", "aggregation: bits_per_byte"
            )
        (folder / f"{name}.yaml").write_text(text)
    return tuple(f"local_{name}" for name in kinds)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    datasets.disable_progress_bars()


def save_pair(folder: Path) -> Path:
    """Save a model twice and the exact translator between the two, as `fit` would."""
    lm = tiny.language_model("llama", dtype=torch.float32)
    for name in ("source", "target"):
        lm.model.save_pretrained(folder / name)
        lm.tokenizer.save_pretrained(folder / name)
    place = folder / "translator"
    save_translator(place, identity_translator(lm.geometry), Manifest(ModelCard.of(lm), ModelCard.of(lm), {}))
    (place / "work").mkdir()
    (place / "work" / "models.json").write_text(
        json.dumps({"source": str(folder / "source"), "target": str(folder / "target")})
    )
    return place


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("offline")
def test_local_tasks_on_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, place = write_tasks(tmp_path / "tasks"), save_pair(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(
            [
                *("lm-eval", str(place), "--tasks", ",".join(tasks), "--arms", "native,translated,source,no_context"),
                *("--include", str(tmp_path / "tasks"), "--batch", "2", "--max-length", "256"),
                *("--out", str(tmp_path / "tasks.json")),
            ]
        )
    assert stopped.value.code == 0
    record = json.loads((tmp_path / "tasks.json").read_text())
    arms = record["tasks"]["local_choose"]["acc,none"]["arms"]
    assert arms["native"]["mean"] == arms["translated"]["mean"] == arms["source"]["mean"]
    assert arms["translated"]["below_native"]["mean"] == 0
    assert record["tasks"]["local_choose"]["acc,none"]["items"] == 6
    assert not record["tasks"]["local_choose"]["acc,none"]["counts"]  # it is no better than the source: itself
    assert record["held"]["translated"]["translated_tokens"] > 500
    assert record["unparseable"]["native"].keys() == {"local_say,none"}
    assert capsys.readouterr().out.startswith("[local_choose acc,none (6): native ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("offline")
def test_the_model_type_is_known_by_name_and_gives_the_harness_s_own_figures(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks, place = write_tasks(tmp_path / "tasks"), save_pair(tmp_path)
    harness.register()
    harness.register()  # twice is once
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    common: dict[str, Any] = {"tasks": list(tasks), "task_manager": manager, "bootstrap_iters": 0}
    mine = simple_evaluate(model="kvlingo", model_args=f"translator={place},arm=translated,max_length=256", **common)
    lm = tiny.language_model("llama", dtype=torch.float32)
    hf = HFLM(pretrained=lm.model, tokenizer=reference(lm).tokenizer, max_length=256, add_bos_token=None)
    theirs = simple_evaluate(model=hf, **common)
    assert mine is not None
    assert theirs is not None
    for task in ("local_choose", "local_say"):
        a, b = ([s["filtered_resps"] for s in run["samples"][task]] for run in (mine, theirs))
        assert flat(a) == pytest.approx(flat(b), abs=1e-4) if task == "local_choose" else a == b
        numbers = [{k: v for k, v in run["results"][task].items() if isinstance(v, float)} for run in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1])
    assert math.isfinite(mine["results"]["local_whole"]["bits_per_byte,none"])
    assert mine["config"]["kvlingo"]["arm"] == "translated"


def flat(value: Any) -> list[float]:
    return [float(value)] if not isinstance(value, (list, tuple)) else [x for each in value for x in flat(each)]
