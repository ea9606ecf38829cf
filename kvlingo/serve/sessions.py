"""What each model has read, found again by token ids.

Knows states and how their caches share tensors. Does not know models, requests or translators. A snapshot is never changed:
whoever goes on from one goes on from a fork of it (`cache.fork`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from kvlingo.cache import holds_all, tensors_of
from kvlingo.cache_writing import fork
from kvlingo.geometry import Geometry
from kvlingo.plan import Provenance, Span
from kvlingo.states import ModelState


@dataclass(frozen=True)
class Place:
    """Whose snapshots these are. Nothing is ever found from another place: tenants don't share, not even by timing."""

    tenant: str
    conversation: str | None
    model: str


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state at rest. `whole`: every layer holds every token, so it can be cut anywhere."""

    place: Place
    state: ModelState
    ids: tuple[int, ...]
    whole: bool
    exact: int
    ahead: bool = False

    @property
    def translated_until(self) -> int:
        """Return the end of the last translated span."""
        return self.state.translated_until

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that it keeps alive."""
        return sum(_storages(self).values())


class Entry(Protocol):
    """What a tree keeps: the ids that were read, and how many of the first are exact."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids, in order."""
        ...

    @property
    def exact(self) -> int:
        """The end of the first exact ones."""
        ...

    @property
    def translated_until(self) -> int:
        """The end of the last translated ones."""
        ...


Kept = TypeVar("Kept", bound=Entry)


@dataclass(frozen=True)
class Match(Generic[Kept]):
    """A snapshot whose first `tokens` ids are those that were asked for."""

    snapshot: Kept
    tokens: int

    @property
    def exact(self) -> int:
        """Return how many of the first tokens are the model's own reading of nothing but its own reading."""
        return min(self.tokens, self.snapshot.exact)


def snapshot_of(place: Place, state: ModelState, geometry: Geometry) -> Snapshot:
    """Return a state at rest; the caller may go on with its own cache."""
    frozen = replace(state, cache=fork(state.cache))
    ids = state.reading.ids[: int(frozen.cache.get_seq_length())]
    return Snapshot(place, frozen, ids, holds_all(frozen.cache, geometry), exact_until(state.spans))


def exact_until(spans: Sequence[Span]) -> int:
    """Return the end of the first exact tokens of a state's spans."""
    end = 0
    for span in spans:
        if span.start != end or span.provenance is not Provenance.EXACT:
            break
        end = span.stop
    return end


@dataclass(eq=False)
class _Node(Generic[Kept]):
    edge: tuple[int, ...] = ()
    parent: _Node[Kept] | None = None
    children: dict[int, _Node[Kept]] = field(default_factory=dict)
    snapshot: Kept | None = None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Radix(Generic[Kept]):
    """Token ids → snapshots, as a tree whose edges are runs of ids."""

    def __init__(self) -> None:
        self._root = _Node[Kept]()

    @property
    def empty(self) -> bool:
        """Tell whether nothing is kept here."""
        return not self._root.children

    def insert(self, snapshot: Kept) -> Kept | None:
        """Put a snapshot at its ids; return the one that stood there."""
        node, rest = self._root, snapshot.ids
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node[Kept](rest, node)
            shared = common(child.edge, rest)
            if shared < len(child.edge):
                child = _split(child, shared)
            node, rest = child, rest[shared:]
        before, node.snapshot = node.snapshot, snapshot
        return before

    def remove(self, snapshot: Kept) -> None:
        """Take a snapshot out; branches that lead nowhere go with it."""
        node = self._at(snapshot.ids)
        if node is None or node.snapshot is not snapshot:
            return
        node.snapshot = None
        while node.parent is not None and node.snapshot is None and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent is not None and node.snapshot is None and len(node.children) == 1:
            _merge(node)

    def above(self, ids: Sequence[int]) -> list[Kept]:
        """Return the snapshots of proper prefixes of `ids`."""
        return [m.snapshot for m in self.find(ids) if len(m.snapshot.ids) == m.tokens < len(ids)]

    def find(self, ids: Sequence[int]) -> list[Match[Kept]]:
        """Return what shares a prefix with `ids`: whole snapshots on the way, and all that go on from where it ends."""
        node, depth, found = self._root, 0, list[Match[Kept]]()
        while depth < len(ids):
            child = node.children.get(ids[depth])
            if child is None:
                break
            shared = common(child.edge, ids[depth : depth + len(child.edge)])
            node, depth = child, depth + shared
            if shared < len(child.edge):
                break
            if child.snapshot is not None and depth < len(ids):
                found.append(Match(child.snapshot, depth))
        if depth:
            beyond = (Match(snapshot, depth) for snapshot in _snapshots_under(node))
            found += [m for m in beyond if not any(m.snapshot is f.snapshot for f in found)]
        return found

    def at(self, ids: Sequence[int]) -> Kept | None:
        """Return the snapshot of exactly these ids."""
        node = self._at(ids)
        return None if node is None else node.snapshot

    def _at(self, ids: Sequence[int]) -> _Node[Kept] | None:
        node, depth = self._root, 0
        while depth < len(ids):
            child = node.children.get(ids[depth])
            if child is None or tuple(ids[depth : depth + len(child.edge)]) != child.edge:
                return None
            node, depth = child, depth + len(child.edge)
        return node


def _split(node: _Node[Kept], at: int) -> _Node[Kept]:
    """Put a node in the middle of the edge that leads to `node`; return it."""
    assert node.parent is not None
    middle = _Node[Kept](node.edge[:at], node.parent, {node.edge[at]: node})
    node.parent.children[node.edge[0]] = middle
    node.edge, node.parent = node.edge[at:], middle
    return middle


def _merge(node: _Node[Kept]) -> None:
    """Take out a node that only leads to one other."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge, child.parent = node.edge + child.edge, node.parent
    node.parent.children[child.edge[0]] = child


def _snapshots_under(node: _Node[Kept]) -> Iterator[Kept]:
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if here.snapshot is not None:
            yield here.snapshot
        waiting.extend(here.children.values())


class Sessions:
    """All snapshots of all places, bounded in bytes.

    Where they are too many, the tenant that holds the most gives up the one that it used longest ago: nobody who holds less than
    an equal share loses anything to others. Several threads use it. A tensor that snapshots share counts once.

    Args:
        evicted: takes what had to make room, on the thread that needed it; nothing is locked then.
    """

    def __init__(self, max_bytes: int, evicted: Callable[[Snapshot], None] = lambda _: None) -> None:
        self.max_bytes, self._evicted = max_bytes, evicted
        self._lock = threading.Lock()
        self._trees: dict[Place, Radix[Snapshot]] = {}
        self._recent: OrderedDict[Snapshot, int] = OrderedDict()  # the one used longest ago first; when
        self._clock = 0
        self._storages: dict[int, list[int]] = {}  # address → [snapshots that use it, bytes]
        self._held = Counter[str]()  # bytes by tenant

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors kept."""
        return self._held.total()

    def holds(self, place: Place) -> bool:
        """Tell whether anything is kept at a place."""
        with self._lock:
            return place in self._trees

    def keep(self, place: Place, state: ModelState, geometry: Geometry, *, ahead: bool = False) -> None:
        """Keep a state as it is now; the caller may go on with its own cache.

        What it can stand in for is dropped: it is longer, can be cut back exactly, and is trusted at least as far.
        """
        if not int(state.cache.get_seq_length()):
            return
        snapshot = replace(snapshot_of(place, state, geometry), ahead=ahead)
        with self._lock:
            self._put(snapshot)
            evicted = list(self._make_room())
        for old in evicted:
            self._evicted(old)

    def swap(self, old: Snapshot, state: ModelState, geometry: Geometry) -> bool:
        """Put a state of the same ids in a snapshot's place, as long ago as that was used; False where it is gone by now."""
        snapshot = snapshot_of(old.place, state, geometry)
        assert snapshot.ids == old.ids
        with self._lock:
            if old not in self._recent:
                return False
            when = self._recent[old]
            order = [snapshot if kept is old else kept for kept in self._recent]
            self._put(snapshot)
            self._recent[snapshot] = when
            for kept in order:
                if kept in self._recent:
                    self._recent.move_to_end(kept)
            evicted = list(self._make_room())
        for gone in evicted:
            self._evicted(gone)
        return True

    def _put(self, snapshot: Snapshot) -> None:
        tree = self._trees.setdefault(snapshot.place, Radix())
        before = tree.at(snapshot.ids)
        if before is not None and before.exact > snapshot.exact:  # what is approximate replaces nothing that is less so
            self._tick(before)
            return
        for other in tree.above(snapshot.ids) if snapshot.whole else ():
            if stands_in(snapshot, other):
                self._drop(other)
        before = tree.insert(snapshot)
        if before is not None:
            self._forget(before)
        self._count(snapshot)
        self._trees[snapshot.place] = tree

    def _make_room(self) -> Iterator[Snapshot]:
        while self._held.total() > self.max_bytes:
            most = max(self._held, key=lambda tenant: self._held[tenant])
            old = next(old for old in self._recent if old.place.tenant == most)
            self._drop(old)
            yield old

    def all(self) -> list[Snapshot]:
        """Return all snapshots, the one used last first."""
        with self._lock:
            return list(reversed(self._recent))

    def keeps(self, snapshot: Snapshot) -> bool:
        """Tell whether a snapshot is still kept."""
        with self._lock:
            return snapshot in self._recent

    def find(self, place: Place, ids: Sequence[int]) -> list[Match[Snapshot]]:
        """Return what shares a prefix with `ids`: the longest first, of equal ones the most exact, then the latest."""
        with self._lock:
            tree = self._trees.get(place)
            if tree is None:
                return []
            return sorted(tree.find(ids), key=lambda m: (m.tokens, m.exact, self._recent[m.snapshot]), reverse=True)

    def used(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was of use just now."""
        with self._lock:
            if snapshot in self._recent:
                self._tick(snapshot)

    def _tick(self, snapshot: Snapshot) -> None:
        self._clock += 1
        self._recent[snapshot] = self._clock
        self._recent.move_to_end(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        tree = self._trees[snapshot.place]
        tree.remove(snapshot)
        self._forget(snapshot)
        if tree.empty:
            del self._trees[snapshot.place]

    def _count(self, snapshot: Snapshot) -> None:
        self._tick(snapshot)
        for address, size in _storages(snapshot).items():
            entry = self._storages.setdefault(address, [0, size])
            self._held[snapshot.place.tenant] += 0 if entry[0] else size
            entry[0] += 1

    def _forget(self, snapshot: Snapshot) -> None:
        del self._recent[snapshot]
        for address in _storages(snapshot):
            entry = self._storages[address]
            entry[0] -= 1
            if not entry[0]:
                self._held[snapshot.place.tenant] -= entry[1]
                del self._storages[address]
        if not self._held[snapshot.place.tenant]:
            del self._held[snapshot.place.tenant]


def _storages(snapshot: Snapshot) -> dict[int, int]:
    """Return the address and the bytes of every storage that a snapshot keeps alive."""
    storages = (x.untyped_storage() for x in tensors_of(snapshot.state.cache) if x.numel())
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def stands_in(longer: Entry, shorter: Entry) -> bool:
    """Tell whether the first tokens of one can be trusted at least as far as all of another."""
    until = min(len(shorter.ids), longer.exact)
    trusted = until >= shorter.exact
    return trusted and shorter.translated_until >= min(longer.translated_until, len(shorter.ids))
