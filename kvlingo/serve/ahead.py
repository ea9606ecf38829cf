"""Translating before anybody asks: what one model has answered is made readable for another while nothing is asked for.

A switch then costs the tokens that are new. Knows one target, the switch and what was answered last; works in bounded pieces on
the thread where the target runs, so a request waits for one piece at most. Does not know queues: whoever calls says when nothing
else is to be done.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvlingo.errors import KVLingoError
from kvlingo.serve.protocol import Dial, Message, Request
from kvlingo.serve.sessions import Place
from kvlingo.serve.switching import Offer, Prompt, Switch
from kvlingo.states import ModelState

LOG = logging.getLogger(__name__)
PIECE_TOKENS = 256
LEAST_TOKENS = 64
"""A last piece is no shorter: the source has not read a template's end, and of too little nothing is left to translate."""
AGAIN_S = 0.05
MOST_WAITING = 64
BEGINNING_CHARS = 200
COUNTED = ("ahead_done", "ahead_pieces", "ahead_tokens", "ahead_abandoned", "ahead_failed")


def _beginning(request: Request) -> str:
    """Return what tells conversations without a name apart: how they begin."""
    return request.prompt[:BEGINNING_CHARS] if isinstance(request.prompt, str) else str(request.prompt[:2])


def _begins(request: Request, beginning: Sequence[Message] | str) -> bool:
    return request.prompt[: len(beginning)] == beginning


def answered(request: Request, text: str, target: str) -> Request:
    """Return what another model will be asked to go on from: a request with its answer, without the dial it was given."""
    if isinstance(request.prompt, str):
        return replace(request, model=target, prompt=request.prompt + text, dial=Dial())
    said: Message = {"role": "assistant", "content": text}
    return replace(request, model=target, prompt=(*request.prompt, said), dial=Dial())


Key = tuple[Place, str]


class _Waiting:
    """What is to be made ready, the latest of each conversation; where it grows too long, the busiest tenant gives way."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Key, Request] = OrderedDict()
        self._lock = threading.Lock()

    def has_more(self, key: Key, request: Request) -> bool:
        """Tell whether a later turn of this very conversation waits, not another one that begins alike."""
        with self._lock:
            later = self._requests.get(key)
        return later is not None and _begins(later, request.prompt)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Key]:
        with self._lock:
            return iter(list(self._requests))

    def put(self, key: Key, request: Request) -> int:
        """Add a conversation's latest; return how many others had to go."""
        with self._lock:
            gone = int(self._requests.pop(key, None) is not None)
            self._requests[key] = request
            if len(self._requests) > MOST_WAITING:
                tenants = Counter(place.tenant for place, _ in self._requests)
                busiest = max(tenants, key=lambda tenant: tenants[tenant])
                oldest = next(k for k in self._requests if k[0].tenant == busiest)
                del self._requests[oldest]
                gone += 1
            return gone

    def drop(self, place: Place, beginning: Sequence[Message] | str) -> int:
        """Forget all that begins so; return how many that were."""
        with self._lock:
            gone = [key for key, request in self._requests.items() if key[0] == place and _begins(request, beginning)]
            for key in gone:
                del self._requests[key]
            return len(gone)

    def take(self) -> tuple[Key, Request] | None:
        """Return the latest of all, which then no longer waits."""
        with self._lock:
            return self._requests.popitem() if self._requests else None


@dataclass
class _Work:
    """A conversation on its way; `state` is what the target holds of it by now."""

    key: Key
    prompt: Prompt
    offer: Offer
    state: ModelState | None
    tokens: int
    pieces: int = 0
    is_wanted: bool = True


class Ahead:
    """Makes one target ready for what it may be asked next, the latest conversation first.

    Args:
        name: the target's, as it is served.
        prepare: tokenises a request for the target.
        keep: takes the finished state.
        busy: whether anything else is to be done, here or elsewhere.
        has_room: whether so many tokens of the target can be kept without pushing out what is in use.
    """

    def __init__(
        self,
        name: str,
        switch: Switch,
        prepare: Callable[[Request], Prompt],
        keep: Callable[[Prompt, ModelState], None],
        busy: Callable[[], bool],
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.name, self.counts = name, Counter[str](dict.fromkeys(COUNTED, 0))
        self._switch, self._prepare, self._keep, self._busy = switch, prepare, keep, busy
        self._has_room = has_room
        self._waiting = _Waiting()
        self._work: _Work | None = None

    def _key(self, request: Request) -> Key:
        """Return what stands for a conversation: its place, and how it begins where it has no name."""
        return Place(request.tenant, request.conversation, self.name), _beginning(request)

    def put(self, request: Request) -> None:
        """Note what was answered; of one conversation (told by its beginning) only the latest counts. Any thread may call."""
        self.counts["ahead_abandoned"] += self._waiting.put(self._key(request), request)

    def forget(self, request: Request) -> None:
        """Drop what goes on from a request that the target has just answered itself. Any thread may call."""
        place, _ = self._key(request)
        self.counts["ahead_abandoned"] += self._waiting.drop(place, request.prompt)
        work = self._work
        if work is not None and work.key[0] == place and _begins(work.prompt.request, request.prompt):
            work.is_wanted = False

    def do_a_piece(self) -> float | None:
        """Translate up to `PIECE_TOKENS` tokens; return in how many seconds to go on, None for nothing to do."""
        if self._work is None and not len(self._waiting):
            return None
        if self._busy():
            return AGAIN_S
        try:
            if self._work is None:
                self._begin()
            else:
                self._go_on(self._work)
        except KVLingoError:  # this target can't take this conversation: who asks it for one is told why
            self.counts["ahead_abandoned"] += 1
            self._work = None
        except Exception as error:  # the switch itself will do what it can, and tell
            self.counts["ahead_failed"] += 1
            self._work = None
            LOG.warning("%s: translating ahead failed", self.name, exc_info=error)
        return 0.0

    def _begin(self) -> None:
        taken = self._waiting.take()
        if taken is None:
            return
        key, request = taken
        prompt = self._prepare(request)
        found = self._switch.worth_translating(prompt)
        if found is None:
            return
        if not self._has_room(len(prompt.reading)):
            self.counts["ahead_abandoned"] += 1
            return
        offer, own = found
        self._work = _Work(key, prompt, offer, own.snapshot.state if own else None, own.tokens if own else 0)

    def _go_on(self, work: _Work) -> None:
        if not work.is_wanted or self._waiting.has_more(work.key, work.prompt.request):
            self._stop_at(work)
            return
        whole = len(work.prompt.reading)
        until = work.tokens + PIECE_TOKENS
        until = whole if whole - until < LEAST_TOKENS else until
        state = self._switch.translate_until(work.prompt, work.offer, work.state, until)
        if state is None:
            self._work = None
            self.counts["ahead_abandoned"] += 1
            return
        self.counts["ahead_pieces"] += 1
        self.counts["ahead_tokens"] += until - work.tokens
        work.state, work.tokens, work.pieces = state, until, work.pieces + 1
        if until == whole:
            self._work = None
            self._keep(work.prompt, state)
            self.counts["ahead_done"] += 1

    def _stop_at(self, work: _Work) -> None:
        """Leave a conversation that has gone on meanwhile; what was made of it is kept, since its next turn begins with it.

        Of one that the target has answered itself nothing is kept: the target holds its own.
        """
        self._work = None
        self.counts["ahead_abandoned"] += 1
        if work.is_wanted and work.pieces and work.state is not None:
            self._keep(work.prompt, work.state)
