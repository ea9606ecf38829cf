"""README.md of a saved translator: its model card.

Knows Markdown and the shape of a manifest; measures nothing itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvlingo.manifest import Manifest

REPOSITORY_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(manifest: Manifest) -> str:
    """Return README.md: the pair, what was measured under which plan, how to use it, its limits."""
    source, target = manifest.source.name, manifest.target.name
    task = (
        f"A KV-Lingo translator: it turns the key-value cache that `{source}` has of a "
        f"conversation into one that `{target}` can go on from, without reading it again."
    )
    parts = (
        front_matter(manifest),
        f"# {source} → {target}",
        task,
        f"## Quality\n\n{quality(manifest.held_out)}",
        f"## Use\n\n```python\n{usage(manifest)}\n```",
        LIMITS,
        f"## Made with\n\n{made_with(manifest)}",
    )
    return "\n\n".join(parts) + "\n"


def front_matter(manifest: Manifest) -> str:
    """Return the header that the hub reads; only names that can be repositories become links."""
    names = [card.name for card in (manifest.source, manifest.target)]
    models = [f"- {json.dumps(name)}" for name in names if REPOSITORY_NAME.fullmatch(name)]
    lines = ["---", "library_name: kvlingo", "tags:", "- kv-cache", "- kvlingo"]
    return "\n".join([*lines, *(["base_model:", *models] if models else []), "---"])


def quality(report: Mapping[str, Any] | None) -> str:
    """Return the held-out report as text and a table."""
    if report is None:
        return "Not evaluated yet: run `kvlingo eval` before you rely on it."
    text = []
    if "verdict" in report:
        text.append(f"Verdict **{report['verdict']}** on {report.get('num_documents', '?')} held-out documents.")
    if report.get("plan"):
        told = {key: value for key, value in report["plan"].items() if isinstance(value, int | float | str)}
        text.append(f"Plan: {', '.join(f'{key} {value}' for key, value in told.items())}.")
    if report.get("arms"):
        text.append(arms_table(report["arms"]))
    if "verdict" not in report:
        text.append(judged_in_training(report))
    return "\n\n".join(text)


def judged_in_training(report: Mapping[str, Any]) -> str:
    """Return what fitting or distilling saw on a few held-out hand-overs: no evaluation, and said so."""
    if report.get("kl_nats") is None:
        return "The held-out text was too short to judge it: run `kvlingo eval` before you rely on it."
    count = f"{report['hand_overs']} " if "hand_overs" in report else ""
    lines = [f"KL to native: {report['kl_nats']:.4f} nats on {count}held-out hand-overs."]
    if report.get("kl_nats_before_distilling") is not None:
        lines.append(f"Before distilling: {report['kl_nats_before_distilling']:.4f} nats.")
    controls = {name: kl for name, kl in (report.get("controls_kl_nats") or {}).items() if kl is not None}
    if controls:
        lines.append(f"Controls, fitted alike: {', '.join(f'{name} {kl:.4f}' for name, kl in controls.items())} nats.")
    cosine = report.get("attention_output_cosine")
    if cosine:
        worst = f"worst layer {cosine['worst_layer_index']}: {cosine['worst_layer']:.3f}"
        lines.append(f"Attention-output cosine: {cosine['mean']:.3f} ({worst}).")
    lines.append(
        "These hand-overs also chose its weights: run `kvlingo eval` for figures on text that nothing was chosen by."
    )
    return "\n".join(f"- {line}" for line in lines)


def arms_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the arms with means and 95 % intervals as a Markdown table."""
    metrics = {
        "kl_nats": "KL to native, nats",
        "top1_agreement": "top-1 agreement",
        "share_kept": "share kept",
    }
    rows = [f"| arm | {' | '.join(metrics.values())} |", "|---" * (len(metrics) + 1) + "|"]
    rows += [f"| {arm} | {' | '.join(cell(of.get(metric)) for metric in metrics)} |" for arm, of in arms.items()]
    return "\n".join(rows)


def cell(estimate: Mapping[str, Any] | None) -> str:
    """Return an estimate as `mean (low … high)`."""
    if estimate is None or estimate.get("mean") is None:
        return "–"
    mean, low, high = (estimate.get(key) for key in ("mean", "low", "high"))
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} ({low:.3f} … {high:.3f})"


def usage(manifest: Manifest) -> str:
    """Return the lines that load this translator."""
    source, target = (
        json.dumps(name if REPOSITORY_NAME.fullmatch(name) else f"FOLDER OF {name}")
        for name in (manifest.source.name, manifest.target.name)
    )
    return f"""\
from kvlingo.models import load_model
from kvlingo.store import from_pretrained

source = load_model({source})
target = load_model({target})
translator, manifest = from_pretrained("THIS FOLDER OR REPOSITORY", source=source, target=target)"""


LIMITS = """## Limits

- It fits these two models' weights only, in this direction; any other model is refused.
- A translated cache is approximate. What must be exact (names, numbers, code) is safest in the part
  that the target reads itself (`tail=`), and re-prefill is always the fallback.
- It was judged on texts and lengths like those of the report; longer contexts are harder.
- A cache is not anonymous: without the text, it still holds much of it."""


def made_with(manifest: Manifest) -> str:
    """Return versions, storage and options."""
    stored = "" if manifest.weights is None else f", weights stored as {manifest.weights.dtype}"
    versions = f"kvlingo {manifest.kvlingo_version}, format {manifest.format_version}{stored}."
    # The digests of the texts would fill pages; translator.json has them.
    shown = {name: value for name, value in manifest.options.items() if name != "texts"}
    options = json.dumps(shown, indent=1, ensure_ascii=False)
    return f"{versions}\n\n```json\n{options}\n```"
