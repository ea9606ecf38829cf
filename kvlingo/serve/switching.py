"""How a model comes to hold a prompt: from what it read before, from another model's cache, or by reading it.

Knows models, translators and snapshots. Whatever goes wrong on the way from another model's cache becomes a re-prefill whose
reason is told. Does not know queues, sampling or HTTP. Nothing is kept here, so a switch is seen whole or not at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from kvlingo.cache import can_cut, full_cache
from kvlingo.cache_writing import fork, truncate
from kvlingo.calibration import handoff_cost, read_cost
from kvlingo.confidence import Confidence
from kvlingo.cost import HandoffCost, Rates, TargetCost, handoff_flops, handoff_s, pass_flops, pass_s
from kvlingo.errors import KVLingoError, UnsupportedCache
from kvlingo.handoff import HandOff, hand_off_in_parts
from kvlingo.language_model import LanguageModel, prefill_in_parts, reads_in_parts
from kvlingo.plan import HandoffPlan, Span, SpanKind, reprefill_plan
from kvlingo.reading import Reading, first_tokens
from kvlingo.serve.decoding import Started
from kvlingo.serve.protocol import Begun, Dial, Message, Mode, Request
from kvlingo.serve.sessions import Match, Place, Sessions, Snapshot, common, exact_until, snapshot_of
from kvlingo.serve.shelf import Shelf
from kvlingo.states import Conversation, ModelState, read_conversation, refuse_target
from kvlingo.steps import WAITED, Steps, finished
from kvlingo.translator import Translator

LOG = logging.getLogger(__name__)
REPREFILL_UP_TO = 512
TRANSLATE_FROM = 2048
PART_TOKENS = 512
READ = "the model read it"


@dataclass(frozen=True)
class Link:
    """A way from one model's cache to another's.

    Fields:
        refusal: why it is not to be used (a failed report), or None.
        rule: what was measured for it; None: the engine's.
        rates: what reading and translating cost on this machine; None: by FLOPs.
        confidence: what judges each of its hand-overs; one that it doubts is read again.
    """

    source: str
    target: str
    translator: Translator
    refusal: str | None = None
    rule: Rule | None = None
    rates: Rates | None = None
    confidence: Confidence | None = None

    @cached_property
    def cost(self) -> HandoffCost:
        """What one token costs this translator."""
        return handoff_cost(self.translator)


@dataclass(frozen=True)
class Rule:
    """When `auto` translates: never to spare up to `reprefill_up_to` tokens, always from `translate_from`; else by cost."""

    reprefill_up_to: int = REPREFILL_UP_TO
    translate_from: int = TRANSLATE_FROM


@dataclass(frozen=True, eq=False)
class Side:
    """A model under the name it is served by."""

    name: str
    lm: LanguageModel

    @cached_property
    def cost(self) -> TargetCost:
        """What one token costs this model."""
        return read_cost(self.lm)

    @cached_property
    def opening_tokens(self) -> int:
        """How many tokens of its template open an answer: a target's reading ends in them, and no other one does."""
        chat: list[dict[str, object]] = [{"role": "user", "content": "x"}]
        try:
            closed, opened = (len(read_conversation(chat, self.lm, add_generation_prompt=x)) for x in (False, True))
        except KVLingoError:  # a template that wants more than one message
            return 0
        return max(opened - closed, 0)


@dataclass(frozen=True)
class Prompt:
    """A request as its target reads it.

    Fields:
        others: as models read it that have been asked for it too, by their names.
        opened: whether it ends in what opens an answer, which the others' readings don't.
    """

    request: Request
    reading: Reading
    others: Mapping[str, Reading] = field(default_factory=dict)
    opened: bool = False

    @property
    def conversation(self) -> Conversation:
        """The text, or the messages, as `handoff` takes them."""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else _messages(prompt)

    def place(self, model: str) -> Place:
        """Return where this request's snapshots of a model are."""
        return Place(self.request.tenant, self.request.conversation, model)


def _messages(prompt: Sequence[Message]) -> list[dict[str, object]]:
    return [dict(message) for message in prompt]


def prompt_of(request: Request, lm: LanguageModel, *, add_generation_prompt: bool = True) -> Prompt:
    """Render and tokenise a request for the model that answers. Raises `BadInput` for what its template refuses."""
    opened = add_generation_prompt and not isinstance(request.prompt, str)
    return Prompt(request, _render(request, lm, add_generation_prompt=add_generation_prompt), opened=opened)


def _render(request: Request, lm: LanguageModel, *, add_generation_prompt: bool) -> Reading:
    prompt = request.prompt if isinstance(request.prompt, str) else _messages(request.prompt)
    tools = [dict(tool) for tool in request.tools]
    return read_conversation(prompt, lm, add_generation_prompt=add_generation_prompt, tools=tools)


@dataclass(frozen=True)
class Offer:
    """What another model holds of the conversation.

    Fields:
        snapshot, state: its cache, with the reading of the ids in it that are those of this conversation.
        spared: about how many of the target's missing tokens need not be read.
        unread: about how many of the target's tokens the source has not read.
    """

    link: Link
    source: Side
    snapshot: Snapshot
    state: ModelState
    spared: int
    unread: int


@dataclass(frozen=True, eq=False)
class _Underway:
    """A prompt that a model is reading, part by part, after the `native` tokens that it held, whose spans are `earlier`."""

    place: Place
    reading: Reading
    cache: Any
    native: int
    earlier: Sequence[Span]

    @property
    def tokens(self) -> int:
        """Return how many tokens have been read by now."""
        return int(self.cache.get_seq_length())

    @property
    def exact(self) -> int:
        """Return how many first tokens will be exact: all, unless it goes on from some that are not."""
        exact = exact_until(self.earlier)
        return len(self.reading) if exact >= self.native else exact

    @property
    def state(self) -> ModelState:
        """Return what the model holds by now."""
        spans = reprefill_plan(self.tokens, READ, native=self.native, earlier=self.earlier).spans
        return ModelState(first_tokens(self.reading, self.tokens), self.cache, spans)


class Switch:
    """Brings a target to hold a prompt, in steps of at most `part_tokens` tokens.

    Args:
        sides: all models by the names they are served by.
        shelf: what is on disk, or None.
    """

    def __init__(
        self,
        sides: Mapping[str, Side],
        links: Sequence[Link],
        sessions: Sessions,
        rule: Rule,
        shelf: Shelf | None = None,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        self._sides, self._links, self._sessions, self._rule = sides, tuple(links), sessions, rule
        self._shelf, self.part_tokens = shelf, part_tokens
        # What each model is reading now; only the thread that the model runs on looks there.
        self.failed_translations = 0
        self._underway = {name: list[_Underway]() for name in sides}
        self._reads_anew = {name for name, side in sides.items() if side.lm.target_refusal and not side.lm.goes_on}

    def recall(self, prompt: Prompt) -> None:
        """Bring into memory what is on disk and spares reading. Takes as long as a disk does: not where a model decodes."""
        if self._shelf is None:
            return
        try:
            native = self._recall_own(prompt, self._shelf)
            if prompt.request.dial.mode != "reprefill":
                self._recall_others(prompt, self._shelf, native)
        except Exception as error:  # the model reads the prompt, as it would without a disk
            LOG.warning("looking for kept caches failed", exc_info=error)

    def _recall_own(self, prompt: Prompt, shelf: Shelf) -> int:
        """Bring back what the target has read; return how many first tokens it then holds."""
        target, ids = self._sides[prompt.request.model], prompt.reading.ids
        exact_only, place = prompt.request.dial.mode == "reprefill", prompt.place(target.name)
        own = self._own(prompt, target)
        native = _tokens(own)
        state = shelf.take(place, ids, beyond=native, most=len(ids) - 1, exact_only=exact_only)
        if state is None:
            return native
        self._sessions.keep(place, state, target.lm.geometry)
        own = self._own(prompt, target)
        return _tokens(own)

    def _recall_others(self, prompt: Prompt, shelf: Shelf, native: int) -> None:
        """Bring back what other models have read beyond what the target holds."""
        for link in self._links:
            place = prompt.place(link.source)
            if link.target != prompt.request.model or link.refusal or not shelf.holds(place):
                continue
            source = self._sides[link.source].lm
            reading = self._as_read_by(prompt, link.source)
            if reading is None:
                continue
            ids = reading.ids
            held = max((m.tokens for m in self._sessions.find(place, ids)), default=0)
            known = native * len(ids) // len(prompt.reading)
            state = shelf.take(place, ids, beyond=max(held, known), most=len(ids))
            if state is not None:
                self._sessions.keep(place, state, source.geometry)

    def as_others_read(self, prompt: Prompt) -> Prompt:
        """Return a prompt with its readings by the other models that hold anything of its place, in memory or on disk."""
        others = dict(prompt.others)
        for name in self._sides:
            place = prompt.place(name)
            held = self._sessions.holds(place) or (self._shelf is not None and self._shelf.holds(place))
            reading = self._as_read_by(prompt, name) if held and name != prompt.request.model else None
            if reading is not None:
                others[name] = reading
        return replace(prompt, others=others)

    def _as_read_by(self, prompt: Prompt, model: str) -> Reading | None:
        """Return a prompt as another model reads it; None where its template can't render what the target's can."""
        if model in prompt.others:
            return prompt.others[model]
        try:
            return _render(prompt.request, self._sides[model].lm, add_generation_prompt=False)
        except KVLingoError:
            return None

    def start(self, prompt: Prompt) -> Steps[Started]:
        """Return a state that holds the whole prompt, and the logits of the next token."""
        target = self._sides[prompt.request.model]
        started = yield from self._start(prompt, target)
        left = self._switched_from(prompt, target, started.begun.native_tokens) or started.begun.source
        begun = replace(started.begun, switched_from=left)
        if left is not None and not begun.translated_tokens and not begun.fallback:
            begun = replace(begun, reread=self._why_reread(prompt, left, target, begun.native_tokens))
        return replace(started, begun=begun)

    def _switched_from(self, prompt: Prompt, target: Side, held: int) -> str | None:
        """Return who has read the most of a conversation, where that is most of it and more than the target holds."""
        begins = prompt.reading.opening
        text = len(prompt.reading) - self._opening(prompt) - begins
        most, who = max(begins + text // 2, held + 1), None  # one token is always left to read
        for name in self._sides:
            read = begins + int(text * self._share_read(prompt, name)) if name != target.name else 0
            if read > most:
                most, who = read, name
        return who

    def _share_read(self, prompt: Prompt, model: str) -> float:
        """Return how much of a prompt's contents another model has read for answers of its own.

        What a template begins with is in every conversation.
        """
        place = prompt.place(model)
        reading = self._as_read_by(prompt, model) if self._sessions.holds(place) else None
        if reading is None or len(reading) <= reading.opening:
            return 0.0
        found = self._sessions.find(place, reading.ids)
        most = max((m.tokens for m in found if not m.snapshot.ahead), default=0)
        return max(most - reading.opening, 0) / (len(reading) - reading.opening)

    def _opening(self, prompt: Prompt) -> int:
        """Return how many last tokens of a prompt are in no other model's reading of it."""
        return self._sides[prompt.request.model].opening_tokens if prompt.opened else 0

    def _why_reread(self, prompt: Prompt, source: str, target: Side, native: int) -> str:
        """Say why nothing was translated although there was a switch, and nothing failed."""
        if prompt.request.dial.mode == "reprefill":
            return "a re-prefill was asked for"
        if not any((link.source, link.target) == (source, target.name) for link in self._links):
            return f"there is no translator from {source} to {target.name}"
        offers, _ = self._offers(prompt, target, native)
        own = max((offer.spared for offer in offers if offer.source.name == source), default=0)
        if 2 * own < len(prompt.reading) - native:
            return f"{source} has read only {own} tokens of it itself, and a translation is not translated again"
        return "reading so little again costs no more, and is exact"

    def _start(self, prompt: Prompt, target: Side) -> Steps[Started]:
        """Translate, or read.

        What others hold is looked at before anybody is waited for: a translation does not wait for a reader of the same.
        """
        own = self._held(prompt, target)
        ways, reason = self._ways(prompt, target, own)
        if not ways:
            before, own = own, (yield from self._awaited(prompt, target))
            if _tokens(own) != _tokens(before):
                ways, reason = self._ways(prompt, target, own)
        for offer in ways:
            try:
                return (yield from self._translate(prompt, target, offer, own, prompt.request.dial))
            except Exception as error:  # the chat user gets an answer whatever a translator does
                reason = _told(error)
                self.failed_translations += 1
                LOG.warning("a translation from %s to %s was not used: %s", offer.source.name, target.name, reason)
        if ways:
            own = yield from self._awaited(prompt, target)  # others may be reading it by now
        return (yield from self._read_on(prompt, target, own, reason))

    def _ways(self, prompt: Prompt, target: Side, own: Match | None) -> tuple[list[Offer], str | None]:
        """Return what pays to translate from, the best first; where nothing does, maybe why not."""
        dial, tokens, native = prompt.request.dial, len(prompt.reading), _tokens(own)
        offers, reason = ([], None) if dial.mode == "reprefill" else self._offers(prompt, target, native)
        paying = [offer for offer in offers if self._pays(offer, target, tokens, native, dial)]
        asked = dial.mode == "translate" and (not native or self._most_read(prompt, target) > native)
        if not offers and asked and reason is None and tokens - native > max(1, dial.tail):
            reason = f"no model with a translator to {target.name} has read more of this conversation"
        return sorted(paying, key=lambda o: o.spared, reverse=True), reason

    def _most_read(self, prompt: Prompt, target: Side) -> int:
        """Return how much another model has read of a prompt, in the target's tokens."""
        others = (self._share_read(prompt, name) for name in self._sides if name != target.name)
        return int(len(prompt.reading) * max(others, default=0.0))

    def _readers(self, prompt: Prompt, target: Side) -> list[tuple[int, _Underway]]:
        """Return who is reading what could be gone on from, each with how many of its tokens: exact ones, where those count."""
        ids, place, exact_only = prompt.reading.ids, prompt.place(target.name), prompt.request.dial.mode == "reprefill"
        if target.name in self._reads_anew:
            return []
        readers = [each for each in self._underway[target.name] if each.place == place]
        shared = ((common(each.reading.ids, ids), each) for each in readers)
        return [(min(tokens, each.exact) if exact_only else tokens, each) for tokens, each in shared]

    def _held(self, prompt: Prompt, target: Side) -> Match | None:
        """Return the most that the target can go on from now, be it what somebody is just reading."""
        own, found = self._own(prompt, target), list[Match]()
        for tokens, each in self._readers(prompt, target):
            if min(tokens, each.tokens) > _tokens(own):
                snapshot = snapshot_of(each.place, each.state, target.lm.geometry)
                found.append(Match(snapshot, min(tokens, each.tokens)))
        return _longest(own, self._usable(prompt, target, found))

    def _awaited(self, prompt: Prompt, target: Side) -> Steps[Match | None]:
        """Return what the target can go on from, once nobody else is just reading more of the same: that is read once."""
        held: Match | None = None
        while True:
            own = self._own(prompt, target)
            tokens, reader = max(self._readers(prompt, target), key=lambda pair: pair[0], default=(0, None))
            if reader is None or tokens - _tokens(own) <= self.part_tokens:
                return _longest(own, held)
            held = _longest(self._held(prompt, target), held)  # a window may have slid past it by the next step
            if reader.tokens >= tokens:
                return held
            yield WAITED

    def worth_translating(self, prompt: Prompt) -> tuple[Offer, Match | None] | None:
        """Return what a request for this would be translated from, and what the target holds; None where it would not be.

        What was begun is gone on with, however little is new: else each turn would leave the next switch more to read.
        Raises `UnsupportedCache` where the target can't take so many tokens in parts.
        """
        target, tokens = self._sides[prompt.request.model], len(prompt.reading)
        limit = target.lm.geometry.max_positions
        if limit is not None and tokens >= limit:
            return None
        refuse_target(target.lm, tokens)
        own = self._own(prompt, target)
        native = _tokens(own)
        offers, _ = self._offers(prompt, target, native)
        offer = max(offers, key=lambda o: o.spared, default=None)
        if offer is None:
            return None
        begun = own is not None and own.snapshot.translated_until > 0
        if not begun and not self._pays(offer, target, len(prompt.reading), native, prompt.request.dial):
            return None
        return offer, own

    @torch.no_grad()
    def translate_until(self, prompt: Prompt, offer: Offer, state: ModelState | None, tokens: int) -> ModelState | None:
        """Bring the target from what it holds to the first `tokens` tokens of a prompt; None where it can't be translated."""
        part = replace(prompt, reading=first_tokens(prompt.reading, tokens))
        handed = finished(self._hand_off(part, offer, state, prompt.request.dial, None))
        return None if handed.plan.fallback else handed.state

    def _own(self, prompt: Prompt, target: Side) -> Match | None:
        """Return the most that the target can go on from; one token is always left to read.

        What a window has slid past can't be gone back to. A re-prefill that was asked for goes on from exact tokens only. A model
        that reads several tokens wrongly after what it has read reads all anew, and so does one whose angles are others by now.
        """
        if target.name in self._reads_anew:
            return None
        return self._usable(prompt, target, self._sessions.find(prompt.place(target.name), prompt.reading.ids))

    def _usable(self, prompt: Prompt, target: Side, found: Sequence[Match]) -> Match | None:
        """Return the one of what shares a prompt's first tokens that spares the target the most; None: none does."""
        ids, limit, most = prompt.reading.ids, target.lm.geometry.angle_limit, len(prompt.reading) - 1
        exact_only = prompt.request.dial.mode == "reprefill"
        if limit is not None:
            found = [m for m in found if (len(m.snapshot.ids) > limit) == (len(ids) > limit)]
        usable = (replace(m, tokens=min(m.exact if exact_only else m.tokens, most)) for m in found)
        whole = (m for m in usable if m.tokens and can_cut(m.snapshot.state.cache, m.tokens, target.lm.geometry))
        return max(whole, key=lambda m: m.tokens, default=None)

    def _offers(self, prompt: Prompt, target: Side, native: int) -> tuple[list[Offer], str | None]:
        """Return what other models offer, and why one that could have offered something did not."""
        offers, reason = list[Offer](), None
        for link in self._links:
            if link.target != target.name:
                continue
            offer = self._offer(prompt, link, len(prompt.reading), native)
            if offer is None:
                continue
            refusal = link.refusal or moving(offer.source.lm)
            if refusal is None:
                offers.append(offer)
            elif offer.spared > (link.rule or self._rule).reprefill_up_to or prompt.request.dial.mode == "translate":
                reason = f"the translator from {link.source}: {refusal}"
        return offers, reason

    def _offer(self, prompt: Prompt, link: Link, tokens: int, native: int) -> Offer | None:
        source = self._sides[link.source]
        if not self._sessions.holds(prompt.place(source.name)):
            return None
        reading = self._as_read_by(prompt, source.name)
        if reading is None:
            return None
        found = self._sessions.find(prompt.place(source.name), reading.ids)
        text = tokens - self._opening(prompt)

        def spared(match: Match) -> int:
            """Count the target's tokens that this one would spare: beyond what it holds, and beyond earlier translations."""
            untrusted = min(match.snapshot.state.translated_until, match.tokens)
            return text * match.tokens // len(reading) - max(native, text * untrusted // len(reading))

        best = max(found, key=spared, default=None)
        if best is None or spared(best) <= 0 or best.tokens <= reading.opening:  # what every conversation begins with
            return None
        dial, watch, unread = prompt.request.dial, link.confidence, tokens - text * best.tokens // len(reading)
        tail = max(dial.tail, watch.tail if watch else 0, unread)
        if max(native, dial.sink) >= tokens - tail:  # what the target reads itself: nothing lies between
            return None
        state = replace(best.snapshot.state, reading=first_tokens(reading, best.tokens))
        return Offer(link, source, best.snapshot, state, spared(best), unread)

    def reads_up_to(self, mode: Mode, source: str, target: str) -> float:
        """Return how many tokens a target reads without a thought of translating them from `source`."""
        if mode == "translate":
            return 0
        rules = [
            link.rule or self._rule
            for link in self._links
            if (link.source, link.target) == (source, target) and not link.refusal
        ]
        return rules[0].reprefill_up_to if rules and mode == "auto" else math.inf

    def _pays(self, offer: Offer, target: Side, tokens: int, native: int, dial: Dial) -> bool:
        rule = offer.link.rule or self._rule
        if dial.mode == "translate" or offer.spared >= rule.translate_from:
            return True
        if offer.spared <= rule.reprefill_up_to:
            return False
        tail = max(dial.tail, offer.unread)
        cost, rates, link = target.cost, offer.link.rates, offer.link
        if rates is None:
            handing = handoff_flops(cost, link.cost.map_weights, tokens, sink=dial.sink, tail=tail)
            return handing < pass_flops(cost, tokens - native, after=native)
        handing = handoff_s(cost, link.cost, rates, tokens, sink=dial.sink, tail=tail)
        return handing < pass_s(cost, rates.reading, tokens - native, after=native)

    def _translate(self, prompt: Prompt, target: Side, offer: Offer, own: Match | None, dial: Dial) -> Steps[Started]:
        most = self._most(target, prompt)
        handed = yield from self._hand_off(prompt, offer, own.snapshot.state if own else None, dial, most)
        if handed.plan.fallback:
            raise UnsupportedCache(handed.plan.fallback)  # it is read by the target, as what nobody translates is
        assert handed.logits is not None
        for snapshot in (offer.snapshot, *([own.snapshot] if own else ())):
            self._sessions.used(snapshot)
        return Started(handed.state, handed.logits, begun(handed.plan, target.name, offer.link.source))

    def _hand_off(
        self, prompt: Prompt, offer: Offer, state: ModelState | None, dial: Dial, most: int | None
    ) -> Steps[HandOff]:
        return hand_off_in_parts(
            prompt.conversation,
            offer.source.lm,
            self._sides[prompt.request.model].lm,
            offer.link.translator,
            most=most,
            sink=dial.sink,
            tail=dial.tail,
            source_state=offer.state,
            target_state=state,
            reading=prompt.reading,
            confidence=offer.link.confidence,
            reads_again=False,
        )

    def _most(self, target: Side, prompt: Prompt) -> int | None:
        """Return how many tokens of a prompt a model takes in at once; None: all, where parts would not fit together."""
        return self.part_tokens if reads_in_parts(target.lm, len(prompt.reading)) else None

    def _read_on(self, prompt: Prompt, target: Side, own: Match | None, reason: str | None) -> Steps[Started]:
        """Let the target read what it does not hold; what it has read where it is stopped is kept for the next time."""
        lm, reading, native = target.lm, prompt.reading, _tokens(own)
        earlier = own.snapshot.state.spans if own else ()
        cache = _cut(own, lm) if own else full_cache(lm.model.config)
        underway = _Underway(prompt.place(target.name), reading, cache, native, earlier)
        self._underway[target.name].append(underway)
        try:
            rest = lm.ids(reading.ids[native:])
            done = yield from prefill_in_parts(lm, rest, most=self._most(target, prompt), cache=cache)
        except GeneratorExit:
            if underway.tokens > native:
                self._sessions.keep(underway.place, underway.state, lm.geometry)
            raise
        finally:
            self._underway[target.name].remove(underway)
        plan = reprefill_plan(len(reading), READ, native=native, earlier=earlier)
        if own:
            self._sessions.used(own.snapshot)
        told = begun(replace(plan, fallback=reason), target.name, None)
        return Started(ModelState(reading, done.cache, plan.spans), done.logits[-1], told)


def _tokens(match: Match | None) -> int:
    return match.tokens if match else 0


def _longest(*matches: Match | None) -> Match | None:
    """Return the match of the most tokens, the first of equal ones; None where there is none."""
    return max((m for m in matches if m), key=lambda m: m.tokens, default=None)


def _cut(match: Match, lm: LanguageModel) -> Any:
    """Return a cache of a snapshot's first tokens that may grow."""
    if match.tokens == len(match.snapshot.ids):
        return fork(match.snapshot.state.cache)
    return truncate(match.snapshot.state.cache, match.tokens, lm.geometry, lm.model.config)


def of_one_angle(lm: LanguageModel, prompt_tokens: int, state: ModelState) -> ModelState:
    """Return what of a state was read with the angles of its end, or the start of it that was read with those of its beginning.

    An answer that crosses the length at which all angles change is kept up to there: a longer prompt is read anew.
    """
    limit, tokens = lm.geometry.angle_limit, int(state.cache.get_seq_length())
    if limit is None or prompt_tokens > limit or tokens <= limit:
        return state
    cut = truncate(state.cache, limit, lm.geometry, lm.model.config)
    spans = tuple(replace(s, stop=min(s.stop, limit)) for s in state.spans if s.start < limit)
    return replace(state, reading=first_tokens(state.reading, limit), cache=cut, spans=spans)


def moving(lm: LanguageModel) -> str | None:
    """Say why a cache can't be read while its model runs: its rotary module changes with what it reads."""
    if lm.geometry.angle_limit is None:
        return None
    return f"{lm.name} changes its rotary angles as it reads, and may be reading now"


def _told(error: Exception) -> str:
    """Say why a translation failed. The text of an error that nobody foresaw may quote a prompt or a path: it is not told."""
    if isinstance(error, KVLingoError):
        return " ".join(str(error).split())[:300]
    LOG.warning("a translation failed", exc_info=error)
    return f"{type(error).__name__}: the translation failed; the server's log says where"


def begun(plan: HandoffPlan, model: str, source: str | None) -> Begun:
    """Say how a plan was carried out."""
    native, translated = plan.count(SpanKind.NATIVE), plan.count(SpanKind.TRANSLATED)
    return Begun(
        model=model,
        prompt_tokens=plan.tokens,
        native_tokens=native,
        translated_tokens=translated,
        recomputed_tokens=plan.tokens - native - translated,
        hops=plan.hops,
        source=source if translated else None,
        fallback=plan.fallback,
    )
