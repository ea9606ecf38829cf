"""From settings to a router. Knows which settings go with which router; everything is checked before any model is loaded."""

from __future__ import annotations

from kvlingo.errors import BadArtifact, BadInput
from kvlingo.serve.routing.cascade import Cascade, CascadeRule
from kvlingo.serve.routing.choosing import Pair, Router
from kvlingo.serve.routing.learned import Learned, load_router
from kvlingo.serve.routing.rules import Rules
from kvlingo.serve.routing.threshold import Threshold, ThresholdRule
from kvlingo.serve.routing.token import Token, TokenRule
from kvlingo.serve.settings import Settings


def build_router(settings: Settings, rules: Rules) -> Router | None:
    """Return the router that the settings name; None for `explicit`: then `auto` is refused by name.

    Raises `BadInput` for rules of a router that is not in use, `BadArtifact` for a learned one that is not to be trusted.
    """
    for name in ("threshold", "cascade", "token"):
        if getattr(rules, name) is not None and name != settings.router:
            raise BadInput(f"{settings.rules} has rules for the router {name}, and the router is {settings.router}")
    pair = Pair(*settings.routed_models)
    match settings.router:
        case "threshold":
            return Threshold(pair, rules.threshold or ThresholdRule())
        case "cascade":
            return Cascade(pair, rules.cascade or CascadeRule())
        case "token":
            return Token(pair, rules.token or TokenRule())
        case "learned":
            return learned(settings, pair)
    return None


def learned(settings: Settings, pair: Pair) -> Learned:
    """Load a learned router; one that was no better than drawing lots is refused."""
    assert settings.learned is not None
    saved = load_router(settings.learned)
    if saved.report.get("verdict") != "PASS":
        raise BadArtifact(
            f"{settings.learned}: {saved.report.get('reason')}; fit it on more rows, or choose another router"
        )
    return Learned(pair, saved.classifier)
