"""What models have read, found by token ids: longest prefixes, bytes, isolation."""

from __future__ import annotations

import random

import pytest
import torch

from kvlingo.cache import can_cut, holds_all, native_cache, tensors_of
from kvlingo.cache_writing import append_row, fork, stack_rows, truncate
from kvlingo.errors import UnsupportedCache
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import Provenance, Span, SpanKind, reprefill_plan
from kvlingo.reading import reading_of_ids
from kvlingo.serve.sessions import Match, Place, Sessions, common
from kvlingo.states import ModelState
from tests import tiny
from tests.families import language_model as family_model

LM = tiny.language_model("llama")
PLACE = Place("me", None, "m")


def state_of(ids: list[int], lm: LanguageModel = LM, spans: tuple[Span, ...] | None = None) -> ModelState:
    reading = reading_of_ids(lm.tokenizer, ids)
    with torch.no_grad():
        cache = prefill(lm, lm.ids(ids), full_length=True).cache
    return ModelState(reading, cache, spans or reprefill_plan(len(ids), "read").spans)


def longest(found: list[Match]) -> int:
    return found[0].tokens if found else 0


def random_ids(rng: random.Random) -> list[int]:
    return [rng.choice((5, 6)) for _ in range(rng.randint(1, 9))]


def test_the_longest_prefix_is_found_among_many() -> None:
    """Against the definition, over random trees; nothing is dropped, since no snapshot counts as whole."""
    state = state_of([5, 6, 5])
    for seed in range(30):
        rng = random.Random(seed)
        sessions, kept = Sessions(1 << 30), set()
        for _ in range(25):
            ids = random_ids(rng)
            kept.add(tuple(ids))
            made = state_of_ids_only(ids, state)
            sessions.keep(PLACE, made, LM.geometry)
        assert len(sessions) == len(kept)
        for _ in range(40):
            asked = random_ids(rng)
            found = sessions.find(PLACE, asked)
            assert longest(found) == max(common(ids, asked) for ids in kept)
            for match in found:
                assert common(match.snapshot.ids, asked) == match.tokens
            held = max((len(ids) for ids in kept if tuple(asked[: len(ids)]) == ids), default=0)
            assert max((m.tokens for m in found if m.tokens == len(m.snapshot.ids)), default=0) == held


class _Counted:
    """A cache that only counts: enough for a tree."""

    def __init__(self, tokens: int) -> None:
        self.layers: list[object] = []
        self._tokens = tokens

    def get_seq_length(self) -> int:
        return self._tokens


def state_of_ids_only(ids: list[int], like: ModelState) -> ModelState:
    return ModelState(reading_of_ids(LM.tokenizer, ids), _Counted(len(ids)), like.spans)


def test_what_was_dropped_is_not_found_and_the_rest_is() -> None:
    one = 2 * 3 * 16 * 10 * 8  # keys and values, layers, features, tokens, bytes
    for seed in range(5):
        rng = random.Random(seed)
        sessions = Sessions(4 * one)
        states = [[*(rng.choice((5, 6)) for _ in range(4)), 7 + n, *[8] * 5] for n in range(9)]
        for ids in states:
            sessions.keep(PLACE, state_of(ids), LM.geometry)
            assert sessions.num_bytes <= 4 * one
        assert len(sessions) == 4
        for n, ids in enumerate(states):
            whole = any(m.tokens == 10 for m in sessions.find(PLACE, ids))
            assert whole == (n >= 5)


def test_what_is_used_stays() -> None:
    one = 2 * 3 * 16 * 10 * 8
    sessions, states = Sessions(2 * one), [[n, *[8] * 9] for n in (5, 6, 7)]
    sessions.keep(PLACE, state_of(states[0]), LM.geometry)
    sessions.keep(PLACE, state_of(states[1]), LM.geometry)
    sessions.used(sessions.find(PLACE, states[0])[0].snapshot)
    sessions.keep(PLACE, state_of(states[2]), LM.geometry)
    assert [bool(sessions.find(PLACE, ids)) for ids in states] == [True, False, True]


def test_a_tenant_that_keeps_much_costs_another_nothing() -> None:
    one = 2 * 3 * 16 * 10 * 8
    sessions, quiet = Sessions(4 * one), Place("quiet", None, "m")
    sessions.keep(quiet, state_of([4, *[8] * 9]), LM.geometry)
    for n in range(5, 15):
        sessions.keep(PLACE, state_of([n, *[8] * 9]), LM.geometry)
    assert longest(sessions.find(quiet, [4, *[8] * 9])) == 10
    assert (len(sessions), sessions.num_bytes) == (4, 4 * one)
    assert [bool(sessions.find(PLACE, [n, 8])) for n in range(11, 15)] == [False, True, True, True]


def test_shared_tensors_count_once() -> None:
    state, sessions = state_of([5, 6, 7]), Sessions(1 << 30)
    sessions.keep(PLACE, state, LM.geometry)
    once = sessions.num_bytes
    sessions.keep(Place("me", "pinned", "m"), state, LM.geometry)
    assert (sessions.num_bytes, len(sessions)) == (once, 2)
    assert once == sum(x.numel() * x.element_size() for x in tensors_of(state.cache))


def test_nothing_is_found_from_another_place() -> None:
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, state_of([5, 6, 7]), LM.geometry)
    assert sessions.find(PLACE, [5, 6, 7, 8])
    for other in (Place("you", None, "m"), Place("me", "pinned", "m"), Place("me", None, "n")):
        assert not sessions.find(other, [5, 6, 7, 8])


def test_a_longer_whole_snapshot_stands_in_for_a_shorter_one() -> None:
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, state_of([5, 6, 7]), LM.geometry)
    sessions.keep(PLACE, state_of([5, 6, 7, 8]), LM.geometry)
    assert len(sessions) == 1
    assert longest(sessions.find(PLACE, [5, 6, 9])) == 2


def test_an_approximate_snapshot_never_stands_in_for_an_exact_one() -> None:
    sessions = Sessions(1 << 30)
    spans = (
        Span(0, 1, SpanKind.RECOMPUTED, Provenance.EXACT, "sink"),
        Span(1, 3, SpanKind.TRANSLATED, Provenance.TRANSLATED, "translated"),
        Span(3, 4, SpanKind.RECOMPUTED, Provenance.OWN, "tail"),
    )
    sessions.keep(PLACE, state_of([5, 6, 7]), LM.geometry)
    sessions.keep(PLACE, state_of([5, 6, 7, 8], spans=spans), LM.geometry)
    assert len(sessions) == 2
    found = sessions.find(PLACE, [5, 6, 7, 8, 9])
    assert [(m.tokens, m.exact) for m in found] == [(4, 1), (3, 3)]
    assert [m.exact for m in sessions.find(PLACE, [5, 6, 9])] == [2, 1]  # of equal ones the most exact first


# --- forks and stacks ------------------------------------------------------------------------------------------------


def frozen(cache: object) -> list[torch.Tensor]:
    return [x.clone() for x in tensors_of(cache)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "qwen3-next", "lfm2"])
@pytest.mark.parametrize("full_length", [True, False])
@torch.no_grad()
def test_going_on_from_a_fork_never_changes_the_cache(family: str, full_length: bool) -> None:
    lm = tiny.language_model(family) if family in tiny.FAMILIES else family_model(family)
    ids = lm.ids(list(range(5, 25)))
    cache = prefill(lm, ids, full_length=full_length).cache
    before, length = frozen(cache), int(cache.get_seq_length())
    texts = []
    for _ in range(2):
        mine = fork(cache)
        for token in (9, 10, 11):
            logits = prefill(lm, lm.ids([token]), cache=mine).logits
        texts.append(logits)
        assert int(mine.get_seq_length()) == length + 3
    assert tiny.same(before, list(tensors_of(cache)))
    assert int(cache.get_seq_length()) == length
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_shallow_copy_of_a_recurrent_cache_would_change_it() -> None:
    """The reason why `fork` copies what it does not know to be safe."""
    import copy

    lm = family_model("qwen3-next")
    cache = prefill(lm, lm.ids(list(range(5, 25)))).cache
    before = frozen(cache)
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    prefill(lm, lm.ids([9]), cache=shallow)
    assert not tiny.same(before, list(tensors_of(cache)))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "glm4"])
@torch.no_grad()
def test_rows_come_back_from_a_stack_as_they_are_alone(family: str) -> None:
    from kvlingo.batches import Batch, prefill_batch

    lm = tiny.language_model(family)
    for lengths in ((3, 12, 30), (7, 8, 9), (1, 2, 8)):
        rows = [lm.ids([5 + (i * 7) % 200 for i in range(n)]) for n in lengths]
        caches = [prefill(lm, row, full_length=True).cache for row in rows]
        alone = [fork(cache) for cache in caches]
        batch = Batch(stack_rows(caches, lm.geometry, lm.model.config), tuple(max(lengths) - n for n in lengths))
        for token in (20, 21, 22):
            together = prefill_batch(lm, [lm.ids([token])] * 3, batch=batch).logits[:, -1]
            apart = torch.stack([prefill(lm, lm.ids([token]), cache=c).logits[-1] for c in alone])
            torch.testing.assert_close(together, apart, atol=1e-8, rtol=0)
        for index, (cache, expected) in enumerate(zip(caches, alone, strict=True)):
            append_row(cache, batch.cache, index, 3, lm.geometry)
            assert holds_all(cache, lm.geometry)
            for a, b in zip(tensors_of(cache), tensors_of(expected), strict=True):
                torch.testing.assert_close(a, b, atol=1e-8, rtol=0)


@torch.no_grad()
def test_only_what_holds_everything_is_whole() -> None:
    lm = tiny.language_model("gemma3")
    ids = lm.ids(list(range(5, 25)))
    full = prefill(lm, ids, full_length=True).cache
    assert holds_all(full, lm.geometry)
    assert holds_all(truncate(full, 12, lm.geometry, lm.model.config), lm.geometry)
    assert not holds_all(prefill(lm, ids).cache, lm.geometry)
    assert not holds_all(native_cache(lm.model.config), lm.geometry)
    slid = prefill(lm, ids).cache
    assert [can_cut(slid, n, lm.geometry) for n in (20, 19, 3)] == [True, False, False]
    assert [can_cut(full, n, lm.geometry) for n in (20, 19, 3)] == [True, True, True]
    for cache, tokens in ((slid, 19), (slid, 3)):
        with pytest.raises(UnsupportedCache):
            truncate(cache, tokens, lm.geometry, lm.model.config)
