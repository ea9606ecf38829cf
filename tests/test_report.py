"""The verdict can fail: ties, reversed signs, missing arms and broken figures never pass."""

from __future__ import annotations

import io
import json
import math
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvlingo.environment import commit_of, environment_card
from kvlingo.errors import BadArtifact, BadInput
from kvlingo.metrics import ArmScores, DocumentScores
from kvlingo.report import ARMS, CONTROLS, Report, plain
from kvlingo.sheets import print_report

POSITIONS = 48
WINNER = {
    "native": 0.0, "translated": 0.15, "no_text": 0.4, "token_only": 0.37, "tail_only": 0.6,
    "no_context": 1.4, "wrong_document": 0.8, "random_map": 2.0, "source_alone": 0.3,
}  # fmt: skip
KINDS = ("novel", "encyclopedia", "code")


def synthetic(
    levels: dict[str, float], *, documents: int = 24, clusters: int = 12, seed: int = 0
) -> list[DocumentScores]:
    """Documents whose arms lie around `levels` of KL, with noise shared within a document."""
    generator = torch.Generator().manual_seed(seed)
    return [synthetic_document(levels, i, clusters, generator) for i in range(documents)]


def synthetic_document(
    levels: dict[str, float], index: int, clusters: int, generator: torch.Generator
) -> DocumentScores:
    hardness = float(0.5 + torch.rand(1, generator=generator))
    base = 2 + torch.rand(POSITIONS, generator=generator)
    arms = {}
    for name, level in levels.items():
        noise = 0.5 + torch.rand(POSITIONS, generator=generator)
        kl = level * hardness * noise
        alone = name == "source_alone"
        top1 = None if alone else torch.rand(POSITIONS, generator=generator) > level / 3
        arms[name] = ArmScores(base + kl, None if alone else kl, top1)
    return DocumentScores(f"book {index % clusters}", KINDS[index % 3], 200 + index, arms)


def report_on(scores: list[DocumentScores], **options: object) -> Report:
    return Report.from_scores(
        scores,
        pair={"source": "small", "target": "large"},
        plan={"sink": 4, "tail": 1},
        environment={"python": "3.11"},
        **options,  # type: ignore[arg-type]
    )


def rendered(report: Report, width: int = 80) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width))
    return stream.getvalue()


def test_a_clear_winner_passes() -> None:
    report = report_on(synthetic(WINNER))
    assert report.passed
    assert report.verdict == "PASS"
    assert report.reasons == ()
    assert tuple(report.arms) == ARMS
    assert report.arms["source_alone"]["kl_nats"] is None
    assert report.arms["source_alone"]["top1_agreement"] is None
    assert report.arms["source_alone"]["bits_per_byte"] is not None
    assert (report.num_documents, report.num_clusters) == (24, 12)
    assert report.self_check == 0


def test_a_random_translator_that_ties_its_controls_fails() -> None:
    report = report_on(synthetic({**WINNER, "translated": 2.0, "token_only": 2.0, "wrong_document": 2.0}))
    assert report.verdict == "FAIL"
    assert not report.passed
    assert [arm for arm in CONTROLS if any(arm in reason for reason in report.reasons)] == list(CONTROLS)


@pytest.mark.parametrize("control", CONTROLS)
def test_each_control_alone_can_fail_the_translator(control: str) -> None:
    report = report_on(synthetic({**WINNER, control: WINNER["translated"]}))
    assert report.verdict == "FAIL"
    assert len(report.reasons) == 1
    assert control in report.reasons[0]


@pytest.mark.parametrize("arm", [*CONTROLS, "translated", "native"])
def test_a_missing_arm_fails_and_says_which(arm: str) -> None:
    report = report_on(synthetic({name: level for name, level in WINNER.items() if name != arm}))
    assert report.verdict == "FAIL"
    assert any(arm in reason for reason in report.reasons)
    assert arm in rendered(report)


def test_optional_arms_may_be_missing() -> None:
    needed = ("native", "translated", *CONTROLS)
    report = report_on(synthetic({name: WINNER[name] for name in needed}))
    assert report.passed
    assert "not scored: no_text, no_context, source_alone" in report.notes
    assert all(metrics["share_kept"] is None for metrics in report.arms.values())


def test_a_swapped_sign_of_the_paired_difference_would_be_caught() -> None:
    better = report_on(constant({**WINNER, "translated": 0.1, "token_only": 0.5}))
    worse = report_on(constant({**WINNER, "translated": 0.5, "token_only": 0.1}))
    assert better.paired["token_only"]["kl_difference_nats"] == pytest.approx({"mean": 0.4, "low": 0.4, "high": 0.4})
    assert worse.paired["token_only"]["kl_difference_nats"] == pytest.approx({"mean": -0.4, "low": -0.4, "high": -0.4})
    assert (better.verdict, worse.verdict) == ("PASS", "FAIL")
    assert len(worse.reasons) == 1
    assert "token_only (KL difference -0.400" in worse.reasons[0]


def constant(levels: dict[str, float]) -> list[DocumentScores]:
    return [
        DocumentScores(
            f"book {i}",
            "novel",
            20,
            {
                name: ArmScores(torch.full((5,), 2 + level), torch.full((5,), level), torch.ones(5))
                for name, level in levels.items()
            },
        )
        for i in range(8)
    ]


def test_pairing_finds_a_small_gain_that_unpaired_intervals_hide() -> None:
    scores = synthetic({**WINNER, "translated": 0.0})
    for document in scores:
        for arm in ("translated", "token_only"):
            hard = torch.full((POSITIONS,), float(len(document.cluster)) * document.num_bytes / 100)
            document.arms[arm] = ArmScores(hard, hard + 0.05 * (arm == "token_only"), torch.ones(POSITIONS))
        for arm in ("tail_only", "wrong_document", "random_map"):
            document.arms[arm] = ArmScores(hard, hard + 9, torch.ones(POSITIONS))
    report = report_on(scores)
    translated, token_only = (report.arms[arm]["kl_nats"] for arm in ("translated", "token_only"))
    assert translated is not None
    assert token_only is not None
    assert translated["high"] > token_only["low"]  # type: ignore[operator]
    assert report.passed


def test_figures_that_are_not_finite_never_pass_nor_reach_json() -> None:
    for broken, arm in (
        (math.nan, "translated"),
        (math.inf, "token_only"),
        (math.nan, "random_map"),
    ):
        scores = synthetic(WINNER)
        kl = scores[3].arms[arm].kl_nats
        assert kl is not None
        kl[7] = broken
        report = report_on(scores)
        assert report.verdict == "FAIL"
        assert any(arm in reason for reason in report.reasons)
        assert report.arms[arm]["kl_nats"] is None
        assert "NaN" not in report.to_json()
        assert "Infinity" not in report.to_json()
        rendered(report)


def test_a_broken_self_check_fails() -> None:
    report = report_on(synthetic({**WINNER, "native": 1e-3}))
    assert report.verdict == "FAIL"
    assert "KL of native to itself" in report.reasons[0]


def test_share_kept_is_null_with_its_reason_where_the_context_gains_nothing() -> None:
    report = report_on(synthetic({**WINNER, "no_context": 0.0}))
    assert all(metrics["share_kept"] is None for metrics in report.arms.values())
    assert any("gain is not positive" in note for note in report.notes)
    assert report.passed


def test_one_document_has_no_intervals_and_can_not_pass() -> None:
    report = report_on(synthetic(WINNER, documents=1))
    kl = report.arms["translated"]["kl_nats"]
    assert kl is not None
    assert kl["low"] is None
    assert kl["high"] is None
    assert report.verdict == "FAIL"
    assert all("no interval" in reason for reason in report.reasons)
    assert "one document: no intervals" in report.notes


def test_few_clusters_are_said() -> None:
    report = report_on(synthetic(WINNER, clusters=2))
    assert report.bootstrap["drawn"] == "clusters, then documents inside them"
    assert any("only 2 clusters" in note for note in report.notes)
    assert report_on(synthetic(WINNER)).bootstrap["drawn"] == "clusters"


def test_other_bytes_of_the_source_are_said() -> None:
    scores = synthetic(WINNER)
    alone = scores[0].arms["source_alone"]
    scores[0].arms["source_alone"] = ArmScores(alone.nll_nats, num_bytes=scores[0].num_bytes - 1)
    report = report_on(scores)
    assert report.arms["source_alone"]["share_kept"] is None
    assert any("other bytes" in note for note in report.notes)


def test_no_documents_is_an_error() -> None:
    with pytest.raises(BadInput):
        report_on([])


def test_figures_by_kind_and_position() -> None:
    report = report_on(synthetic(WINNER))
    assert tuple(report.by_kind) == tuple(sorted(KINDS))
    assert sum(kind["num_documents"] for kind in report.by_kind.values()) == 24
    assert report.by_kind["novel"]["arms"]["translated"]["kl_nats"]["mean"] == pytest.approx(0.15, abs=0.05)
    assert report.kl_by_position["source_alone"] is None
    bands = report.kl_by_position["translated"]
    assert bands is not None
    assert tuple(bands) == ("1", "2-8", "rest")
    means = [bands[name] for name in bands]
    overall = sum(n * m["mean"] for n, m in zip((1, 7, 40), means, strict=True) if m) / 48
    translated = report.arms["translated"]["kl_nats"]
    assert translated is not None
    assert overall == pytest.approx(translated["mean"])


def test_json_is_one_line_with_the_promised_keys_and_restores_the_report() -> None:
    report = report_on(
        synthetic(WINNER),
        attention={
            "mean": 0.97,
            "worst_layer": 0.8,
            "worst_layer_index": 3,
            "layers": (0.9, math.nan),
            4: None,
        },
        passkey={"translated": 0.9, "token_only": 1.0},
        seed=3,
    )
    text = report.to_json()
    assert "\n" not in text
    data = json.loads(text)
    promised = {"verdict", "arms", "pair", "plan", "num_documents", "environment"}
    assert promised <= data.keys()
    for arm in data["arms"].values():
        assert set(arm) == {"kl_nats", "top1_agreement", "nll_nats", "bits_per_byte", "share_kept"}
        assert all(value is None or set(value) == {"mean", "low", "high"} for value in arm.values())
    assert Report.from_json(text) == report
    assert data["attention_output_cosine"]["layers"] == [0.9, None]
    assert data["bootstrap"]["seed"] == 3


def test_the_seed_decides_the_intervals() -> None:
    scores = synthetic(WINNER)
    assert report_on(scores, seed=1) == report_on(scores, seed=1)
    assert report_on(scores, seed=1).arms != report_on(scores, seed=2).arms


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text() | st.integers(), json_like))
@settings(max_examples=60, deadline=None)
def test_whatever_a_caller_adds_survives_json(extra: dict[str, object]) -> None:
    kept = plain(extra)
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert plain(kept) == kept


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "list, not an object"), ('{"verdict": "PASS"}', "missing .*'arms'")],
)
def test_damaged_reports_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BadArtifact, match=message) as caught:
        Report.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_shows_all_arms_in_order_with_the_verdict_below(width: int) -> None:
    report = report_on(
        synthetic(WINNER),
        attention={"mean": 0.97, "worst_layer": 0.8, "worst_layer_index": 3},
        passkey={"translated": 0.9, "token_only": {"mean": 1.0}, "tail_only": None},
    )
    text = rendered(report, width)
    places = [text.index(f"\n{arm} ") for arm in ARMS]
    assert places == sorted(places)
    assert text.index("PASS: translated is closer") > places[-1]
    assert "…" not in text
    table = text[: text.index("PASS")]
    assert max(map(len, table.splitlines())) <= width
    assert len(table.splitlines()) == 4 + len(ARMS) * (1 if width >= 104 else 2)
    for figure in (
        "0.970",
        "worst layer 3: 0.800",
        "translated 0.900",
        "token_only 1.000",
        "tail_only –",
        "12 clusters",
    ):
        assert figure in " ".join(text.split())


def test_a_bad_translator_still_fits_a_narrow_console() -> None:
    levels = {**WINNER, "translated": 3.0, "random_map": 40.0, "tail_only": 2e-5}
    text = rendered(report_on(synthetic(levels)), 80)
    assert "…" not in text
    assert max(map(len, text[: text.index("FAIL")].splitlines())) <= 80
    assert "2e-05" in text  # not 0.000


def test_markup_in_names_is_printed_as_it_is() -> None:
    report = Report.from_scores(
        synthetic({**WINNER, "translated": 3.0}),
        pair={"source": "[bold]x[/]", "target": "y"},
        plan={},
        environment={},
    )
    assert "[bold]x[/] → y" in rendered(report, 200)
    assert "FAIL: translated does not beat token_only (KL difference -" in rendered(report, 200)


def test_a_commit_is_told_with_whether_its_sources_were_changed(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    (tmp_path / "kvlingo").mkdir()
    (tmp_path / "kvlingo" / "a.py").write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    assert commit_of(tmp_path) == commit
    (tmp_path / "notes.txt").write_text("no source\n")
    assert commit_of(tmp_path) == commit
    (tmp_path / "kvlingo" / "a.py").write_text("2\n")
    assert commit_of(tmp_path) == f"{commit}+"


def test_environment_card_names_the_software_and_not_the_machine() -> None:
    card = environment_card()
    assert card["torch"] == str(torch.__version__)
    assert card["cores"] >= 1
    assert card["threads"] >= 1
    assert set(card) >= {"cpu", "memory_bytes", "python", "transformers", "kvlingo", "commit", "load", "date"}
    text = json.dumps(card)
    assert str(Path.home()) + "/" not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text
