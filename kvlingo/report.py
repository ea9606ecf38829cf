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
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kvlingo.errors import BadArtifact
from kvlingo.metrics import (
    CONFIDENCE,
    FEW_CLUSTERS,
    POSITION_BANDS,
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
COLUMNS = (
    "KL to native,\nnats",
    "worse than\ntranslated by",
    "\ntop-1",
    "NLL,\nnats",
    "bits/\nbyte",
    "share kept",
)
WIDE = 104

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

    def render(self, console: Console) -> None:
        """Print the arms table, the verdict in one line, and what else was measured."""
        style = "green" if self.passed else "bold red"
        say(console, title(self), style="italic")
        console.print(arms_table(self, wide=console.width >= WIDE))
        say(console, verdict_line(self), style=style)
        console.print(position_table(self))
        for line in (*beside_lines(self), *self.notes):
            say(console, f"· {line}", style="dim")


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


def say(console: Console, line: str, style: str) -> None:
    """Print one line as it is: no markup, no breaks."""
    console.print(escape(line), style=style, highlight=False, soft_wrap=True)


def arms_table(report: Report, *, wide: bool) -> Table:
    """Return the table of all arms; on a narrow console every interval goes below its mean."""
    table = arm_table("cache the\ntarget reads")
    for header in COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for arm in report.arms:
        table.add_row(arm, *arm_cells(report, arm, wide))
    return table


def arm_cells(report: Report, arm: str, wide: bool) -> Iterable[str]:
    """Return the figures of one arm, in the order of `COLUMNS`."""
    metrics = report.arms[arm]
    yield with_interval(metrics["kl_nats"], wide=wide)
    difference = report.paired.get(arm, {}).get("kl_difference_nats")
    yield with_interval(difference, wide=wide, sign="+")
    for name in ("top1_agreement", "nll_nats", "bits_per_byte"):
        yield number(metrics[name])
    yield with_interval(metrics["share_kept"], wide=wide)


def position_table(report: Report) -> Table:
    """Return KL by continuation position."""
    table = arm_table("KL by position")
    for name in POSITION_BANDS:
        table.add_column(name, justify="right", no_wrap=True)
    for arm, bands in report.kl_by_position.items():
        if bands is not None:
            table.add_row(arm, *(with_interval(bands[name]) for name in POSITION_BANDS))
    return table


def arm_table(first: str) -> Table:
    """Return an empty table with a column for the arms."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def title(report: Report) -> str:
    """Name the pair and the size of the evidence."""
    sides = " → ".join(str(report.pair[side]) for side in ("source", "target") if side in report.pair)
    size = f"{report.num_documents} documents, {report.num_clusters} clusters, means [95 % intervals]"
    return f"{sides}: {size}" if sides else size


def verdict_line(report: Report) -> str:
    """Return the verdict in one line, with its reasons."""
    if not report.passed:
        return f"FAIL: {'; '.join(report.reasons)}"
    low = min(low_end(report.paired[arm]["kl_difference_nats"]) for arm in CONTROLS)
    return (
        f"PASS: translated is closer to native than {', '.join(CONTROLS[:-1])} and {CONTROLS[-1]}"
        f" (every paired interval lies above {figure(low)} nats)"
    )


def low_end(difference: Estimate | None) -> float:
    """Return the lower end of an interval, NaN where there is none."""
    return math.nan if difference is None or difference["low"] is None else difference["low"]


def beside_lines(report: Report) -> Iterable[str]:
    """Return what was measured beside the arms."""
    if report.attention_output_cosine is not None:
        cosine = report.attention_output_cosine
        yield (
            f"attention-output cosine {number(cosine.get('mean'))}, worst layer"
            f" {cosine.get('worst_layer_index')}: {number(cosine.get('worst_layer'))}"
        )
    if report.passkey is not None:
        recalls = (f"{arm} {number(recall)}" for arm, recall in report.passkey.items())
        yield f"passkey recall: {', '.join(recalls)}"
    if report.self_check is not None:
        yield f"self-check, KL of native to itself: {report.self_check:.1e} nats"


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


def environment_card() -> dict[str, Any]:
    """Say what the figures were computed on; nothing that names the machine or its owner."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": installed_version("transformers"),
        "kvlingo": installed_version("kvlingo"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_model() -> str | None:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def usable_cores() -> int | None:
    """Return the number of cores this process may use."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def memory_bytes() -> int | None:
    """Return the machine's memory where the system tells it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def installed_version(package: str) -> str | None:
    """Return a package's version without importing it, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
