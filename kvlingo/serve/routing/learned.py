"""The `learned` router: a linear classifier of cheap text features says how likely it is that the big model is needed.

After RouteLLM (Ong et al. 2024), with features instead of an embedding model, so that a choice costs no forward pass. What
`kvlingo route fit` saved is numbers in JSON under a checksum: nothing in it can run. Serving needs no scikit-learn.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvlingo.errors import BadArtifact
from kvlingo.files import replace_folder
from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt
from kvlingo.serve.routing.features import NAMES, VERSION, WIDTH, features

FILE, FORMAT = "router.json", 1
AGAIN = "run kvlingo route fit again"


@dataclass(frozen=True)
class Classifier:
    """P(big is needed) = sigmoid(weights · x + bias), x being the features, the first of them scaled to mean 0 and spread 1.

    Fields:
        mean, scale: of the features of `NAMES`; hashed words stay as they are.
        cut: from this probability on the big model answers.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    cut: float

    def __post_init__(self) -> None:
        sizes = {"mean": len(NAMES), "scale": len(NAMES), "weights": WIDTH}
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                raise BadArtifact(f"a router has {len(getattr(self, name))} numbers for {name}, not {size}; {AGAIN}")
        if not all(map(math.isfinite, (*self.mean, *self.scale, *self.weights, self.bias, self.cut))):
            raise BadArtifact(f"a router has numbers that are not finite; {AGAIN}")
        if not all(value > 0 for value in self.scale):
            raise BadArtifact(f"a router scales by zero or less; {AGAIN}")

    def probability(self, prompt: Prompt) -> float:
        """Return how likely it is that the big model is needed."""
        z = self.bias + sum(w * x for w, x in zip(self.weights, self.scaled(features(prompt)), strict=True))
        return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, z))))

    def scaled(self, values: Sequence[float]) -> list[float]:
        """Return features as the weights take them."""
        shape = [(x - m) / s for x, m, s in zip(values, self.mean, self.scale, strict=False)]
        return shape + list(values[len(shape) :])


@dataclass(frozen=True)
class Learned:
    """Chooses by a classifier."""

    pair: Pair
    classifier: Classifier
    name: str = "learned"
    listens: bool = False

    def choose(self, prompt: Prompt) -> Choice:
        """Say who answers."""
        p, cut = self.classifier.probability(prompt), self.classifier.cut
        big = p >= cut
        return Choice(self.pair.big if big else self.pair.small, f"P(big) {p:.3f} {'≥' if big else '<'} {cut:.3f}")

    def judge(self, heard: Heard) -> Choice:
        """Never asked."""
        raise NotImplementedError


# --- on disk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What is in a router's folder.

    Fields:
        report: how it did on prompts that it was not fitted on, with a verdict.
        seen: digests of the prompts it was fitted on.
    """

    classifier: Classifier
    report: Mapping[str, Any]
    seen: tuple[str, ...] = field(repr=False)


def save_router(folder: Path, saved: Saved) -> None:
    """Write a router's folder, whole or not at all."""
    content = {
        "format": FORMAT,
        "features": VERSION,
        "classifier": asdict(saved.classifier),
        "report": dict(saved.report),
        "seen": list(saved.seen),
    }
    document = {**content, "sha256": seal(content)}
    replace_folder(folder, {FILE: (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()})


def load_router(folder: Path) -> Saved:
    """Read a router's folder. Raises `BadArtifact` for one that is damaged, from another version, or none at all."""
    file = folder / FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        content = {name: document[name] for name in ("format", "features", "classifier", "report", "seen")}
        found = document["sha256"]
    except OSError as error:
        raise BadArtifact(f"{folder} holds no router ({error.strerror}); write one with kvlingo route fit") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadArtifact(f"{file} is damaged; {AGAIN}") from error
    if found != seal(content):
        raise BadArtifact(f"{file} is damaged: its checksum does not match; {AGAIN}")
    if (content["format"], content["features"]) != (FORMAT, VERSION):
        raise BadArtifact(f"{file} is of another version of kvlingo; {AGAIN}")
    try:
        numbers: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in content["classifier"].items()
        }
        return Saved(Classifier(**numbers), dict(content["report"]), tuple(content["seen"]))
    except (TypeError, ValueError, AttributeError) as error:
        raise BadArtifact(f"{file} does not describe a router; {AGAIN}") from error


def seal(content: Mapping[str, Any]) -> str:
    """Return the checksum of a document."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
