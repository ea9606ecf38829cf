"""The commands, on tiny saved models: what they print, what they leave behind, and how they refuse."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import T5Config

from kvlingo import cli, compacting
from kvlingo.language_model import LanguageModel
from kvlingo.sensitivity import SensitivityOptions
from kvlingo.store import load_translator, read_manifest
from kvlingo.workplace import TextsSeen, digest, fair_to_judge_on
from tests import tiny

ARTIFACT = {"translator.safetensors", "translator.json", "README.md"}
EMOJI_AND_HEBREW = "\U0001f600\U0001f469\u200d\U0001f467! \u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd " * 12
SMALL_FIT = ["--tokens", "2500", "--context", "32,48", "--chat-share", "0.1"]
SMALL_TRAINING = ["--context", "16,24", "--continuation", "8", "--batch", "2", "--judged", "3"]
SMALL_EVAL = ["--context", "40", "--continuation", "12", "--documents", "6", "--passkeys", "0", "--no-keep"]


def save(lm: LanguageModel, folder: Path) -> Path:
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two tiny models in folders, with different tokenizers, and a folder of texts."""
    root = tmp_path_factory.mktemp("pair")
    source = tiny.language_model("llama", dtype=torch.float32)
    target = tiny.language_model("gemma3", tokenizer=tiny.merging_tokenizer(), seed=1, dtype=torch.float32)
    texts = root / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"text-{number}.txt").write_text(tiny.text(150, seed=number))
    return SimpleNamespace(
        root=root,
        source=str(save(source, root / "source")),
        target=str(save(target, root / "target")),
        texts=str(texts),
    )


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit code and what it printed."""

    def run(*arguments: Any) -> SimpleNamespace:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return SimpleNamespace(code=stopped.value.code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="module")
def fitted(pair: SimpleNamespace) -> Path:
    """A translator fitted by the command; tests that change it copy it first."""
    out = pair.root / "fitted"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fit", pair.source, pair.target, "--out", str(out), "--text", pair.texts, *SMALL_FIT])
    assert stopped.value.code == 0
    return out


def copy_of(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "copy"))


def last_json(ran: SimpleNamespace) -> dict[str, Any]:
    return json.loads(ran.out.rstrip("\n").splitlines()[-1])


def assert_refused(ran: SimpleNamespace, *words: str) -> None:
    lines = [line for line in ran.err.splitlines() if line.startswith("kvlingo: ")]
    assert ran.code == 2, ran.err
    assert len(lines) == 1
    assert ran.err.rstrip("\n").splitlines()[-1] == lines[0]
    assert "Traceback" not in ran.err
    for word in words:
        assert word in lines[0]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- fit, distill, eval, handoff, info ---


def test_fit_saves_the_translator_and_its_controls(fitted: Path, run: Run) -> None:
    assert ARTIFACT | {"controls", "work"} == names_in(fitted)
    assert names_in(fitted / "controls") == {"token_only", "no_text"}
    told = last_json(run("info", fitted, "--json"))
    assert 0 < told["held_out"]["kl_nats"] < 0.2
    assert told["held_out"]["controls_kl_nats"].keys() == {"token_only", "no_text"}
    assert told["held_out"]["hand_overs"] >= 1
    assert 0 < told["held_out"]["attention_output_cosine"]["mean"] <= 1
    assert told["options"]["fit"]["tokens"] == 2500
    assert told["options"]["num_texts"]["training"] + told["options"]["num_texts"]["held_out"] == 6


def test_the_artifact_names_no_folder_of_this_machine(fitted: Path, pair: SimpleNamespace) -> None:
    for name in ("translator.json", "README.md"):
        assert str(pair.root) not in (fitted / name).read_text()


def test_fit_tells_size_before_and_quality_after(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    ran = run(
        "fit", pair.source, pair.target, "--out", tmp_path / "t", "--text", pair.texts, *SMALL_FIT,
        "--store", "bfloat16", "--map", "lowrank", "--rank", "8", "--lambda", "0.01", "--verbose", "--json",
    )  # fmt: skip
    assert ran.code == 0
    assert "the translator will take" in ran.err
    assert "attention-output cosine" in ran.out
    assert "held-out KL to native" in ran.out
    assert "source layers" in ran.out
    result = last_json(ran)
    assert result["map"] == {"kind": "lowrank", "residual_width": 0, "reads_text": True}
    assert all(layer["damping"] == 0.01 for layer in result["layers"])
    assert result["num_bytes"] == (tmp_path / "t" / "translator.safetensors").stat().st_size


def test_what_neighbours_share_can_count_more(fitted: Path, pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    there = tmp_path / "shared"
    call = ["fit", pair.source, pair.target, "--out", there, "--text", pair.texts, *SMALL_FIT]
    assert run(*call, "--shared-weight", "8").code == 0
    assert last_json(run("info", there, "--json"))["options"]["fit"]["shared_weight"] == 8
    assert (there / "translator.safetensors").read_bytes() != (fitted / "translator.safetensors").read_bytes()
    ran = run("distill", there, "--text", pair.texts, "--steps", "1", *SMALL_TRAINING)
    assert ran.code == 0, ran.err  # its statistics are found
    assert_refused(run(*call, "--overwrite", "--shared-weight", "-1"), "--shared-weight")


def test_a_second_fit_needs_overwrite(fitted: Path, pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    there = copy_of(fitted, tmp_path)
    before = (there / "translator.safetensors").read_bytes()
    again = ["fit", pair.source, pair.target, "--out", there, "--text", pair.texts, *SMALL_FIT, "--reach", "0"]
    assert_refused(run(*again), "already holds a translator", "overwrite")
    assert (there / "translator.safetensors").read_bytes() == before
    assert run(*again, "--overwrite").code == 0
    assert (there / "translator.safetensors").read_bytes() != before


def test_a_fit_does_not_touch_what_was_begun_for_another_pair(
    fitted: Path, pair: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    there = copy_of(fitted, tmp_path)
    for item in there.iterdir():  # as a fit leaves it that was stopped: nothing but its work
        if item.name != "work":
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    before = {path: path.read_bytes() for path in (there / "work").rglob("*") if path.is_file()}
    assert before
    other = ["fit", pair.target, pair.source, "--out", there, "--text", pair.texts, *SMALL_FIT]
    assert_refused(run(*other), "begun for", "give another folder")
    assert {path: path.read_bytes() for path in (there / "work").rglob("*") if path.is_file()} == before


def test_distil_keeps_the_ridge_and_the_curve(fitted: Path, tmp_path: Path, run: Run) -> None:
    there = copy_of(fitted, tmp_path)
    ridge = (there / "translator.safetensors").read_bytes()
    ran = run("distill", there, "--text", copy_texts(fitted), "--steps", "3", *SMALL_TRAINING, "--json")
    assert ran.code == 0, ran.err
    assert (there / "ridge" / "translator.safetensors").read_bytes() == ridge
    curve = json.loads((there / "distillation.json").read_text())
    assert curve["steps"] == [1, 2, 3]
    assert (there / "distillation.png").read_bytes().startswith(b"\x89PNG")
    result = last_json(ran)
    assert result["kl_nats"] <= result["kl_nats_before_distilling"]
    assert not list((there / "work" / "translator").glob("*.safetensors"))
    again = run("distill", there, "--text", copy_texts(fitted), "--steps", "1", *SMALL_TRAINING)
    assert again.code == 0
    assert (there / "ridge" / "translator.safetensors").read_bytes() == ridge


def copy_texts(fitted: Path) -> Path:
    return fitted.parent / "texts"


def bytes_of(folder: Path) -> int:
    return (folder / "translator.safetensors").stat().st_size


def test_compress_makes_a_smaller_translator_that_is_judged_and_distilled_anew(
    fitted: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "small"
    whole = copy_of(fitted, tmp_path)
    before = {name: (whole / name).read_bytes() for name in ARTIFACT}
    flags = ["--budget-mb", "0.02", "--store", "int8", "--text", copy_texts(fitted), "--json"]
    ran = run("compress", whole, "--out", out, *flags)
    told = last_json(ran)
    assert ran.code == 0, ran.err
    assert told["num_bytes"] == bytes_of(out) < 0.5 * bytes_of(whole)
    assert told["storage"] == "int8"
    assert "nothing is known of its quality yet" in ran.out
    assert {name: (whole / name).read_bytes() for name in ARTIFACT} == before, "the whole one is kept as it is"
    facts = last_json(run("info", out, "--json"))
    assert facts["held_out"] is None, "what was found of the whole one is not claimed for this one"
    assert facts["options"]["compress"]["whole"] == last_json(run("info", whole, "--json"))["weights"]
    shown = run("info", out).out
    assert "compressed: " in shown
    assert "of the outputs' variance is lost" in shown
    assert f"{bytes_of(out) / 1e6:.1f} MB as int8" in shown
    assert "not judged yet" in shown
    texts = copy_texts(fitted)
    judged = run("eval", out, "--text", texts, *SMALL_EVAL, "--json")
    assert "translated" in last_json(judged)["arms"]
    trained = run("distill", out, "--text", texts, "--steps", "2", *SMALL_TRAINING)
    assert trained.code == 0, trained.err
    assert "reading 40000 tokens" not in trained.err, "the statistics came along"
    assert load_translator(out)[0].config.ranks == load_translator(out / "ridge")[0].config.ranks


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--text-rank", "4"], "give one of --budget-mb, --flops and --rank, or only --store"),
        (["--store", "float32"], "its weights are stored as float32, which float32 is not smaller than"),
        (["--rank", "4", "--flops", "0.5"], "give one of --budget-mb, --flops and --rank"),
        (["--budget-mb", "0.001"], "too small for 3 layers: one dim a layer takes"),
        (["--weigh", "deviation", "--context", "512"], "--context, --weigh: of use only where maps lose rank"),
    ],
)
def test_compress_refuses(fitted: Path, tmp_path: Path, run: Run, flags: list[str], words: str) -> None:
    assert_refused(run("compress", fitted, "--out", tmp_path / "small", *flags), words)
    assert not (tmp_path / "small").exists()


def test_compress_without_a_bound_stores_the_same_maps_in_fewer_bytes(fitted: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "small"
    ran = run("compress", fitted, "--out", out, "--json")
    told = last_json(ran)
    assert ran.code == 0, ran.err
    assert told["num_bytes"] == bytes_of(out) < 0.6 * bytes_of(fitted)
    (before, _), (after, manifest) = load_translator(fitted), load_translator(out)
    for name, x in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], x, rtol=2**-8, atol=0)
    assert manifest.held_out is None
    shown = run("info", out).out
    assert "compressed: the same maps, stored as bfloat16" in shown
    assert (out / "controls").is_dir() == (fitted / "controls").is_dir()
    assert_refused(run("compress", out, "--out", tmp_path / "again"), "its weights are stored as bfloat16")
    again = tmp_path / "again"
    assert run("compress", out, "--out", again, "--store", "int8").code == 0
    assert_refused(run("compress", again, "--out", tmp_path / "more", "--store", "int8"), "give one of --budget-mb")
    assert_refused(run("compress", fitted, "--out", fitted / "controls" / "in"), "lies inside the translator")
    low, stored = tmp_path / "low", tmp_path / "stored"
    flags = ["--rank", "4", "--weigh", "deviation", "--store", "float32"]
    assert run("compress", fitted, "--out", low, *flags).code == 0
    assert run("compress", low, "--out", stored, "--store", "int8").code == 0
    assert "ranks 4 to 4, stored as int8: " in run("info", stored).out


def test_compress_refuses_what_it_can_not_read(fitted: Path, tmp_path: Path, run: Run) -> None:
    small = tmp_path / "small"
    assert_refused(run("compress", fitted, "--out", fitted, "--rank", "4"), "is the translator itself")
    assert_refused(run("compress", tmp_path / "none", "--out", small, "--rank", "4"), "there is no folder")
    assert run("compress", fitted, "--out", small, "--rank", "4", "--weigh", "deviation").code == 0
    assert_refused(run("compress", fitted, "--out", small, "--rank", "4"), "already holds a translator")


def test_compress_reads_text_anew_where_statistics_are_gone(
    fitted: Path, pair: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    bare = copy_of(fitted, tmp_path)
    for file in (bare / "work").glob("stats-*"):
        file.unlink()
    flags = ["--rank", "4", "--text", pair.texts, "--weigh", "deviation"]
    ran = run("compress", bare, "--out", tmp_path / "small", *flags)
    assert ran.code == 0, ran.err
    assert "reading" in ran.err
    assert bytes_of(tmp_path / "small") < bytes_of(bare)


def test_what_the_target_minds_is_measured_once(
    fitted: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, texts = copy_of(fitted, tmp_path), copy_texts(fitted)
    monkeypatch.setattr(compacting, "options_for", lambda _: SensitivityOptions(2, (32,), 12))
    ran = run("compress", whole, "--out", tmp_path / "one", "--rank", "4", "--text", texts, "--json")
    assert ran.code == 0, ran.err
    first = last_json(ran)
    assert first["weigh"] == "sensitivity"

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("models are not needed again")

    monkeypatch.setattr(compacting, "load_pair", never)
    again = last_json(run("compress", whole, "--out", tmp_path / "two", "--rank", "4", "--json"))
    assert again["layers"] == first["layers"]
    alike = last_json(
        run("compress", whole, "--out", tmp_path / "three", "--rank", "4", "--weigh", "deviation", "--json")
    )
    assert alike["lost_share"] < first["lost_share"], "what is weighed alike loses least where all is counted alike"
    monkeypatch.setattr(compacting, "options_for", lambda _: SensitivityOptions(3, (32,), 12))
    manifest = read_manifest(whole)
    assert compacting.saved_sensitivity(whole, manifest) is None, "of other options it is no good"


def test_a_fit_keeps_a_budget(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    small = tmp_path / "small"
    begin = ["fit", pair.source, pair.target, "--text", pair.texts, *SMALL_FIT]
    ran = run(*begin, "--out", small, "--budget-mb", "0.03", "--store", "bfloat16", "--json")
    assert ran.code == 0, ran.err
    assert last_json(ran)["num_bytes"] == bytes_of(small)
    assert bytes_of(small) < 30_000 + 3_000, "a header comes on top"
    assert load_translator(small)[0].config.ranks
    assert last_json(ran)["held_out"]["kl_nats"] > 0
    none = tmp_path / "none"
    assert_refused(run(*begin, "--out", none, "--budget-mb", "0.001"), "too small for 3 layers")
    assert_refused(run(*begin, "--out", none, "--budget-mb", "1", "--map", "headwise"), "no matrix to factor")
    assert not none.exists()


def test_distil_without_statistics_reads_text_anew(fitted: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvlingo.jobs.STATISTICS_TOKENS", 800)
    there = copy_of(fitted, tmp_path)
    for file in (there / "work").glob("stats-*"):
        file.unlink()
    ran = run(
        "distill", there, "--text", copy_texts(fitted), "--steps", "1", *SMALL_TRAINING, "--control", "token_only"
    )
    assert ran.code == 0, ran.err
    assert "no statistics" in ran.err
    assert (there / "controls" / "token_only" / "distillation.json").is_file()
    assert not (there / "distillation.json").exists()


def test_distil_without_matplotlib_says_so(fitted: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    there = copy_of(fitted, tmp_path)
    ran = run("distill", there, "--text", copy_texts(fitted), "--steps", "1", *SMALL_TRAINING)
    assert ran.code == 0, ran.err
    assert "pip install 'kvlingo[plot]'" in ran.err
    assert (there / "distillation.json").is_file()
    assert not (there / "distillation.png").exists()


def test_eval_prints_all_arms_and_its_verdict(fitted: Path, tmp_path: Path, run: Run) -> None:
    texts = tmp_path / "new"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(tiny.text(60, seed=100 + number))
    ran = run("eval", fitted, "--text", texts, *SMALL_EVAL, "--json")
    report = last_json(ran)
    assert ran.code == {"PASS": 0, "FAIL": 3}[report["verdict"]]
    assert {"translated", "no_text", "token_only", "wrong_document", "random_map", "source_alone"} <= set(
        report["arms"]
    )
    assert report["num_documents"] == 6
    assert report["verdict"] in ran.out


def test_eval_writes_its_report_into_the_artifact(fitted: Path, tmp_path: Path, run: Run) -> None:
    there = copy_of(fitted, tmp_path)
    weights = (there / "translator.safetensors").read_bytes()
    ran = run("eval", there, "--text", copy_texts(fitted), *SMALL_EVAL[:-1])
    assert ran.code in (0, 3)
    assert "left out" in ran.err
    assert (there / "translator.safetensors").read_bytes() == weights
    told = last_json(run("info", there, "--json"))
    assert told["held_out"]["verdict"] in ("PASS", "FAIL")
    assert "KL to native" in run("info", there).out


SMALL_SWEEP = [
    "--frontier",
    "--context",
    "40",
    "--continuation",
    "6",
    "--documents",
    "3",
    "--shares",
    "0.2",
    "--blocks",
    "1,4",
]


def test_eval_frontier_writes_json_and_picture(fitted: Path, tmp_path: Path, run: Run) -> None:
    ran = run("eval", fitted, "--text", copy_texts(fitted), *SMALL_SWEEP, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    told = last_json(ran)
    assert told == json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert told["options"]["by"] == ["spread", "random", "distance", "surprise", "oracle"]
    (length,) = told["contexts"]
    assert length["context_tokens"] == 40
    assert {row["name"] for row in length["controls"]} >= {"token_only", "tail_only", "no_context"}
    assert "re-prefill" in ran.out
    assert "nearer than random ones by" in ran.out
    assert "frontier.json" not in names_in(fitted)
    if (tmp_path / "out" / "frontier.png").exists():  # matplotlib is an extra
        assert (tmp_path / "out" / "frontier.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shares", "2"], "--shares is '2'"),
        (["--blocks", "0"], "--blocks is '0'"),
        (["--anchors-by", "luck,random"], "no signal 'luck'"),
        (["--anchors-by", "deviation", "--lengths", "x"], "--lengths is 'x'"),
    ],
)
def test_eval_frontier_refuses(fitted: Path, run: Run, tmp_path: Path, flags: list[str], words: str) -> None:
    ran = run("eval", fitted, "--text", copy_texts(fitted), *SMALL_SWEEP, *flags, "--out", tmp_path)
    assert_refused(ran, words)


def test_confidence_is_fitted_kept_and_used(fitted: Path, tmp_path: Path, run: Run) -> None:
    there = copy_of(fitted, tmp_path)
    texts = copy_texts(fitted)
    flags = ["--context", "40,48", "--continuation", "6", "--documents", "10", "--tail", "6"]
    with_middle_limit = ["--kl", str(middle_kl(there, texts, flags, run))]
    ran = run("confidence", there, "--text", texts, *flags, *with_middle_limit, "--json")
    assert ran.code == 0, ran.err
    told = last_json(ran)
    worth = told["confidence"]["fitted"]["left_out"]
    assert f"recall {worth['recall']:.2f}" in ran.out
    kept = json.loads((there / "translator.json").read_text())["manifest"]["confidence"]
    assert kept == told["confidence"]
    file = tmp_path / "talk.txt"
    file.write_text(tiny.text(30, seed=77))
    handed = run("handoff", there, file, "--max-new-tokens", "2", "--repeats", "1", "--json")
    assert handed.code == 0, handed.err
    told = last_json(handed)
    assert told["doubt"] is not None
    is_bad = told["doubt"] > kept["threshold"]
    assert is_bad == (told["plan"]["fallback"] is not None)
    assert ("looks bad" in handed.out) == is_bad
    anyway = last_json(run("handoff", there, file, "--max-new-tokens", "2", "--repeats", "1", "--anyway", "--json"))
    assert anyway["doubt"] is None
    assert anyway["plan"]["fallback"] is None


def middle_kl(folder: Path, texts: Any, flags: list[str], run: Run) -> float:
    """Return the KL that half of the hand-overs have: what the refusal of an impossible limit tells."""
    ran = run("confidence", folder, "--text", texts, *flags, "--kl", "100", "--no-keep")
    return float(ran.err.rsplit("half of them one of ", 1)[1].split()[0])


def test_confidence_without_bad_hand_overs_is_refused(fitted: Path, run: Run) -> None:
    flags = ["--context", "40", "--continuation", "6", "--documents", "4", "--tail", "6", "--kl", "100"]
    assert_refused(run("confidence", fitted, "--text", copy_texts(fitted), *flags), "nothing to tell apart", "--kl")


def test_handoff_reads_anchors(fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.txt"
    file.write_text(tiny.text(30, seed=78))
    flags = ["--max-new-tokens", "2", "--repeats", "1", "--json", "--anchors", "0.2"]
    for by in ("spread", "distance"):
        told = last_json(run("handoff", fitted, file, *flags, "--anchors-by", by))
        anchors = [s for s in told["plan"]["spans"] if s["reason"].startswith("anchor")]
        assert anchors
        assert all(by in s["reason"] for s in anchors)
    assert_refused(run("handoff", fitted, file, *flags, "--anchors-by", "luck"), "no signal 'luck'")


def test_eval_refuses_a_tail_as_long_as_the_context(fitted: Path, run: Run) -> None:
    ran = run("eval", fitted, "--text", copy_texts(fitted), *SMALL_EVAL, "--tail", "40")
    assert_refused(ran, "nothing to judge", "--tail")


def test_eval_refuses_what_was_learnt_from(fitted: Path, run: Run) -> None:
    held_out = fair_names(fitted, run)
    learnt = [path for path in copy_texts(fitted).iterdir() if path.name not in held_out]
    assert_refused(run("eval", fitted, *(f"--text={path}" for path in learnt)), "fitted on all of these texts")


def fair_names(fitted: Path, run: Run) -> set[str]:
    from kvlingo.store import read_manifest
    from kvlingo.texts import documents_from_paths

    seen = TextsSeen.from_json(read_manifest(fitted).options["texts"])
    documents = documents_from_paths([copy_texts(fitted)])
    kept, note = fair_to_judge_on(documents, seen)
    assert note is not None
    assert {digest(d) for d in kept}.isdisjoint(seen.training)
    return {Path(d.name).name for d in kept}


def test_handoff_goes_on_and_tells_plan_and_times(fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "conversation.txt"
    file.write_text(tiny.text(20, seed=9))
    ran = run("handoff", fitted, file, "--tail", "3", "--max-new-tokens", "5", "--repeats", "1", "--json")
    assert ran.code == 0, ran.err
    result = last_json(ran)
    assert result["num_tokens"] <= 5
    assert ran.out.startswith(result["continuation"] + "\n")
    assert result["plan"]["counts"]["translated"] > 0
    assert result["first_token"]["reprefill_ms"] > 0
    assert "re-prefilling" in ran.out
    again = run("handoff", fitted, file, "--tail", "3", "--max-new-tokens", "5", "--repeats", "1", "--json")
    assert last_json(again)["continuation"] == result["continuation"]


@pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
def test_a_translator_whose_report_failed_is_not_used(verdict: str, fitted: Path, tmp_path: Path, run: Run) -> None:
    from kvlingo.store import save_report

    there, file = tmp_path / "copy", tmp_path / "conversation.txt"
    shutil.copytree(fitted, there)
    save_report(there, {"verdict": verdict, "arms": {}})
    file.write_text(tiny.text(20, seed=9))
    asked = ("handoff", there, file, "--max-new-tokens", "2", "--repeats", "1", "--json")
    plan = last_json(run(*asked))["plan"]
    assert (plan["fallback"] is None) == (verdict == "PASS")
    assert (plan["counts"]["translated"] > 0) == (verdict == "PASS")
    if verdict == "FAIL":
        assert "report says FAIL" in plan["fallback"]
        assert last_json(run(*asked, "--anyway"))["plan"]["counts"]["translated"] > 0


def test_handoff_of_messages_without_text(fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "conversation.json"
    file.write_text(
        json.dumps([{"role": "user", "content": "Count the lamps."}, {"role": "assistant", "content": "Seven."}])
    )
    ran = run(
        "handoff", fitted, file, "--no-text", "--next", " And", "--max-new-tokens", "3", "--repeats", "1", "--json"
    )
    assert ran.code == 0, ran.err
    assert last_json(ran)["plan"]["counts"]["recomputed"] <= 1


def test_a_fit_without_text(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "t"
    ran = run("fit", pair.source, pair.target, "--out", out, "--text", pair.texts, *SMALL_FIT, "--no-text", "--json")
    assert ran.code == 0, ran.err
    assert names_in(out / "controls") == {"token_only"}
    assert last_json(ran)["map"]["reads_text"] is False
    ran = run("distill", out, "--text", pair.texts, "--steps", "1", *SMALL_TRAINING)
    assert ran.code == 0, ran.err


def test_info_needs_no_weights(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    for side in ("source", "target"):
        shutil.copytree(getattr(pair, side), tmp_path / side, ignore=shutil.ignore_patterns("*.safetensors"))
    ran = run("info", tmp_path / "source", tmp_path / "target", "--json")
    assert ran.code == 0, ran.err
    facts = last_json(ran)
    assert facts["tokenizers"] == "different"
    assert [x["window"] for x in facts["target"]["layers"]] == [tiny.WINDOW, None, tiny.WINDOW, None]
    assert facts["target"]["kv_features_per_token"] == 4 * 2 * 2 * 16
    assert facts["num_bytes"]["linear"]["float32"] == 4 * facts["num_bytes"]["linear"]["int8"]
    assert "tokenizers: different" in ran.out


def test_info_tells_the_size_that_fit_writes(fitted: Path, pair: SimpleNamespace, run: Run) -> None:
    facts = last_json(run("info", pair.source, pair.target, "--json"))
    written = (fitted / "translator.safetensors").stat().st_size
    assert facts["num_bytes"]["linear"]["float32"] == pytest.approx(written, rel=0.1)


def test_info_of_one_model_says_that_it_takes_two(pair: SimpleNamespace, run: Run) -> None:
    assert_refused(run("info", pair.source), "is one model")
    assert_refused(run("info", "somebody/some-model"), "or two models: kvlingo info SOURCE TARGET")


def test_info_names_the_reason_against_an_encoder_decoder(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    T5Config(d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    ran = run("info", tmp_path, pair.target, "--json")
    assert_refused(ran, "encoder-decoder")
    assert last_json(ran)["supported"] is False
    ran = run("fit", pair.source, tmp_path, "--out", tmp_path / "out", "--text", pair.texts)
    assert_refused(ran, "encoder-decoder")


@pytest.mark.parametrize("command", ["fit", "distill", "eval", "handoff", "info", "demo"])
def test_every_command_has_json(command: str, run: Run) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert "--json" in ran.out


def test_no_arguments_print_the_help_and_no_error(run: Run) -> None:
    ran = run()
    assert ran.code == 2
    assert "Usage" in ran.out + ran.err
    assert "kvlingo: " not in ran.err


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("kvlingo ")


# --- bad input: one line, exit code 2, nothing half-written ---


def fit_texts(run: Run, pair: SimpleNamespace, out: Path, *texts: Path, more: Sequence[str] = ()) -> SimpleNamespace:
    named = [word for text in texts for word in ("--text", text)]
    return run("fit", pair.source, pair.target, "--out", out, *named, *SMALL_FIT, *more)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\x00\x01\x02\xff\xfe", "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8 text"),
        (b"abc\x00\x01def", "binary"),
        (b"x", "got 1 from fewer than two files"),
    ],
    ids=["empty", "white space", "not UTF-8", "PNG", "control characters", "one token"],
)
def test_fit_refuses_a_text(content: bytes, words: str, pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert_refused(fit_texts(run, pair, tmp_path / "out", file), words)
    assert names_in(tmp_path) == {"text.txt"}


def test_fit_refuses_texts_before_it_loads_models(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    (tmp_path / "one.txt").write_text("One text alone can't be split. " * 20)
    ran = run("fit", "no-such-model", pair.target, "--out", tmp_path / "t", "--text", tmp_path / "one.txt")
    assert_refused(ran, "can't hold out documents")


def test_fit_refuses_texts_shorter_than_a_window(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"short {number}")
    assert_refused(fit_texts(run, pair, tmp_path / "out", tmp_path), "too short")
    assert not (tmp_path / "out").exists()


def test_fit_refuses_too_few_tokens(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    assert_refused(fit_texts(run, pair, tmp_path / "out", Path(pair.texts), more=["--tokens", "60"]), "too few")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(fit_texts(run, pair, tmp_path / "out", Path(pair.texts)), "is a file")
    assert (tmp_path / "out").read_text() == "mine"


def test_fit_on_emoji_and_right_to_left_text(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"{number} " + EMOJI_AND_HEBREW * 2)
    ran = fit_texts(run, pair, tmp_path / "out", texts, more=["--tokens", "800"])
    assert ran.code == 0, ran.err
    file = tmp_path / "talk.txt"
    file.write_text(EMOJI_AND_HEBREW)
    assert run("handoff", tmp_path / "out", file, "--max-new-tokens", "2", "--repeats", "1").code == 0


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"\xff\x00", "not UTF-8")])
def test_handoff_refuses_a_file(content: bytes, words: str, fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.txt"
    file.write_bytes(content)
    assert_refused(run("handoff", fitted, file), words)


@pytest.mark.parametrize("content", ["[]", "{}", '[{"role": "user"}]', '"text"', "[1]", "{", '[{"content": "x"}]'])
def test_handoff_refuses_messages(content: str, fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    assert_refused(run("handoff", fitted, file), "talk.json")


def test_handoff_of_one_token_reads_it_natively(fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("x")
    ran = run("handoff", fitted, file, "--max-new-tokens", "2", "--repeats", "1", "--json")
    assert ran.code == 0, ran.err
    assert last_json(ran)["plan"]["fallback"]
    assert "re-prefilled" in ran.out


def test_a_folder_without_weights(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    shutil.copytree(pair.source, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    ran = run("fit", tmp_path / "model", pair.target, "--out", tmp_path / "out", "--text", pair.texts)
    assert_refused(ran, "holds no weights")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["fit", "info"])
def test_a_folder_without_a_model(command: str, pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    (tmp_path / "model").mkdir()
    more = ["--out", tmp_path / "out", "--text", pair.texts] if command == "fit" else []
    assert_refused(run(command, tmp_path / "model", pair.target, *more), "has no config.json")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_vocabulary(pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    small = tiny.language_model(lambda: tiny.llama(vocab_size=270), dtype=torch.float32)
    save(small, tmp_path / "model")
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([f"<extra-{number}>" for number in range(40)])
    tokenizer.save_pretrained(tmp_path / "model")
    for command, more in (("fit", ["--out", tmp_path / "out", "--text", pair.texts]), ("info", [])):
        assert_refused(run(command, tmp_path / "model", pair.target, *more), "tokens", "rows")
    assert not (tmp_path / "out").exists()


def test_the_same_model_twice_or_swapped(fitted: Path, pair: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("hello there, river stone")
    assert_refused(run("handoff", fitted, file, "--source", pair.target, "--target", pair.source), "swapped")
    other = save(tiny.language_model("llama", seed=5, dtype=torch.float32), tmp_path / "other")
    assert_refused(run("handoff", fitted, file, "--source", other), "wrong source model")
    assert_refused(
        run("distill", fitted, "--source", other, "--steps", "1", "--text", pair.texts), "wrong source model"
    )
    assert_refused(run("eval", fitted, "--source", other, "--text", file), "wrong source model")


@pytest.mark.parametrize("command", ["distill", "eval", "info"])
def test_no_translator_there(command: str, tmp_path: Path, run: Run) -> None:
    assert_refused(run(command, tmp_path / "nothing"), "there is no folder")
    assert_refused(run(command, tmp_path), "no translator.json")


def test_a_damaged_translator(fitted: Path, tmp_path: Path, run: Run) -> None:
    there = copy_of(fitted, tmp_path)
    weights = bytearray((there / "translator.safetensors").read_bytes())
    weights[-1] ^= 1
    (there / "translator.safetensors").write_bytes(weights)
    file = tmp_path / "talk.txt"
    file.write_text("hello")
    assert_refused(run("handoff", there, file), "is damaged")


def test_no_network(tmp_path: Path, pair: SimpleNamespace, run: Run) -> None:
    assert_refused(
        run("fit", "nobody/no-such-model", pair.target, "--out", tmp_path / "out", "--text", pair.texts),
        "can't be had from the model hub",
    )
    assert not (tmp_path / "out").exists()


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["kvlingo.files.write_synced", "kvlingo.stats.save_file"])
def test_a_full_disk_while_fitting(
    place: str, pair: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: Any
) -> None:
    monkeypatch.setattr(place, disk_full)
    assert_refused(fit_texts(run, pair, tmp_path / "out", Path(pair.texts)), "no space left")
    assert names_in(tmp_path) == set()


def test_a_full_disk_at_the_end_keeps_the_statistics(
    pair: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("kvlingo.store.replace_folder", disk_full)
        assert_refused(fit_texts(run, pair, tmp_path / "out", Path(pair.texts)), "no space left")
    assert names_in(tmp_path / "out") == {"work"}
    assert not list((tmp_path / "out" / "work").glob("*.part"))
    monkeypatch.delattr("kvlingo.collecting.Collector.blocks")  # nothing is read a second time
    assert fit_texts(run, pair, tmp_path / "out", Path(pair.texts)).code == 0


def test_a_full_disk_while_distilling(fitted: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    there = copy_of(fitted, tmp_path)
    before = {name: (there / name).read_bytes() for name in ARTIFACT}
    monkeypatch.setattr("kvlingo.files.write_synced", disk_full)
    ran = run("distill", there, "--text", copy_texts(fitted), "--steps", "1", *SMALL_TRAINING)
    assert_refused(ran, "no space left")
    assert {name: (there / name).read_bytes() for name in ARTIFACT} == before
    assert "ridge" not in names_in(there)


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    """A folder whose fit was stopped says so when it is used, and nothing else answers to the signal afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("kvlingo.jobs.fit_pair", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    ran = run("fit", "a", "b", "--out", tmp_path / "out")
    assert ran.code == 130
    assert ran.err.rstrip("\n").splitlines()[-1].startswith("kvlingo: stopped: the statistics so far are kept in")
    assert signal.getsignal(signal.SIGTERM) is before
    (tmp_path / "out" / "work").mkdir(parents=True)
    assert_refused(run("info", tmp_path / "out"), "its fit was stopped before the end")


def test_what_is_no_model_is_told_in_one_sentence(tmp_path: Path, run: Run) -> None:
    text, folder = tmp_path / "notes.txt", tmp_path / "folder"
    text.write_text("hello")
    folder.mkdir()
    (folder / "model-q8.gguf").write_bytes(b"GGUF")
    assert_refused(run("info", text, text), "is a file, but no .gguf file")
    assert_refused(run("info", folder, folder), "the file in it, ")
    hub = run("info", "no-such/model", "no-such/model").err
    assert "can't be had from the model hub" in hub
    assert "http" not in hub


def test_ctrl_c_keeps_statistics_and_goes_on(pair: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    from kvlingo.collecting import Collector

    read = Collector.blocks
    calls: list[int] = []

    def blocks(self: Collector, example: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return read(self, example)

    monkeypatch.setattr(Collector, "blocks", blocks)
    out = tmp_path / "out"
    ran = fit_texts(run, pair, out, Path(pair.texts))
    assert ran.code == 130
    assert ran.err.rstrip("\n").splitlines()[-1].startswith("kvlingo: stopped: the statistics so far are kept in")
    assert names_in(out) == {"work"}
    before = len(calls)
    assert fit_texts(run, pair, out, Path(pair.texts)).code == 0
    resumed = len(calls) - before
    monkeypatch.setattr(Collector, "blocks", lambda self, example: (calls.append(1), read(self, example))[1])
    before = len(calls)
    assert fit_texts(run, pair, tmp_path / "whole", Path(pair.texts)).code == 0
    assert resumed < len(calls) - before
    # Every sum that a map is made of: an example lost or read twice moves them by a share of 1 / examples. The forward passes
    # are float32, so two runs agree to its rounding; a nearly collinear solve would magnify that in single weights.
    for what in ("training", "held-out"):
        resumed_sums, whole_sums = (
            load_file(folder / "work" / f"stats-{what}.safetensors") for folder in (out, tmp_path / "whole")
        )
        assert resumed_sums.keys() == whole_sums.keys()
        assert torch.equal(resumed_sums["tokens"], whole_sums["tokens"])
        for name in whole_sums.keys() - {"note", "tokens"}:
            assert relative_gap(resumed_sums[name], whole_sums[name]) < 1e-5, name
    resumed_maps, whole_maps = (load_translator(folder)[0].state_dict() for folder in (out, tmp_path / "whole"))
    for name, value in whole_maps.items():
        assert relative_gap(resumed_maps[name], value) < 1e-3, name


def relative_gap(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference as a share of the expected norm."""
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


def test_bad_options(fitted: Path, run: Run) -> None:
    assert_refused(run("fit", "a", "b", "--out", "c", "--context", "12,x"), "--context")
    assert_refused(run("fit", "a"), "Missing")
    assert_refused(run("frobnicate"), "frobnicate")
    assert_refused(run("eval", fitted, "--tail", "0"), "--tail")
    assert_refused(run("handoff", fitted), "Missing")
    assert_refused(run("fit", "a", "b", "--out", "c", "--seed", str(2**70)), "--seed")


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "float99"), ("--device", "toaster"), ("--native-layers", "99")]
)
def test_what_the_models_can_not_do(option: str, value: str, fitted: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("hello")
    assert_refused(run("handoff", fitted, file, option, value), value)
