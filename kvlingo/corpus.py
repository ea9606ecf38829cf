"""Texts become hand-overs to learn from: what the source has read, what the target would have read, what comes next.

Knows tokenizers and documents. The source never sees a character from after the hand-over. Does not run models.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlingo.alignment import align, last_at_source_start
from kvlingo.errors import BadInput
from kvlingo.reading import Reading, first_tokens, read_chat, read_text
from kvlingo.texts import Document

CHARS_PER_TOKEN = 8  # generous: a piece of text is cut by the target's tokens, never by this
MIN_CONTEXT = 8


@dataclass(frozen=True)
class Example:
    """One hand-over: `context` target tokens that the source has read in its own way, then `continuation` target tokens.

    Fields:
        alignment: [context tokens] source token of each.
        at_source_start: how many first target tokens align to source position 0; they are sinks and never translated.
        continuation_text: the text of `continuation`.
    """

    source: Reading
    target: Reading
    continuation: tuple[int, ...]
    alignment: Tensor
    at_source_start: int
    continuation_text: str
    cluster: str
    kind: str

    @property
    def context_tokens(self) -> int:
        """Number of target tokens before the hand-over."""
        return len(self.target.ids)

    @property
    def is_translatable(self) -> bool:
        """Whether something lies between the sinks and the shortest tail."""
        unread = int((self.alignment < 0).sum())
        return max(1, self.at_source_start) < self.context_tokens - max(1, unread)


def examples(
    documents: Sequence[Document],
    source_tokenizer: Any,
    target_tokenizer: Any,
    *,
    context_tokens: Sequence[int],
    continuation_tokens: int = 0,
    chat_share: float = 0.0,
    per_document: int | None = None,
    seed: int = 0,
) -> Iterator[Example]:
    """Cut documents into examples, in order.

    Args:
        context_tokens: context lengths to draw from; one value gives exactly that length.
        chat_share: share of examples rendered as a conversation in each model's own chat template.
        per_document: at most so many examples a document, spread evenly over it.
    """
    rng = random.Random(seed)
    for document in documents:
        starts = _starts(document, max(context_tokens) + continuation_tokens, per_document)
        position = 0
        while starts or per_document is None:
            if per_document is not None:
                position = starts.pop(0)
            context = rng.choice(list(context_tokens))
            text = document.text[position : position + CHARS_PER_TOKEN * (context + continuation_tokens)]
            make = chat_example if rng.random() < chat_share else text_example
            made = make(text, source_tokenizer, target_tokenizer, context, continuation_tokens, document)
            if made is None:
                if per_document is None:
                    break
                continue
            example, used = made
            position += used
            yield example


def _starts(document: Document, tokens: int, count: int | None) -> list[int]:
    """Spread `count` starting points over a document, on word boundaries."""
    if count is None:
        return []
    room = max(0, len(document.text) - 6 * tokens)
    starts = sorted({room * i // max(count - 1, 1) for i in range(count)})
    return [_word_start(document.text, start) for start in starts]


def _word_start(text: str, start: int) -> int:
    while 0 < start < len(text) and not text[start - 1].isspace():
        start += 1
    return start


def text_example(
    text: str, source_tokenizer: Any, target_tokenizer: Any, context: int, continuation: int, document: Document
) -> tuple[Example, int] | None:
    """Cut one plain-text example off the start of `text`; return it with the characters used, or None if it is too short."""
    whole = read_text(target_tokenizer, text)
    if len(whole.ids) < context + continuation or context < MIN_CONTEXT:
        return None
    cut = _character_boundary(whole, text, context)
    if cut is None:
        return None
    context, characters = cut
    target = first_tokens(whole, context)
    follow = whole.ids[context : context + continuation]
    end = whole.spans[context + len(follow) - 1][1] - whole.contents[0][0]
    used = len(text.encode()[:end].decode(errors="ignore"))
    source = read_text(source_tokenizer, text[:characters])
    return _example(source, target, follow, text[characters:used], document), max(used, 1)


def _character_boundary(whole: Reading, text: str, context: int) -> tuple[int, int] | None:
    """Return (tokens, characters) of the longest context up to `context` tokens that ends between two characters."""
    raw, offset = text.encode(), whole.contents[0][0]
    while context >= MIN_CONTEXT:
        prefix = raw[: whole.spans[context - 1][1] - offset]
        try:
            return context, len(prefix.decode())
        except UnicodeDecodeError:
            context -= 1
    return None


def chat_example(
    text: str, source_tokenizer: Any, target_tokenizer: Any, context: int, continuation: int, document: Document
) -> tuple[Example, int] | None:
    """Render the start of `text` as a conversation that ends before the assistant's next words."""
    plain = read_text(target_tokenizer, text)
    if len(plain.ids) < context + continuation or context < 4 * MIN_CONTEXT:
        return None
    room = context - 3 * MIN_CONTEXT  # what the template itself takes
    cut = _character_boundary(plain, text, room)
    if cut is None:
        return None
    _, characters = cut
    messages = as_chat(text[:characters])
    target = read_chat(target_tokenizer, messages, add_generation_prompt=True)
    source = read_chat(source_tokenizer, messages, add_generation_prompt=False)
    reply = text[characters : characters + CHARS_PER_TOKEN * max(continuation, 1)].lstrip()
    follow = tuple(target_tokenizer(reply, add_special_tokens=False)["input_ids"][:continuation])
    if len(follow) < continuation:
        return None
    said = target_tokenizer.decode(follow)
    return _example(source, target, follow, said, document), characters + len(said)


def as_chat(text: str, turns: int = 3) -> list[dict[str, str]]:
    """Split a text into alternating user and assistant messages, ending with the user's."""
    size = max(1, len(text) // turns)
    cuts = [_word_start(text, i * size) for i in range(turns)] + [len(text)]
    pieces = [text[a:b].strip() for a, b in itertools.pairwise(cuts)]
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": piece} for i, piece in enumerate(p for p in pieces if p)][
        : 2 * ((turns + 1) // 2) - 1
    ]


def _example(source: Reading, target: Reading, follow: Sequence[int], said: str, document: Document) -> Example:
    alignment = align(source, target)
    return Example(
        source,
        target,
        tuple(follow),
        alignment,
        last_at_source_start(alignment),
        said,
        document.cluster,
        document.kind,
    )


def require_examples(found: Sized, wanted: str) -> None:
    """Raise `BadInput` when the texts gave no example."""
    if not found:
        raise BadInput(f"the texts are too short: no piece of {wanted}; give longer texts or a smaller --context")


def random_examples(
    documents: Sequence[Document],
    source_tokenizer: Any,
    target_tokenizer: Any,
    *,
    context_tokens: Sequence[int],
    continuation_tokens: int,
    chat_share: float,
    seed: str,
    count: int,
) -> list[Example]:
    """Draw `count` examples from random places, kinds alike and a kind's documents by length; the same `seed` draws the same."""
    rng = random.Random(seed)
    of_kind: Counter[str] = Counter()
    for document in documents:
        of_kind[document.kind] += len(document.text)
    weights = [len(d.text) / max(of_kind[d.kind], 1) for d in documents]
    found: list[Example] = []
    for _ in range(count * 50):
        if len(found) == count:
            return found
        document = rng.choices(documents, weights)[0]
        context = rng.choice(list(context_tokens))
        start = _word_start(document.text, rng.randrange(len(document.text)))
        text = document.text[start : start + CHARS_PER_TOKEN * (context + continuation_tokens)]
        make = chat_example if rng.random() < chat_share else text_example
        made = make(text, source_tokenizer, target_tokenizer, context, continuation_tokens, document)
        if made is not None and made[0].is_translatable:
            found.append(made[0])
    require_examples(found, f"{min(context_tokens)} + {continuation_tokens} tokens")
    return found
