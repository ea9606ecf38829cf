"""Routers that are fitted and compared, and rules that are measured: `kvlingo route fit`, `route eval`, `calibrate`."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlingo import cli
from kvlingo.calibration import handoff_cost, read_cost
from kvlingo.cost import handoff_s, pass_s
from kvlingo.errors import BadArtifact, BadInput
from kvlingo.manifest import Manifest, card_of
from kvlingo.serve.calibrating import concluded
from kvlingo.serve.loading import load_engine
from kvlingo.serve.protocol import Message
from kvlingo.serve.routing import learned as learned_module
from kvlingo.serve.routing.building import build_router
from kvlingo.serve.routing.cascade import Cascade, CascadeRule
from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt
from kvlingo.serve.routing.comparing import Played, Recorded, compare, over_random, table
from kvlingo.serve.routing.features import BUCKETS, NAMES, WIDTH, features
from kvlingo.serve.routing.learned import Classifier, Learned, Saved, load_router, save_router
from kvlingo.serve.routing.learning import Labelled, areas, cut_for, fit, fitted, judged, labelled
from kvlingo.serve.routing.rows import digest, prompt_of
from kvlingo.serve.routing.rules import NEVER, Measured, Rules, read_rules
from kvlingo.serve.routing.threshold import Threshold, ThresholdRule
from kvlingo.serve.routing.token import Token
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Rule
from kvlingo.store import save_translator
from kvlingo.timing import cut
from kvlingo.translator import identity_translator
from tests import tiny
from tests.serving import closing, user

EASY, HARD = ("colour", "animal", "greeting", "weather", "lunch"), ("theorem", "integral", "compiler", "proof", "lemma")
PAIR = Pair("small", "big")


def planted(count: int = 120, *, shuffled: bool = False, seed: int = 0) -> list[Labelled]:
    """Return prompts whose words say which model is needed; shuffled, nothing does."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        big = number % 2 == 1
        words = draw.choices(HARD if big else EASY, k=4) + draw.choices(EASY + HARD, k=2)
        rows.append(Labelled(f"tell me of {' '.join(words)} number {number}", big))
    labels = [row.big for row in rows]
    if shuffled:
        draw.shuffle(labels)
    return [Labelled(row.prompt, big) for row, big in zip(rows, labels, strict=True)]


def written_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_rows(rows: list[Labelled]) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt, "label": "big" if row.big else "small"} for row in rows]


# --- features --------------------------------------------------------------------------------------------------------


def test_features_are_the_same_numbers_in_every_process() -> None:
    text = "Prove it: 12 Äpfel?\n```x = 1```"
    code = f"from kvlingo.serve.routing.features import features; import json; print(json.dumps(features({text!r})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found = features(text)
    assert json.loads(run.stdout) == found
    assert len(found) == WIDTH
    shape = dict(zip(NAMES, found, strict=False))
    assert shape["question_chars"] == math.log1p(31)
    assert shape["digits"] == 3 / 31
    assert shape["not_ascii"] == 1 / 31
    assert shape["code_fences"] == math.log1p(2)
    assert sum(x * x for x in found[len(NAMES) :]) == pytest.approx(1)


def test_features_of_words_do_not_depend_on_their_order_and_see_which_they_are() -> None:
    def words(text: str) -> list[float]:
        return features(text)[-BUCKETS:]

    assert words("red green blue") == words("Blue red, green!")
    assert words("red green blue") != words("red green grey")


def test_features_of_nothing_and_of_a_great_deal() -> None:
    system: Message = {"role": "system", "content": "x"}
    assert all(map(math.isfinite, features((system,))))
    assert all(map(math.isfinite, features("\ud800 half")))
    middle, end = "word " * 400_000, "word " * 799 + "end"
    long, other = features(f"{middle}  {end}"), features(f"{'word ' * 800}{middle.upper()}  {end}")
    assert long[0] == math.log1p(len(middle) + len(end) + 2)
    assert long[-BUCKETS:] == other[-BUCKETS:] == features(f"{'word ' * 800} {end}")[-BUCKETS:]


# --- fitting ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved() -> Saved:
    return fit(planted())


def test_what_can_be_learned_is_learned(saved: Saved) -> None:
    area = saved.report["gain_area"]
    assert saved.report["verdict"] == "PASS"
    assert area["low"] > 0.6
    router = Learned(PAIR, saved.classifier)
    assert router.choose("tell me of proof and lemma and theorem number 3").model == "big"
    assert router.choose((user("theorem"), user("tell me of lunch and weather and colour number 3"))).model == "small"
    assert saved.report["chosen"]["cost"]["mean"] <= 0.5


def test_what_nothing_tells_is_not_learned() -> None:
    found = fit(planted(shuffled=True)).report
    assert found["verdict"] == "FAIL"
    assert found["gain_area"]["low"] <= 0.5


def test_one_prompt_under_many_rows_is_not_judged_on_itself() -> None:
    """Forty prompts without meaning, each in six rows: a split by row would know them all by heart."""
    draw = random.Random(3)
    prompts = ["".join(draw.choices("abcdefghij ", k=30)) for _ in range(60)]
    rows = [Labelled(prompt, number < 30) for number, prompt in enumerate(prompts) for _ in range(6)]
    draw.shuffle(rows)
    assert fit(rows).report["verdict"] == "FAIL"


def test_the_numbers_say_what_scikit_learn_says() -> None:
    sklearn = pytest.importorskip("sklearn.linear_model")
    rows = planted(60)
    classifier = fitted(rows, 0)
    values = torch.tensor([classifier.scaled(features(row.prompt)) for row in rows]).numpy()
    model = sklearn.LogisticRegression(max_iter=2_000, random_state=0).fit(values, [row.big for row in rows])
    ours = [classifier.probability(row.prompt) for row in rows]
    assert ours == pytest.approx(model.predict_proba(values)[:, 1].tolist(), abs=1e-3)
    shape = torch.tensor(values[:, : len(NAMES)])
    assert shape.mean(0).abs().max() < 1e-5


SMALL, BIG = {"quality": 0.5, "cost": 1, "ms": 2, "mean_logprob": -1, "answer": "a"}, {"quality": 0.75}


@pytest.mark.parametrize(
    ("told", "tolerance", "big", "said_by"),
    [
        ({"label": "big"}, 0.0, True, "label"),
        ({"label": "small", "cluster": "c"}, 0.0, False, "label"),
        ({"preferred": "big"}, 0.0, True, "preferred"),
        ({"preferred": "small"}, 0.0, False, "preferred"),
        ({"preferred": "tie"}, 0.0, False, "preferred"),
        ({"small": SMALL, "big": BIG}, 0.0, True, "quality"),
        ({"small": SMALL, "big": BIG}, 0.2, True, "quality"),
        ({"small": SMALL, "big": BIG}, 0.25, False, "quality"),
        ({"small": {"quality": 0.7}, "big": {"quality": 0.8}}, 0.1, False, "quality"),
        ({"small": SMALL, "big": {"quality": 0.5}, "cluster": "c"}, 0.0, False, "quality"),
        ({"small": {"quality": 0}, "big": {"quality": 0}}, 0.0, False, "quality"),
    ],
)
def test_who_is_to_answer_is_told_in_three_ways(
    told: dict[str, Any], tolerance: float, big: bool, said_by: str
) -> None:
    assert labelled({"prompt": "x", **told}, tolerance) == Labelled("x", big, told.get("cluster"), said_by)


@pytest.mark.parametrize("kind", ["preferred", "quality"])
def test_three_ways_to_tell_fit_one_router(kind: str, saved: Saved) -> None:
    def row(each: Labelled) -> dict[str, Any]:
        if kind == "preferred":
            return {"prompt": each.prompt, "preferred": "big" if each.big else "tie"}
        return {"prompt": each.prompt, "small": {"quality": 1 - each.big}, "big": {"quality": 1}}

    assert fit([labelled(row(each)) for each in planted()]) == saved


def test_rows_of_one_cluster_are_not_judged_on_each_other() -> None:
    """Paraphrases under one cluster: each is known from its neighbours, none from another cluster."""
    draw = random.Random(3)
    rows = []
    for number in range(60):
        own = "".join(draw.choices("abcdefghij", k=12))
        rows += [Labelled(f"{own} {own} once more {again}", number < 30, f"c{number}") for again in range(6)]
    draw.shuffle(rows)
    apart = [Labelled(row.prompt, row.big) for row in rows]
    assert fit(apart).report["verdict"] == "PASS", "by prompt alone the neighbours give it away"
    found = fit(rows)
    assert found.report["verdict"] == "FAIL"
    assert (found.report["prompts"], len(found.seen)) == (360, 360)
    with pytest.raises(BadInput, match="rows of different clusters"):
        fit([*rows, Labelled(rows[0].prompt, True, "another")])


def test_one_recorded_file_is_fitted_on_and_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for each in planted(160):
        small = {
            "quality": 0.2 if each.big else 0.95,
            "cost": 1,
            "ms": 10,
            "mean_logprob": -1,
            "answer": "a",
            "cut": False,
        }
        rows.append({"prompt": each.prompt, "small": small, "big": {"quality": 1.0, "cost": 5, "ms": 50}})
    first, second = written_rows(tmp_path / "a.jsonl", rows[:100]), written_rows(tmp_path / "b.jsonl", rows[100:])
    out = tmp_path / "router"
    assert run("route", "fit", str(first), "--out", str(out), "--tolerance", "0.1", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["labels_by"], report["tolerance"]) == ({"label": 0, "preferred": 0, "quality": 100}, 0.1)
    assert report["share_labelled_big"] == 0.5
    assert load_router(out).report == report
    assert run("route", "eval", str(second), "--learned", str(out), "--json") == 0
    arms = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]
    assert arms["learned"]["quality"]["mean"] > arms["always small"]["quality"]["mean"]
    labels = written_rows(tmp_path / "l.jsonl", as_rows(planted(80)))
    assert run("route", "fit", str(labels), "--out", str(tmp_path / "x"), "--tolerance", "0.1") == 2
    assert "which a tolerance is about" in capsys.readouterr().err


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(BadInput, match="19 different prompts are labelled big"):
        fit([*planted(80)[::2], *[row for row in planted(80) if row.big][:19]])


@pytest.mark.parametrize(
    ("share", "cut"), [(0.0, 2.0), (0.2, 2.0), (0.25, 0.9), (0.5, 0.9), (0.75, 0.5), (0.99, 0.5), (1.0, 0.1)]
)
def test_a_cut_sends_at_most_its_share_to_the_big_model(share: float, cut: float) -> None:
    assert cut_for([0.5, 0.9, 0.1, 0.5], share) == cut


def test_areas_by_hand() -> None:
    """All needed first: 1 - half of their share; all last: half of the others' share; all alike: lots."""
    needed = torch.tensor([1.0, 0.0, 0.0, 0.0]).double()
    ones = torch.ones(1, 4).double()
    assert areas(torch.tensor([0.9, 0.3, 0.2, 0.1]).double(), needed, ones).item() == pytest.approx(1 - 1 / 8)
    assert areas(torch.tensor([0.1, 0.3, 0.2, 0.9]).double(), needed, ones).item() == pytest.approx(1 / 8)
    assert areas(torch.full((4,), 0.5).double(), needed, ones).item() == pytest.approx(0.5)
    twice = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).double()
    assert areas(torch.tensor([0.9, 0.3, 0.2, 0.1]).double(), needed, twice).item() == pytest.approx(1 - 2 / 8)


def test_the_curve_goes_from_always_small_to_always_big() -> None:
    report = judged([0.9, 0.8, 0.2, 0.1] * 10, [True, False, True, False] * 10, [str(i) for i in range(40)], 0.8)
    first, last = report["curve"][0], report["curve"][-1]
    assert (first["cost"]["mean"], first["quality"]["mean"]) == (0.0, 0.5)
    assert (last["cost"]["mean"], last["quality"]["mean"]) == (1.0, 1.0)
    assert report["chosen"]["cost"]["mean"] == 0.5
    assert report["chosen"]["quality"]["mean"] == 0.75


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_says_the_same(tmp_path: Path, saved: Saved) -> None:
    save_router(tmp_path / "r", saved)
    again = load_router(tmp_path / "r")
    assert again == saved
    router = build_router(
        Settings(models={"small": "x", "big": "y"}, router="learned", learned=tmp_path / "r"), Rules()
    )
    assert router == Learned(PAIR, saved.classifier)
    names = [path.name for path in (tmp_path / "r").iterdir()]
    assert names == ["router.json"]


def test_a_router_that_is_no_better_than_lots_is_not_served(tmp_path: Path, saved: Saved) -> None:
    save_router(tmp_path / "r", Saved(saved.classifier, {**saved.report, "verdict": "FAIL", "reason": "why"}, ()))
    with pytest.raises(BadArtifact, match="why; fit it on more rows"):
        build_router(Settings(models={"small": "x", "big": "y"}, router="learned", learned=tmp_path / "r"), Rules())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"PASS"', '"PaSS"'), "checksum"),
        (lambda text: "[]", "damaged"),
        (lambda text: resealed(text, format=2), "another version"),
        (lambda text: resealed(text, features=99), "another version"),
        (lambda text: resealed(text, classifier={"mean": []}), "does not describe"),
        (
            lambda text: resealed(text, classifier={**json.loads(text)["classifier"], "mean": [1.0]}),
            "1 numbers for mean",
        ),
    ],
)
def test_a_damaged_router_is_refused(tmp_path: Path, saved: Saved, change: Any, words: str) -> None:
    save_router(tmp_path, saved)
    file = tmp_path / "router.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(BadArtifact, match=words):
        load_router(tmp_path)


def resealed(text: str, **changes: Any) -> str:
    content = {**json.loads(text), **changes}
    del content["sha256"]
    return json.dumps({**content, "sha256": learned_module.seal(content)})


@pytest.mark.parametrize("broken", [{"bias": math.nan}, {"scale": (0.0,) * len(NAMES)}, {"weights": (1.0,)}])
def test_numbers_that_are_none_are_refused(saved: Saved, broken: dict[str, Any]) -> None:
    with pytest.raises(BadArtifact):
        Classifier(**{**vars(saved.classifier), **broken})


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"prompt": "x"}', "nothing says who is to answer"),
        ('{"prompt": "x", "preferred": "both"}', "preferred is none of small, big and tie"),
        ('{"prompt": "x", "preferred": "tie", "label": "big"}', "unknown field 'preferred'"),
        ('{"prompt": "x", "small": {"quality": 1}}', "big is missing"),
        ('{"prompt": "x", "small": {"quality": 1}, "big": {}}', "big.quality is not a number"),
        ('{"prompt": "x", "small": {"quality": 1}, "big": {"quality": 1, "ms_": 1}}', "unknown field 'ms_' in big"),
        ('{"prompt": "x", "cluster": 1, "label": "big"}', "cluster is not a text"),
        ('{"prompt": "x", "label": "huge"}', "label is neither"),
        ('{"label": "big"}', "either prompt or messages"),
        ('{"prompt": "x", "messages": [], "label": "big"}', "either prompt or messages"),
        ('{"messages": [{"role": "user"}], "label": "big"}', "messages is not a list"),
        ('{"prompt": " ", "label": "big"}', "or empty"),
        ('{"prompt": "x", "label": "big", "lable": 1}', "unknown field 'lable'"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, words: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"prompt": "a secret", "label": "small"}}\n{row}\n')
    assert run("route", "fit", str(file), "--out", str(tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert not (tmp_path / "out").exists()


def test_a_digest_tells_prompts_apart_and_not_how_they_are_spaced() -> None:
    assert digest("Hello  World") == digest("hello world\n") == digest((user("hello world"),))
    assert digest("hello world") != digest("hello worlds")
    assert digest(prompt_of({"messages": [{"role": "user", "content": "x"}]})) == digest("x")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


def test_fit_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = written_rows(tmp_path / "d.jsonl", as_rows(planted(80))), tmp_path / "router"
    assert run("route", "fit", str(data), "--out", str(out), "--big-share", "0.3", "--json") == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report == load_router(out).report
    assert report["chosen"]["cost"]["mean"] <= 0.3
    assert "verdict: PASS" in printed
    assert run("route", "fit", str(data), "--out", str(out)) == 2
    assert "--overwrite" in capsys.readouterr().err
    noise = written_rows(tmp_path / "n.jsonl", as_rows(planted(80, shuffled=True)))
    assert run("route", "fit", str(noise), "--out", str(out), "--overwrite") == 3
    assert run("route", "fit", str(tmp_path / "none"), "--out", str(tmp_path / "x")) == 2


# --- comparing -------------------------------------------------------------------------------------------------------


def record(count: int = 200, seed: int = 0) -> list[Recorded]:
    """Return rows where the big model is needed for half, and where the small one's doubt says so, though not always."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        hard = number % 2 == 1
        doubt = draw.gauss(-1.4 if hard else -0.6, 0.3)
        small = Played(0.1 if hard else 0.9, 1.0, 100.0)
        prompt = f"{'long ' * (40 if hard else 2)}{number}"
        rows.append(Recorded(prompt, digest(prompt), small, Played(0.9, 5.0, 400.0), Heard(0, min(doubt, 0.0))))
    return rows


class Blind:
    """Chooses by nothing that matters."""

    pair, name, listens = PAIR, "blind", False

    def choose(self, prompt: Prompt) -> Choice:
        return Choice("big" if random.Random(str(prompt)).random() < 0.5 else "small", "")

    def judge(self, heard: Heard) -> Choice:
        raise NotImplementedError


class Wrong(Blind):
    """Chooses the wrong one."""

    name = "wrong"

    def choose(self, prompt: Prompt) -> Choice:
        return Choice("small" if len(str(prompt)) > 50 else "big", "")


def test_a_good_router_is_told_from_a_blind_one_and_from_a_wrong_one() -> None:
    good = Threshold(PAIR, ThresholdRule(question_chars=50))
    report = compare(record(), [good, Cascade(PAIR), Blind(), Wrong()])
    over = {name: pair["quality_over_random_at_its_cost"] for name, pair in report["paired"].items()}
    assert over["threshold"]["mean"] == pytest.approx(0.9 - 0.7)
    assert over["threshold"]["low"] > 0.1
    assert over["cascade"]["low"] > 0
    assert over["blind"]["low"] < 0 < over["blind"]["high"]
    assert over["wrong"]["high"] < -0.1
    arms = report["arms"]
    assert arms["threshold"]["quality"]["mean"] == pytest.approx(0.9)
    assert arms["threshold"]["cost"]["mean"] == pytest.approx(3.0)
    assert arms["always small"]["quality"]["mean"] == pytest.approx(0.5)
    assert arms["always big"]["cost"]["mean"] == pytest.approx(5.0)
    assert arms["random"]["ms"]["mean"] == pytest.approx(250.0)


def test_a_cascade_pays_and_waits_for_both() -> None:
    rows = [
        Recorded("a", "a", Played(0.0, 1.0, 10.0), Played(1.0, 5.0, 70.0), Heard(0, -2.0)),
        Recorded("b", "b", Played(0.5, 2.0, 20.0), Played(1.0, 6.0, 80.0), Heard(0, -0.5)),
        Recorded("c", "c", Played(0.0, 1.0, 10.0), Played(0.0, 5.0, 70.0), Heard(0, None)),
    ]
    arm = compare(rows, [Cascade(PAIR, CascadeRule(-1.0))])["arms"]["cascade"]
    assert arm["quality"]["mean"] == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert arm["cost"]["mean"] == pytest.approx((6.0 + 2.0 + 6.0) / 3)
    assert arm["ms"]["mean"] == pytest.approx((80.0 + 20.0 + 80.0) / 3)
    assert arm["share_big"]["mean"] == pytest.approx(2 / 3)


def test_a_cascade_reads_recorded_answers() -> None:
    small, big = Played(0.0, 1.0, 10.0), Played(1.0, 5.0, 70.0)
    said = ("fine", "I can't say", "going round " * 20, "half")
    rows = [Recorded(text, text, small, big, Heard(0, -0.5, text, text == "half")) for text in said]

    def to_big(rule: CascadeRule) -> float:
        return float(compare(rows, [Cascade(PAIR, rule)])["arms"]["cascade"]["share_big"]["mean"])

    assert to_big(CascadeRule()) == pytest.approx(1 / 4)
    assert to_big(CascadeRule(escalate_repeating=1.0)) == 0
    assert to_big(CascadeRule(escalate_matching=("can't",))) == pytest.approx(2 / 4)
    assert to_big(CascadeRule(escalate_matching=("can't",), escalate_cut=True)) == pytest.approx(3 / 4)
    curve = compare(rows, [Cascade(PAIR, CascadeRule(escalate_cut=True))])["cascade_curve"]
    assert [point["share_big"] for point in curve] == [pytest.approx(2 / 4), 1.0], "its other rules stay"


def test_rules_that_read_answers_need_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_answers(count: int) -> Path:
        rows = [row_of(row) for row in record(4)]
        for row in rows[:count]:
            row["small"] |= {"answer": "going round " * 20, "cut": True}
        return written_rows(tmp_path / "r.jsonl", rows)

    rules = tmp_path / "rules.toml"
    assert run("route", "eval", str(with_answers(4)), "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["notes"], report["arms"]["cascade"]["share_big"]["mean"]) == ([], 1.0)
    assert run("route", "eval", str(with_answers(3)), "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["notes"] == ["cascade does not look for repetition: not every row has small.answer"]
    assert report["arms"]["cascade"]["share_big"]["mean"] < 1, "then of no row"
    for text, words in (
        ("escalate_cut = true", "reads small.cut"),
        ("escalate_matching = ['x']", "reads small.answer"),
        ("escalate_shorter_than = 3", "reads small.answer"),
        ("escalate_repeating = 0.5", "reads small.answer"),
    ):
        rules.write_text(f"[cascade]\n{text}\n")
        assert run("route", "eval", str(with_answers(3)), "--rules", str(rules)) == 2
        assert words in capsys.readouterr().err
        assert run("route", "eval", str(with_answers(4)), "--rules", str(rules)) == 0
        capsys.readouterr()


def test_what_the_token_router_did_is_taken_from_the_record() -> None:
    small, big, heard = Played(0.0, 1.0, 10.0), Played(1.0, 5.0, 70.0), Heard(0, -2.0)
    rows = [
        Recorded(name, name, small, big, heard, (Played(q, 2.0, 30.0), q / 4)) for name, q in (("a", 0.8), ("b", 0.4))
    ]
    arm = compare(rows, [Token(PAIR)])["arms"]["token"]
    assert arm["quality"]["mean"] == pytest.approx(0.6)
    assert arm["cost"]["mean"] == pytest.approx(2.0)
    assert arm["share_big"]["mean"] == pytest.approx(0.15)


def test_the_token_router_stands_in_the_table_where_every_row_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = {"quality": 0.9, "cost": 2, "ms": 50, "share_big": 0.2}
    rows = [row_of(row, token=mixed) for row in record(4)]
    assert run("route", "eval", str(written_rows(tmp_path / "r.jsonl", rows)), "--json") == 0
    arm = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]["token"]
    assert (arm["quality"]["mean"], arm["share_big"]["mean"]) == (pytest.approx(0.9), pytest.approx(0.2))
    del rows[1]["token"]
    file = written_rows(tmp_path / "r.jsonl", rows)
    assert run("route", "eval", str(file), "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "token" not in report["arms"]
    assert report["notes"][1:] == ["token is left out: not every row has what it did"]
    (tmp_path / "rules.toml").write_text("[token]\nfrom_nats = 2.0\n")
    assert run("route", "eval", str(file), "--rules", str(tmp_path / "rules.toml")) == 2
    assert "recorded, not replayed" in capsys.readouterr().err


def test_lots_of_the_same_cost_by_hand() -> None:
    small, big = table([Played(0.2, 1.0, 1.0)] * 2), table([Played(0.8, 5.0, 1.0)] * 2)
    arm = table([Played(0.2, 1.0, 1.0), Played(1.0, 5.0, 1.0)])
    weights = torch.ones(4, 2, dtype=torch.float64)
    found = over_random(arm, small, big, weights)
    assert found is not None
    assert found["mean"] == pytest.approx(0.6 - 0.5)
    dear = table([Played(0.8, 9.0, 1.0)] * 2)
    found = over_random(dear, small, big, weights)
    assert found is not None
    assert found["mean"] == pytest.approx(0.0), "dearer than always big: held against always big"
    assert over_random(arm, big, small, weights) is None


def row_of(row: Recorded, **changes: Any) -> dict[str, Any]:
    assert row.heard is not None
    small = {**vars(row.small), "mean_logprob": row.heard.mean_logprob}
    return {"prompt": row.prompt, "small": small, "big": dict(vars(row.big)), **changes}


def test_eval_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    file = written_rows(tmp_path / "r.jsonl", [row_of(row) for row in record(40)])
    save_router(tmp_path / "router", saved)
    (tmp_path / "rules.toml").write_text("[threshold]\nquestion_chars = 50\n")
    options = ["--learned", str(tmp_path / "router"), "--rules", str(tmp_path / "rules.toml")]
    assert run("route", "eval", str(file), *options, "--out", str(tmp_path / "o.json"), "--json") == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report == json.loads((tmp_path / "o.json").read_text())
    assert set(report["arms"]) == {"always small", "always big", "random", "threshold", "cascade", "learned"}
    assert report["arms"]["threshold"]["share_big"]["mean"] == 0.5
    assert [point["share_big"] for point in report["cascade_curve"]] == sorted(
        point["share_big"] for point in report["cascade_curve"]
    )
    assert "always big" in printed


def test_a_router_is_not_judged_on_what_it_was_fitted_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: Saved
) -> None:
    save_router(tmp_path / "router", saved)
    prompt = str(planted()[7].prompt).upper()
    file = written_rows(
        tmp_path / "r.jsonl", [row_of(row) for row in record(4)] + [row_of(record(1)[0], prompt=prompt)]
    )
    assert run("route", "eval", str(file), "--learned", str(tmp_path / "router")) == 2
    assert "was fitted on 1 of the 5 prompts" in capsys.readouterr().err


def test_without_log_probabilities_the_cascade_is_left_out_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row_of(row) for row in record(4)]
    del rows[2]["small"]["mean_logprob"]
    file = written_rows(tmp_path / "r.jsonl", rows)
    assert run("route", "eval", str(file), "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "cascade" not in report["arms"]
    assert report["notes"] == ["cascade is left out: not every row has small.mean_logprob"]
    (tmp_path / "rules.toml").write_text("[cascade]\nescalate_below = -1\n")
    assert run("route", "eval", str(file), "--rules", str(tmp_path / "rules.toml")) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"big": None}, "big is missing"),
        ({"big": {"quality": 2, "cost": 1, "ms": 1}}, "above 1"),
        ({"big": {"quality": 1, "cost": -1, "ms": 1}}, "big.cost is not a number"),
        ({"big": {"quality": 1, "cost": 1}}, "big.ms is not a number"),
        ({"big": {"quality": 1, "cost": 1, "ms": 1, "mean_logprob": -1}}, "unknown field 'mean_logprob' in big"),
        ({"small": {"quality": 1, "cost": 1, "ms": 1, "mean_logprob": 1}}, "0 or less"),
        ({"small": {"quality": 1, "cost": 1, "ms": 1, "mean_logprob": -1, "answer": 3}}, "small.answer is not a text"),
        ({"small": {"quality": 1, "cost": 1, "ms": 1, "mean_logprob": -1, "cut": 1}}, "small.cut not true or false"),
        ({"cluster": 3}, "cluster is not a text"),
        ({"token": {"quality": 1, "cost": 1, "ms": 1}}, "token.share_big is not a number"),
        ({"token": {"quality": 1, "cost": 1, "ms": 1, "share_big": 2}}, "token.share_big is above 1"),
        ({"token": None}, "token is missing"),
    ],
)
def test_a_bad_record_is_refused_by_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    file = written_rows(tmp_path / "r.jsonl", [row_of(record(1)[0], **changes)])
    assert run("route", "eval", str(file)) == 2
    assert words in capsys.readouterr().err


# --- calibrating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handoff_ms", "rule"),
    [
        ([9, 9, 9], Rule(0, 100)),
        ([11, 9, 9], Rule(100, 200)),
        ([11, 11, 9], Rule(200, 400)),
        ([9, 11, 9], Rule(200, 400)),
        ([9, 9, 11], Rule(400, NEVER)),
        ([10, 10, 10], Rule(400, NEVER)),
    ],
    ids=["always", "from 200", "from 400", "not for good before 400", "not in the end", "never"],
)
def test_translating_pays_from_where_it_does_for_good(handoff_ms: list[float], rule: Rule) -> None:
    rows = [Measured(tokens, ms, 10.0) for tokens, ms in zip((100, 200, 400), handoff_ms, strict=True)]
    assert concluded(rows) == rule


def test_a_text_is_cut_to_what_both_read() -> None:
    lm, other = tiny.language_model("llama"), tiny.language_model("qwen3")
    from kvlingo.states import read_conversation

    text = tiny.text(200)
    part = cut(text, lm, other, 64)
    longest = max(len(read_conversation(part, each, add_generation_prompt=True)) for each in (lm, other))
    assert 56 <= longest <= 64
    assert text.startswith(part)


def test_calibrating_writes_what_a_server_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lms = {"small": tiny.language_model("llama"), "big": tiny.language_model("llama", seed=5)}
    for name, lm in lms.items():
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    cards = [card_of(lm) for lm in lms.values()]
    translator = identity_translator(lms["small"].geometry, torch.float64)
    save_translator(tmp_path / "t", translator, Manifest(*cards, {}, {"verdict": "PASS"}))
    save_translator(tmp_path / "unjudged", translator, Manifest(*cards[::-1], {}, None))
    (tmp_path / "text.txt").write_text(tiny.text(600))
    models = [part for name in lms for part in ("--model", f"{name}={tmp_path / name}")]
    folders = ["--translator", str(tmp_path / "t"), "--translator", str(tmp_path / "unjudged")]
    out = tmp_path / "rules.toml"
    common = ["calibrate", *models, "--out", str(out), "--text", str(tmp_path / "text.txt"), "--dtype", "float64"]
    assert run(*common) == 2
    assert "give at least one: --translator" in capsys.readouterr().err
    assert run(*common, *folders, "--lengths", "16,32", "--repeats", "1", "--device", "cpu", "--json") == 0
    told = capsys.readouterr()
    assert "big → small is not measured: it was never evaluated" in told.err
    (found,) = read_rules(out).switches
    assert (found.source, found.target) == ("small", "big")
    assert [row.tokens for row in found.measured] == sorted({row.tokens for row in found.measured})
    assert all(8 < row.tokens <= 32 and row.handoff_ms > 0 and row.reprefill_ms > 0 for row in found.measured)
    assert Rule(found.reprefill_up_to, found.translate_from) == concluded(found.measured)
    assert found.rates is not None
    assert found.rates.reading.s_per_byte > 0
    assert "the cost model says hand-over" in told.err
    (way,) = json.loads(told.out.splitlines()[-1])["switch"]
    assert way["target"] == "big"
    assert [each["tokens"] for each in way["errors"]] == [row.tokens for row in found.measured]
    cost, handoff = read_cost(lms["big"]), handoff_cost(translator)
    for row, each in zip(found.measured, way["errors"], strict=True):
        said = 1e3 * handoff_s(cost, handoff, found.rates, row.tokens)
        assert said == pytest.approx(row.handoff_ms * (1 + each["handoff_error"]), rel=1e-3)
        said = 1e3 * pass_s(cost, found.rates.reading, row.tokens)
        assert said == pytest.approx(row.reprefill_ms * (1 + each["reprefill_error"]), rel=1e-3)
    assert run(*common, *folders) == 2
    assert "--overwrite" in capsys.readouterr().err

    from kvlingo.jobs import Where

    places = {name: str(tmp_path / name) for name in lms}
    switches = read_rules(out).switches
    with closing(load_engine(places, [tmp_path / "t"], where=Where("cpu", "float64"), switches=switches)) as engine:
        (link,) = engine._switch._links
        assert link.rule == concluded(found.measured)
        assert link.rates == found.rates
