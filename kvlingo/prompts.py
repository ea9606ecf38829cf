"""Strings of a test harness → contexts that models read, and the tokens of what is asked about them.

Knows one tokenizer and the chats that its template rendered. A harness deals in strings: where a context ends and its
continuation begins is found again in the tokens of both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlingo.chat import Message, plain_message, render
from kvlingo.contexts import NOTHING_TO_HAND_OVER, Context, Follow
from kvlingo.errors import BadInput
from kvlingo.reading import Reading, first_tokens, read_chat, read_text, reading_of_ids
from kvlingo.spelling import encode

CUT_CHAT = "the conversation is longer than the model reads, and was cut"
OTHER_CHAT = "the chat can't be found again in its tokens"


@dataclass(frozen=True)
class Prompt:
    """A context and what is to follow it; `is_merged` where a token reached over the end of the context, so that it follows."""

    context: Context
    follow: Follow
    is_merged: bool = False


class Prompts:
    """Reads a harness's strings for one tokenizer; contexts and continuations have `max_length` + 1 tokens together at most."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self._chats: dict[str, tuple[list[dict[str, Any]], str]] = {}

    @property
    def prefix_id(self) -> int:
        """The token that stands before a text of which everything is to be scored."""
        bos = self.tokenizer.bos_token_id
        found = self.tokenizer.eos_token_id if bos is None else bos
        if found is None:
            raise BadInput(
                "this tokenizer has no BOS and no EOS token, so nothing can stand before a text's first token"
            )
        return int(found)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render a chat as the template does, and remember it by its text; without the prompt, the last message is gone on with.

        Where the template refuses a system message, it is left out.
        """
        chat = [plain_message(message) for message in messages]
        if not add_generation_prompt and (len(chat) < 2 or chat[-1]["role"] != "assistant"):
            raise BadInput("only an answer that has begun can be gone on with; give a message of the user before it")
        begun = "" if add_generation_prompt else chat.pop()["content"]
        try:
            rendered = render(self.tokenizer, chat, True)
        except BadInput:
            chat = [message for message in chat if message["role"] != "system"]
            rendered = render(self.tokenizer, chat, True)
        self._chats[rendered + begun] = (chat, begun)
        return rendered + begun

    def pair(self, context: str, continuation: str) -> Prompt:
        """Split a context from its continuation by the tokens of both together.

        White space at the end of the context goes to the continuation: tokenizers put a space before a word into its token. Where
        a token still reaches over the cut, the cut is moved before it, so that the tokens read and scored are those of the text.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not kept:
            return self._unconditional(continuation)
        whole, alone = read_text(self.tokenizer, kept + continuation), read_text(self.tokenizer, kept)
        cut = common_start(whole.ids, alone.ids)
        follow = whole.ids[cut:]
        if not follow or not cut:
            raise BadInput(f"nothing to score after {context[-30:]!r}: the continuation is {continuation[:30]!r}")
        made = self._context(first_tokens(whole, cut), context, room=self.max_length + 1 - len(follow))
        return Prompt(made, follow, cut < len(alone.ids))

    def _unconditional(self, continuation: str) -> Prompt:
        follow = encode(self.tokenizer, continuation)
        follow = follow[1:] if follow[:1] == (self.prefix_id,) else follow
        if not follow:
            raise BadInput(f"nothing to score: the continuation is {continuation[:30]!r} and nothing is before it")
        return Prompt(Context(reading_of_ids(self.tokenizer, [self.prefix_id]), None, NOTHING_TO_HAND_OVER), follow)

    def context(self, text: str, *, room: int) -> Context:
        """Read a context that an answer of up to `max_length` - `room` tokens follows; its last `room` tokens if it is longer."""
        if not text.strip():
            return Context(reading_of_ids(self.tokenizer, [self.prefix_id]), None, NOTHING_TO_HAND_OVER)
        return self._context(read_text(self.tokenizer, text), text, room=room)

    def _context(self, reading: Reading, text: str, *, room: int) -> Context:
        if room < 1:
            raise BadInput(
                f"what is to follow a context leaves no room for it in {self.max_length} tokens; give a larger max_length"
            )
        is_cut, chat = len(reading) > room, self._chats.get(text)
        if is_cut:
            reading = reading_of_ids(self.tokenizer, reading.ids[-room:])
        if chat is not None:
            return Context(reading, None, CUT_CHAT) if is_cut else self._chat_context(reading, *chat)
        plain = text_of(reading)
        return Context(reading, plain or None, None if plain else NOTHING_TO_HAND_OVER)

    def _chat_context(self, reading: Reading, chat: list[dict[str, Any]], begun: str) -> Context:
        """Say in a chat's tokens where its messages are, so that another model reads them in its own template."""
        rendered = read_chat(self.tokenizer, chat, add_generation_prompt=True)
        length = min(len(rendered.stream), len(reading.stream))
        if rendered.stream[:length] != reading.stream[:length]:
            return Context(reading, None, OTHER_CHAT)
        end = len(reading.stream)
        contents = [(min(a, end), min(b, end)) for a, b in rendered.contents]
        if begun:  # the source has not read it: it becomes the target's tail
            contents.append((min(len(rendered.stream), end), end))
        return Context(replace(reading, contents=tuple(contents)), chat)

    def windows(self, text: str, stride: int) -> Iterator[Prompt]:
        """Cut a text into continuations of up to `stride` tokens, each after as much as the model reads before it.

        Each token is scored once; the first after a prefix token that stands there once. Contexts begin where windows of
        `max_length` scored tokens do, the last window as early as it may.
        """
        ids = encode(self.tokenizer, text)
        ids = ids[1:] if ids[:1] == (self.prefix_id,) else ids
        every, done = (self.prefix_id, *ids), 0
        while done < len(ids):
            stop = min(done + self.max_length, len(ids))
            begin = max(stop - self.max_length, 0)
            for cut in range(done + 1, stop + 1, stride):
                reading = reading_of_ids(self.tokenizer, every[begin:cut])
                plain = text_of(reading)
                context = Context(reading, plain or None, None if plain else NOTHING_TO_HAND_OVER)
                yield Prompt(context, every[cut : min(cut + stride, stop + 1)])
            done = stop


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first ids are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def text_of(reading: Reading) -> str:
    """Return the text between a reading's special tokens; half a character at an end is left out."""
    start, stop = reading.contents[0][0], reading.contents[-1][1]
    text = reading.stream[start:stop].decode(errors="ignore")
    return text if text.strip() else ""
