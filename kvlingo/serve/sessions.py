"""What each model has read, found again by token ids.

Knows states and how their caches share tensors. Does not know models, requests or translators. A snapshot is never changed:
whoever goes on from one goes on from a fork of it (`cache.fork`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvlingo.cache import fork, holds_all, tensors_of
from kvlingo.geometry import Geometry
from kvlingo.handoff import ModelState
from kvlingo.plan import Provenance


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


@dataclass(frozen=True)
class Match:
    """A snapshot whose first `tokens` ids are those that were asked for."""

    snapshot: Snapshot
    tokens: int

    @property
    def exact(self) -> int:
        """Return how many of the first tokens are the model's own reading of nothing but its own reading."""
        return min(self.tokens, self.snapshot.exact)


def exact_until(state: ModelState) -> int:
    """Return the end of the first exact tokens of a state."""
    end = 0
    for span in state.spans:
        if span.start != end or span.provenance is not Provenance.EXACT:
            break
        end = span.stop
    return end


@dataclass(eq=False)
class _Node:
    edge: tuple[int, ...] = ()
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    snapshot: Snapshot | None = None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Radix:
    """Token ids → snapshots, as a tree whose edges are runs of ids."""

    def __init__(self) -> None:
        self._root = _Node()

    @property
    def empty(self) -> bool:
        """Tell whether nothing is kept here."""
        return not self._root.children

    def insert(self, snapshot: Snapshot) -> Snapshot | None:
        """Put a snapshot at its ids; return the one that stood there."""
        node, rest = self._root, snapshot.ids
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest, node)
            shared = common(child.edge, rest)
            if shared < len(child.edge):
                child = _split(child, shared)
            node, rest = child, rest[shared:]
        before, node.snapshot = node.snapshot, snapshot
        return before

    def remove(self, snapshot: Snapshot) -> None:
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

    def above(self, ids: Sequence[int]) -> list[Snapshot]:
        """Return the snapshots of proper prefixes of `ids`."""
        return [m.snapshot for m in self.find(ids) if len(m.snapshot.ids) == m.tokens < len(ids)]

    def find(self, ids: Sequence[int]) -> list[Match]:
        """Return what shares a prefix with `ids`: whole snapshots on the way, and all that go on from where it ends."""
        node, depth, found = self._root, 0, list[Match]()
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

    def _at(self, ids: Sequence[int]) -> _Node | None:
        node, depth = self._root, 0
        while depth < len(ids):
            child = node.children.get(ids[depth])
            if child is None or tuple(ids[depth : depth + len(child.edge)]) != child.edge:
                return None
            node, depth = child, depth + len(child.edge)
        return node


def _split(node: _Node, at: int) -> _Node:
    """Put a node in the middle of the edge that leads to `node`; return it."""
    assert node.parent is not None
    middle = _Node(node.edge[:at], node.parent, {node.edge[at]: node})
    node.parent.children[node.edge[0]] = middle
    node.edge, node.parent = node.edge[at:], middle
    return middle


def _merge(node: _Node) -> None:
    """Take out a node that only leads to one other."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge, child.parent = node.edge + child.edge, node.parent
    node.parent.children[child.edge[0]] = child


def _snapshots_under(node: _Node) -> Iterator[Snapshot]:
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
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._trees: dict[Place, Radix] = {}
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

    def keep(self, place: Place, state: ModelState, geometry: Geometry) -> None:
        """Keep a state as it is now; the caller may go on with its own cache.

        What it can stand in for is dropped: it is longer, can be cut back exactly, and is trusted at least as far.
        """
        tokens = int(state.cache.get_seq_length())
        if not tokens:
            return
        frozen = ModelState(state.reading, fork(state.cache), state.spans)
        whole, exact = holds_all(frozen.cache, geometry), exact_until(state)
        snapshot = Snapshot(place, frozen, state.reading.ids[:tokens], whole, exact)
        with self._lock:
            tree = self._trees.setdefault(place, Radix())
            for other in tree.above(snapshot.ids) if whole else ():
                if _stands_in(snapshot, other):
                    self._drop(other)
            before = tree.insert(snapshot)
            if before is not None:
                self._forget(before)
            self._count(snapshot)
            self._trees[place] = tree
            while self._held.total() > self.max_bytes:
                most = max(self._held, key=lambda tenant: self._held[tenant])
                self._drop(next(old for old in self._recent if old.place.tenant == most))

    def find(self, place: Place, ids: Sequence[int]) -> list[Match]:
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


def _stands_in(longer: Snapshot, shorter: Snapshot) -> bool:
    until = min(len(shorter.ids), longer.exact)
    trusted = until >= shorter.exact
    return trusted and (shorter.state.translated_until >= min(longer.state.translated_until, len(shorter.ids)))
