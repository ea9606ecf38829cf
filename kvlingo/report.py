"""The verdict on a translator: every arm in one table, as an object, as JSON, and on the screen.

Knows which arms there are and which of them a translator has to beat. Does not know models or
texts, and computes no figure itself: `metrics` does.

A translated cache that lowers the loss proves little: text features alone, a short native tail, or
a cache from another document lower it too. So the verdict is PASS only if the translated cache is
closer to native than each of those, by paired intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadArtifact
from kvlingo.metrics import (
    CONFIDENCE,
    FEW_CLUSTERS,
    RESAMPLES,
    DocumentScores,
    Estimate,
    Ratio,
    arm_ratios,
    byte_counts,
    check_scores,
    cluster_bootstrap,
    estimates,
    kl_band_ratios,
    paired_kl_ratio,
)

ARMS = (
    "native",
    "translated",
    "no_text",
    "token_only",
    "tail_only",
    "no_context",
    "wrong_document",
    "random_map",
    "source_alone",
)
CONTROLS = ("token_only", "tail_only", "wrong_document", "random_map")
SELF_CHECK_NATS = 1e-6
ArmMetrics = dict[str, dict[str, Estimate | None]]


@dataclass(frozen=True)
class Report:
    """What an evaluation found: the JSON object, with names. Plain values only, none of them NaN.

    Fields:
        verdict: "PASS" or "FAIL".
        reasons: why it failed, one sentence each; empty on PASS.
        notes: what a reader has to know to read the figures, e.g. why one is null.
        arms: arm -> metric -> {"mean", "low", "high"}; a metric that the arm can't have is None.
        kl_by_position: arm -> "1" | "2-8" | "rest" -> KL in nats.
        paired: arm -> {"kl_difference_nats": KL of the arm minus KL of `translated`}; above 0,
            `translated` is better.
        by_kind: kind of text -> {"num_documents", "num_clusters", "arms"}.
        pair: the two models.
        plan: the hand-over the documents were scored under.
        num_documents, num_clusters: held-out documents, and the books or sites they are from.
        bootstrap: what was drawn, how often, from which seed.
        self_check: largest KL of native to itself at any position, in nats; None if not scored.
        attention_output_cosine: {"mean", "worst_layer", "worst_layer_index"}; None if not measured.
        passkey: arm -> share of codes recalled, or None if not measured.
        environment: see `environment_card`.
    """

    verdict: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    arms: ArmMetrics
    kl_by_position: dict[str, dict[str, Estimate | None] | None]
    paired: ArmMetrics
    by_kind: dict[str, dict[str, Any]]
    pair: dict[str, Any]
    plan: dict[str, Any]
    num_documents: int
    num_clusters: int
    bootstrap: dict[str, Any]
    self_check: float | None
    attention_output_cosine: dict[str, Any] | None
    passkey: dict[str, Any] | None
    environment: dict[str, Any]

    @classmethod
    def from_scores(
        cls,
        scores: Sequence[DocumentScores],
        *,
        pair: dict[str, Any],
        plan: dict[str, Any],
        environment: dict[str, Any],
        attention: dict[str, Any] | None = None,
        passkey: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> Report:
        """Sum up scored documents.

        Raises:
            BadInput: the arms can't be compared; see `metrics.check_scores`.
        """
        check_scores(scores)
        weights = draw(scores, seed)
        arms, paired = summarise_arms(scores, weights), paired_differences(scores, weights)
        itself = self_check(scores)
        reasons = why_failed(arms, paired, itself)
        return cls(
            verdict="FAIL" if reasons else "PASS",
            reasons=reasons,
            notes=tuple(notes(scores, arms)),
            arms=arms,
            kl_by_position=positions_of_arms(scores, weights),
            paired=paired,
            by_kind=by_kind(scores, seed),
            pair=plain(pair),
            plan=plain(plan),
            num_documents=len(scores),
            num_clusters=count_clusters(scores),
            bootstrap=bootstrap_card(scores, seed),
            self_check=finite(itself),
            attention_output_cosine=plain(attention),
            passkey=plain(passkey),
            environment=plain(environment),
        )

    @property
    def passed(self) -> bool:
        """Whether the translator beat every control."""
        return self.verdict == "PASS"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `json` can write and `from_dict` restores."""
        return {**asdict(self), "reasons": list(self.reasons), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Restore what `to_dict` gave.

        Raises:
            BadArtifact: keys are missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if data.keys() != names:
            raise BadArtifact(
                f"not an evaluation report of this version: missing {sorted(names - data.keys())},"
                f" unknown {sorted(data.keys() - names)}; run the evaluation again"
            )
        return cls(**{**data, "reasons": tuple(data["reasons"]), "notes": tuple(data["notes"])})

    def to_json(self) -> str:
        """Return the report as one line of JSON; what has no value is null, never NaN."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Restore what `to_json` gave.

        Raises:
            BadArtifact: not JSON, or not a report.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadArtifact(f"the report is not JSON ({error}); run the evaluation again") from None
        if not isinstance(data, dict):
            raise BadArtifact(f"the report is a {type(data).__name__}, not an object; run the evaluation again")
        return cls.from_dict(data)


# --- summing up ---


def arm_order(scores: Sequence[DocumentScores]) -> tuple[str, ...]:
    """Return the scored arms in the order of the table; unknown ones last."""
    scored = scores[0].arms
    return (*(arm for arm in ARMS if arm in scored), *(arm for arm in scored if arm not in ARMS))


def draw(scores: Sequence[DocumentScores], seed: int) -> Tensor:
    """Draw the bootstrap weights that all arms share."""
    return cluster_bootstrap([document.cluster for document in scores], seed=seed)


def count_clusters(scores: Sequence[DocumentScores]) -> int:
    """Return the number of books or sites."""
    return len({document.cluster for document in scores})


def bootstrap_card(scores: Sequence[DocumentScores], seed: int) -> dict[str, Any]:
    """Say what the intervals are made of."""
    few = count_clusters(scores) < FEW_CLUSTERS
    drawn = "clusters, then documents inside them" if few else "clusters"
    return {"confidence": CONFIDENCE, "drawn": drawn, "resamples": RESAMPLES, "seed": seed}


def summarise_arms(scores: Sequence[DocumentScores], weights: Tensor) -> ArmMetrics:
    """Return every metric of every arm with its interval."""
    return estimate_all({arm: arm_ratios(scores, arm) for arm in arm_order(scores)}, weights)


def positions_of_arms(
    scores: Sequence[DocumentScores], weights: Tensor
) -> dict[str, dict[str, Estimate | None] | None]:
    """Return every arm's KL at the first, the next seven and the later positions."""
    bands = {arm: kl_band_ratios(scores, arm) for arm in arm_order(scores)}
    found = estimate_all({arm: ratios for arm, ratios in bands.items() if ratios is not None}, weights)
    return {arm: found.get(arm) for arm in bands}


def paired_differences(scores: Sequence[DocumentScores], weights: Tensor) -> ArmMetrics:
    """Return how much further from native than `translated` every other arm is."""
    if "translated" not in scores[0].arms:
        return {}
    rivals = [arm for arm in arm_order(scores) if arm not in ("native", "translated")]
    ratios = {arm: paired_kl_ratio(scores, arm, "translated") for arm in rivals}
    held = {arm: {"kl_difference_nats": r} for arm, r in ratios.items() if r is not None}
    return estimate_all(held, weights)


def estimate_all(ratios: Mapping[str, Mapping[str, Ratio | None]], weights: Tensor) -> ArmMetrics:
    """Estimate the ratios of every arm together, which is much quicker than one at a time."""
    flat = {(arm, name): r for arm, named in ratios.items() for name, r in named.items()}
    found = estimates(flat, weights)
    return {arm: {name: found[arm, name] for name in named} for arm, named in ratios.items()}


def by_kind(scores: Sequence[DocumentScores], seed: int) -> dict[str, dict[str, Any]]:
    """Return the arms for each kind of text, with intervals over that kind's own clusters."""
    kinds: dict[str, list[DocumentScores]] = {}
    for document in scores:
        kinds.setdefault(document.kind, []).append(document)
    return {
        kind: {
            "num_documents": len(members),
            "num_clusters": count_clusters(members),
            "arms": summarise_arms(members, draw(members, seed)),
        }
        for kind, members in sorted(kinds.items())
    }


def self_check(scores: Sequence[DocumentScores]) -> float | None:
    """Return the largest |KL(native ‖ native)|: 0 up to rounding, or the metric is broken."""
    kls = [d.arms["native"].kl_nats for d in scores if "native" in d.arms]
    values = [kl.detach().double().abs().cpu() for kl in kls if kl is not None and len(kl)]
    return float(torch.cat(values).max()) if values else None


# --- the verdict ---


def why_failed(arms: ArmMetrics, paired: ArmMetrics, itself: float | None) -> tuple[str, ...]:
    """Return the reasons against a PASS, none if there is none."""
    reasons = []
    if itself is None:
        reasons.append("native has no KL, so the self-check could not be made")
    elif not itself <= SELF_CHECK_NATS:
        limit = f"expected at most {SELF_CHECK_NATS:.0e}"
        reasons.append(f"KL of native to itself is {itself:.1e} nats, {limit}")
    if "translated" not in arms:
        return (*reasons, "translated was not scored")
    if arms["translated"]["kl_nats"] is None:
        reasons.append("translated has no finite KL")
    return (*reasons, *filter(None, (why_not_beaten(arm, arms, paired) for arm in CONTROLS)))


def why_not_beaten(control: str, arms: ArmMetrics, paired: ArmMetrics) -> str | None:
    """Return why `translated` does not count as better than `control`, or None if it does."""
    if control not in arms:
        return f"{control} was not scored"
    difference = paired.get(control, {}).get("kl_difference_nats")
    if difference is None:
        return f"{control} has no finite KL difference to translated"
    if difference["low"] is None:
        return f"the KL difference of {control} to translated has no interval"
    if difference["low"] <= 0:
        shown = with_interval(difference, sign="+")
        return f"translated does not beat {control} (KL difference {shown} nats)"
    return None


def notes(scores: Sequence[DocumentScores], arms: ArmMetrics) -> Iterable[str]:
    """Say why figures are null and how far the intervals carry."""
    clusters = count_clusters(scores)
    if len(scores) < 2:
        yield "one document: no intervals"
    elif clusters < FEW_CLUSTERS:
        yield (
            f"only {clusters} cluster{'s' * (clusters > 1)}: documents inside are drawn too, and"
            " the intervals say little about other books or sites"
        )
    yield from share_notes(scores, arms)
    yield from source_notes(scores)
    unscored = [arm for arm in ARMS if arm not in arms and arm not in CONTROLS]
    if unscored:
        yield f"not scored: {', '.join(unscored)}"


def share_notes(scores: Sequence[DocumentScores], arms: ArmMetrics) -> Iterable[str]:
    """Say why there is no share kept, or no interval for it."""
    if not {"native", "no_context"} <= arms.keys():
        yield "share kept is null: it needs the arms native and no_context"
        return
    share = arms["native"]["share_kept"]
    if share is None:
        gain = nll_mean(arms, "no_context") - nll_mean(arms, "native")
        yield f"share kept is null: the context's gain is not positive ({gain:.3f} nats a position)"
    elif share["low"] is None and len(scores) > 1:
        yield "share kept has no interval: in some resamples the context's gain is not positive"


def nll_mean(arms: ArmMetrics, arm: str) -> float:
    """Return the arm's mean NLL, NaN where it has none."""
    nll = arms[arm]["nll_nats"]
    return math.nan if nll is None else nll["mean"]


def source_notes(scores: Sequence[DocumentScores]) -> Iterable[str]:
    """Say how the source model's own figures differ."""
    if "source_alone" not in scores[0].arms:
        return
    yield "source_alone has its own vocabulary: no KL, no top-1, and NLL is per token of its own"
    if byte_counts(scores, "source_alone").tolist() != [document.num_bytes for document in scores]:
        yield "source_alone scored other bytes: compare bits per byte only; its share kept is null"


# --- figures and plain values ---


def with_interval(value: Estimate | None, *, wide: bool = True, sign: str = "") -> str:
    """Format a mean and its interval, beside it or below it."""
    if value is None:
        return "–"
    low, high = value["low"], value["high"]
    if low is None or high is None:
        return figure(value["mean"], sign)
    gap, comma = (" ", ", ") if wide else ("\n", ",")
    return f"{figure(value['mean'], sign)}{gap}[{figure(low)}{comma}{figure(high)}]"


def number(value: Any) -> str:
    """Format a mean: of a number, an estimate, or nothing."""
    if isinstance(value, dict):
        value = value.get("mean")
    return figure(value) if isinstance(value, int | float) else "–"


def figure(value: float, sign: str = "") -> str:
    """Format a number in about five characters, so that a small one is not shown as zero."""
    size = abs(value)
    if 0 < size < 5e-4:
        return f"{value:{sign}.0e}"
    decimals = 3 if size < 10 else 2 if size < 100 else 1
    return f"{value + 0.0:{sign}.{decimals}f}"


def plain(value: Any) -> Any:
    """Turn a value into what JSON gives back unchanged; NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float):
        return finite(value)
    return value if isinstance(value, int | str | None) else str(value)


def finite(value: float | None) -> float | None:
    """Return the value, None for NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None
