"""A conversation as its model reads it: rendered by a chat template, with the place of every message's content.

Knows chat templates and text. Does not know ids or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo.errors import BadInput
from kvlingo.spelling import Span

Message = Mapping[str, Any]

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + '\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"
)
"""Chat template for tokenizers without one: a heading per message, contents verbatim."""


def plain_message(message: Message) -> dict[str, Any]:
    """Return the message with its content as a string: None is empty, text parts are joined."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadInput("a chat message must be a mapping with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(map(_text_part, content))
    elif content is not None and not isinstance(content, str):
        content = _text_part(content)
    return {**message, "content": content or ""}


def _text_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadInput("a message holds something else than text; give text or a list of text parts")
    return text


def ignored(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
    """Say what the tokenizer's template leaves out of a chat: `tools`, or `tool_calls` or `name` of its messages; None: nothing.

    The chat is rendered with and without them: a template that has no place for them writes the same text. Which call a tool's
    message answers (`tool_call_id`) is told by its place where a template does not write it.
    """
    chat = [plain_message(message) for message in messages]
    there = [field for field in ("tool_calls", "name") if any(field in message for message in chat)]
    if not tools and not there:
        return None
    rendered = render(tokenizer, chat, True, tools)
    if tools and rendered == render(tokenizer, chat, True):
        return "tools"
    for field in there:
        silent = [{name: value for name, value in message.items() if name != field} for message in chat]
        if rendered == render(tokenizer, silent, True, tools):
            return field
    return None


def writes_tool_call_tags(tokenizer: Any) -> bool:
    """Tell whether the template writes calls as JSON between `<tool_call>` tags, as Hermes and Qwen do."""
    template = str(tokenizer.chat_template or "")
    return "<tool_call>" in template and "</tool_call>" in template


def render(
    tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Sequence[Message] = ()
) -> str:
    """Render messages with the tokenizer's template, or the plain one; raise `BadInput` where it refuses them."""
    if not messages:
        raise BadInput("the conversation is empty; give at least one message")
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )
    except Exception as error:  # a template is a foreign program: it raises what it likes
        raise BadInput(f"the chat template refuses these messages: {_one_line(error)}") from error


def content_ranges(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    rendered: str,
    add_generation_prompt: bool,
    tools: Sequence[Message] = (),
) -> list[Span]:
    """Find each message's content in the rendered chat.

    The template is rendered once more with marks for contents: what stands between two marks is the
    template's own text, so that a content is found by its place and not by a search that "user"
    could lead astray.
    """
    ranges: list[Span] = []
    for marks, marked in marked_chats(messages):
        try:
            text = render(tokenizer, marked, add_generation_prompt, tools)
        except BadInput:  # the template reads contents
            text = None
        ranges, exact = ranges_by_marks(messages, rendered, marks, text)
        if exact:
            break
    return ranges


Marks = dict[int, str]


def marked_chats(messages: Sequence[Message]) -> list[tuple[Marks, list[dict[str, Any]]]]:
    """Return the chats to render for `ranges_by_marks`, the likelier first, and the marks that stand for contents in each."""
    blank = {i for i, message in enumerate(messages) if not message["content"].strip()}
    chats = []
    for unmarked in (set[int](), blank):  # a template may leave blank messages out
        marks = {i: f"\ue000{i}\ue001" for i in range(len(messages)) if i not in unmarked}
        chats.append((marks, [{**m, "content": marks.get(i, m["content"])} for i, m in enumerate(messages)]))
    return chats


def ranges_by_marks(
    messages: Sequence[Message], rendered: str, marks: Marks, marked: str | None
) -> tuple[list[Span], bool]:
    """Return each content's characters in a rendered chat, and whether they fit the template's text exactly.

    `marked`: the chat rendered with marks; where that can't be, contents are searched for in order.
    """
    skeleton = _Skeleton(list(marks), [""] * (len(marks) + 1)) if marked is None else _Skeleton.cut(marked, marks)
    return _walk(rendered, skeleton, [message["content"] for message in messages])


@dataclass(frozen=True)
class _Skeleton:
    """A rendered chat without contents: which ones it holds, and the text around them."""

    found: list[int]
    literals: list[str]

    @classmethod
    def cut(cls, marked: str, marks: Mapping[int, str]) -> _Skeleton:
        """Cut a chat rendered with marks at the marks; dropped ones are not found."""
        found: list[int] = []
        literals: list[str] = []
        cursor = 0
        for index, mark in marks.items():
            place = marked.find(mark, cursor)
            if place >= 0:
                found.append(index)
                literals.append(marked[cursor:place])
                cursor = place + len(mark)
        return cls(found, [*literals, marked[cursor:]])


def _walk(rendered: str, skeleton: _Skeleton, contents: list[str]) -> tuple[list[Span], bool]:
    """Return each content's characters in the chat, and whether the skeleton fits exactly.

    A content that is not there is empty and stands where the one before it ends.
    """
    placed: dict[int, Span] = {}
    stop, exact = 0, True
    for index, before, after in zip(skeleton.found, skeleton.literals, skeleton.literals[1:], strict=False):
        start, found = _content_start(rendered, stop, before)
        stop, fits = _content_stop(rendered, start, contents[index], after)
        exact &= found and fits
        placed[index] = _kept(rendered, start, stop, contents[index])
    ranges: list[Span] = []
    for index in range(len(contents)):
        last = ranges[-1][1] if ranges else 0
        ranges.append(placed.get(index, (last, last)))
    return ranges, exact and rendered[stop:] == skeleton.literals[-1]


def _content_start(rendered: str, stop: int, before: str) -> tuple[int, bool]:
    """Return where the template text from `stop` on ends, and whether it is as expected."""
    if rendered.startswith(before, stop):
        return stop + len(before), True
    found = _search(rendered, before, stop, tail=True)
    return found[1] if found else stop, False


def _content_stop(rendered: str, start: int, content: str, after: str) -> tuple[int, bool]:
    """Return where the content from `start` on stops, and whether it is verbatim or stripped.

    Else the template rewrote it: it stops where the template's next text begins.
    """
    for candidate in (content, content.rstrip(), content.lstrip(), content.strip()):
        stop = start + len(candidate)
        if rendered.startswith(candidate, start) and rendered.startswith(after, stop):
            return stop, True
    found = _search(rendered, after, start, tail=False)
    if found is None:
        place = rendered.find(content.strip(), start)
        return (place + len(content.strip()) if place >= 0 else start), False
    return found[0], False


def _search(rendered: str, literal: str, start: int, *, tail: bool) -> Span | None:
    """Find template text from `start` on, or the largest half, quarter, … of its tail (or head)."""
    size = len(literal)
    while size:
        piece = literal[-size:] if tail else literal[:size]
        place = rendered.find(piece, start) if piece.strip() else -1
        if place >= 0:
            return place, place + size
        size //= 2
    return None


def _kept(rendered: str, start: int, stop: int, content: str) -> Span:
    """Narrow a range to the content where template text that depends on it got in."""
    place = rendered.find(content.strip(), start, stop)
    if rendered[start:stop].strip() == content.strip() or place < 0:
        return start, stop
    return place, place + len(content.strip())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
