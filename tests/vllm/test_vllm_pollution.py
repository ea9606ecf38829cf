"""A later request never reads what was translated for another one.

The translator in use here is wrong on purpose: whatever leaks is seen in the log-probabilities, not only in the counts. What an
answer has to be is what the source says by itself, for the two models are twins.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.servers import Answer
from tests.vllm.conftest import Fleet

SAME = 1e-4
SEEN = 1e-2


@pytest.fixture(autouse=True, scope="module")
def _ahead(fleet: Fleet) -> None:
    fleet.begin("few")
    fleet.begin("multi")


class Case:
    """One prompt, its wrong translation in the target, and what is true."""

    def __init__(self, fleet: Fleet, seed: int, tokens: int = 520, name: str = "target") -> None:
        self.source, self.target = fleet.get("source"), fleet.get(name)
        self.ids = prompt(tokens, seed)
        self.kept = self.source.complete(self.ids, save=True).told["id"]
        self.key = fleet.as_strangers(self.kept)

    def translated(self, ids: Sequence[int] | None = None, **more: object) -> Answer:
        """Ask the target to go on from the wrong translation; it has to be seen to be wrong."""
        answer = self.target.complete(ids or self.ids, load=self.key, **more)  # type: ignore[arg-type]
        assert answer.told["status"] == "applied", answer.told
        return answer

    def clean(self, ids: Sequence[int] | None = None, *, cached: int | None = 0, **more: object) -> Answer:
        """Ask plainly; the answer has to be the model's own."""
        ids = ids or self.ids
        answer = self.target.complete(ids, **more)  # type: ignore[arg-type]
        assert cached is None or answer.cached == cached, f"{answer.cached} tokens were found"
        assert answer.far_from(self.source.complete(ids)) <= SAME
        return answer


@pytest.mark.parametrize("name", ["target", "sync"])
def test_the_same_prompt(fleet: Fleet, name: str) -> None:
    case = Case(fleet, 101, name=name)
    wrong = case.translated()
    assert case.clean().far_from(wrong) > SEEN


@pytest.mark.parametrize("name", ["target", "sync"])
def test_the_next_turn_over_blocks_filled_by_the_answer(fleet: Fleet, name: str) -> None:
    """Blocks that were filled while it spoke stand on a translated prefix."""
    case = Case(fleet, 102, name=name)
    wrong = case.translated(count=300)
    case.clean([*case.ids, *wrong.ids, 5, 6, 7])


def test_a_shorter_prompt(fleet: Fleet) -> None:
    case = Case(fleet, 103)
    case.translated()
    case.clean(case.ids[:300])


def test_a_longer_prompt(fleet: Fleet) -> None:
    case = Case(fleet, 104)
    case.translated()
    case.clean([*case.ids, *prompt(200, 1)[1:]])


def test_a_prompt_that_was_the_model_s_own_before(fleet: Fleet) -> None:
    """Exact blocks are there first: they are not replaced, and not read by the translated request."""
    case = Case(fleet, 105)
    case.clean()
    wrong = case.translated()
    assert wrong.told["prompt"]["native"] == 0
    assert case.clean(cached=512).far_from(wrong) > SEEN


def test_both_at_the_same_time(fleet: Fleet) -> None:
    case = Case(fleet, 106)
    threads = [threading.Thread(target=case.translated) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        case.clean(cached=None)
    for thread in threads:
        thread.join()
    case.clean(cached=512)


def test_a_salted_translation_and_plain(fleet: Fleet) -> None:
    case = Case(fleet, 107)
    key = case.source.complete(case.ids, save=True, salt="tenant").told["id"]
    answer = case.target.complete(case.ids, load=fleet.as_strangers(key), salt="tenant")
    assert answer.told["status"] == "applied"
    case.clean()
    case.clean(salt="tenant")


def test_a_plain_translation_and_salted(fleet: Fleet) -> None:
    case = Case(fleet, 108)
    case.translated()
    case.clean(salt="tenant")
    case.clean()


def test_another_kept_cache_of_the_same_prompt(fleet: Fleet) -> None:
    """Each hand-over is a world of its own; the same one again finds what it left."""
    case = Case(fleet, 109)
    wrong = case.translated()
    again = case.translated()
    assert again.told["prompt"]["native"] == 512
    assert again.far_from(wrong) <= SAME
    right = case.target.complete(case.ids, load=case.kept)
    assert right.told["prompt"]["native"] == 0
    assert right.far_from(case.clean()) <= SAME


def test_one_that_was_left_by_its_client(fleet: Fleet) -> None:
    case = Case(fleet, 110)
    with pytest.raises(TimeoutError):
        case.target.complete(case.ids, load=case.key, count=1400, timeout=1.0)
    case.clean()


def test_one_whose_load_failed(fleet: Fleet) -> None:
    """It is read again under its own salt, and what it read may then be found by others, for it is exact."""
    case = Case(fleet, 111)
    file = fleet.store.folder / f"{case.key}.0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    answer = case.target.complete(case.ids, load=case.key)
    assert answer.told["reason"] == "corrupt"
    assert answer.far_from(case.clean(cached=512)) <= SAME


def test_ones_that_were_pushed_out(fleet: Fleet) -> None:
    """Preempted and loaded again, in a server with few blocks."""
    source, target = fleet.get("source"), fleet.get("few")
    turned = [*range(2), *reversed(range(2, 258))]
    prompts = [prompt(500, seed) for seed in range(112, 116)]
    keys = [fleet.as_strangers(source.complete(ids, save=True, count=1).told["id"]) for ids in prompts]
    theirs = [[turned[i] for i in ids] for ids in prompts]
    before = target.metric("vllm:num_preemptions_total")
    threads = [
        threading.Thread(target=target.complete, args=(ids,), kwargs={"load": key, "count": 40})
        for ids, key in zip(theirs, keys, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.metric("vllm:num_preemptions_total") > before
    for ids, mine in zip(prompts, theirs, strict=True):
        own, plain = source.complete(ids), target.complete(mine)
        assert [turned[i] if i < 258 else i for i in plain.ids] == own.ids
        assert max(abs(a - b) for a, b in zip(plain.logprobs, own.logprobs, strict=True)) <= SAME


def test_another_connector_that_keeps_blocks(fleet: Fleet) -> None:
    """The child keeps translated blocks too, under the salted hashes, and gives them to this hand-over only."""
    case = Case(fleet, 119, name="multi")
    wrong = case.translated()
    for seed in (120, 121, 122):  # these push all blocks out of the engine's own cache
        case.target.complete(prompt(900, seed))
    again = case.translated()
    assert again.told["prompt"]["native"] == 0, "the engine's own cache still has it"
    assert again.far_from(wrong) <= SAME
    for seed in (120, 121, 122):
        case.target.complete(prompt(900, seed))
    plain = case.clean(cached=None)
    assert plain.cached == 0
    for seed in (120, 121, 122):
        case.target.complete(prompt(900, seed))
    assert case.clean(cached=None).cached == 512, "the child gives back what is the model's own"
    fleet.end("multi")


def test_a_salt_that_looks_like_ours(fleet: Fleet) -> None:
    case = Case(fleet, 117)
    case.translated()
    for salt in ("kvlingo:", f"kvlingo:{case.key}", "kvlingo:" + "0" * 64):
        case.clean(salt=salt)


def test_a_leak_would_be_seen(fleet: Fleet) -> None:
    """The control: a request that asks for the wrong translation differs from what is true by far."""
    case = Case(fleet, 118)
    assert case.translated().far_from(case.source.complete(case.ids)) > SEEN
