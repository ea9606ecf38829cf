"""The arms of a test harness: who answers, on what; and how they are made from names.

Knows models, translators' folders and contexts. Does not know the harness.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlingo.contexts import Handing, Holder
from kvlingo.errors import BadInput
from kvlingo.jobs import Where, check_pair
from kvlingo.language_model import LanguageModel
from kvlingo.models import load_model, quiet_loading
from kvlingo.store import load_translator
from kvlingo.translator import Translator
from kvlingo.workplace import model_names

NATIVE, TRANSLATED, SOURCE, NO_CONTEXT = "native", "translated", "source", "no-context"
ARMS = {
    NATIVE: "the target reads the context itself",
    TRANSLATED: "the target answers on the translated cache",
    "ridge": "the same, as it was before distilling",
    "token-only": "control: the same class, fitted without the source's cache",
    "no-text": "the same class, fitted without the text",
    SOURCE: "the source answers itself",
    NO_CONTEXT: "control: the target reads the first tokens and nothing else",
}
PLACES = {TRANSLATED: ".", "ridge": "ridge", "token-only": "controls/token_only", "no-text": "controls/no_text"}
DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Dial:
    """The dial of every hand-over (`handoff.hand_off`)."""

    sink: int = 1
    tail: int = 1
    native_layers: int = 0


@dataclass(frozen=True)
class Cast:
    """Who takes part; what an arm does not need may be None."""

    source: LanguageModel | None
    target: LanguageModel | None
    folder: Path | None

    def translator(self, arm: str) -> Translator:
        """Load an arm's translator."""
        if self.folder is None or self.source is None or self.target is None:
            raise BadInput(f"the arm {arm} needs translator=DIR, what `kvlingo fit` wrote")
        place = self.folder / PLACES[arm]
        if not place.is_dir():
            raise BadInput(f"{self.folder} holds no translator for the arm {arm}: {place} is not there")
        translator, _ = load_translator(place, source=self.source, target=self.target)
        return translator.to(self.target.device).eval()

    @property
    def max_length(self) -> int:
        """Return the longest context with its continuation that every model here reads."""
        return min((longest(lm) for lm in (self.source, self.target) if lm is not None), default=DEFAULT_LENGTH)


def check_arm(arm: str) -> str:
    """Return an arm's name as it is listed. Raises `BadInput` for one that there is not."""
    found = arm.replace("_", "-")
    if found not in ARMS:
        raise BadInput(f"there is no arm {arm!r}; use {', '.join(ARMS)}")
    return found


def load_cast(
    arm: str, source: str | None, target: str | None, folder: Path | None, where: Where, *, everyone: bool = False
) -> Cast:
    """Load the models that an arm needs, or `everyone`; names that are not given are those that the translator remembers."""
    if folder is not None:
        source, target = model_names(folder, source, target)
    needs_source = everyone or arm == SOURCE or arm in PLACES
    needs_target = everyone or arm != SOURCE
    for needed, name, side in ((needs_source, source, "source"), (needs_target, target, "target")):
        if needed and name is None:
            raise BadInput(f"the arm {arm} needs {side}=MODEL, or translator=DIR that remembers it")
    quiet_loading()
    source_lm = load_model(source, device=where.device, dtype=where.dtype) if needs_source and source else None
    target_lm = load_model(target, device=where.device, dtype=where.dtype) if needs_target and target else None
    if source_lm is not None and target_lm is not None:
        check_pair(source_lm, target_lm)
    return Cast(source_lm, target_lm, folder)


def make_holder(arm: str, cast: Cast, dial: Dial, translator: Translator | None = None) -> Holder:
    """Return what gives the answering model its contexts under an arm; `translator` where it is loaded already."""
    if arm == SOURCE:
        return Holder(_required(cast.source, arm))
    target = _required(cast.target, arm)
    if arm == NATIVE:
        return Holder(target)
    if arm == NO_CONTEXT:
        return Holder(target, first_only=dial.sink)
    source, by = _required(cast.source, arm), translator or cast.translator(arm)
    return Holder(target, handing=Handing(source, by, dial.sink, dial.tail, dial.native_layers))


def _required(lm: LanguageModel | None, arm: str) -> LanguageModel:
    if lm is None:
        raise BadInput(f"the arm {arm} needs a model that was not given")
    return lm


def longest(lm: LanguageModel) -> int:
    """Return how many tokens a model reads at most, with the rotary angles that it begins with."""
    config = lm.model.config.get_text_config(decoder=True)
    named = getattr(config, "max_position_embeddings", None)
    limits = (named, lm.geometry.max_positions, lm.geometry.angle_limit)
    return min((int(limit) for limit in limits if limit), default=DEFAULT_LENGTH)
