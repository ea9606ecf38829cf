"""What a request is sent with to a model's server: from which kept cache to go on, where contents are in both readings, its body.

Knows records and how a server renders chats. Does not know connections, nor what comes back. A kept cache that begins with a
translation is never gone on from by a third model: vLLM takes loaded tokens from the first on only, and a translation is not
translated again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvlingo.chat import marked_chats, plain_message, ranges_by_marks
from kvlingo.errors import BadInput
from kvlingo.serve.ledger import Ledger, Owner, Record, common
from kvlingo.serve.protocol import Away, Broken, Busy, Message, Request, Sampling, Unsupported
from kvlingo.serve.upstream import Upstream
from kvlingo.spelling import Span

REPREFILL_UP_TO = 512
"""`auto` passes no cache along to spare so many tokens or fewer, as the in-process engine's uncalibrated rule."""
ALIKE = 0.5
"""With one tokenizer and one template two readings share all ids of what they share of the text; below this part they don't."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """From which kept cache a request goes on.

    Fields:
        record: what it is of; None: from none.
        fresh: the hand-over is made by this request; else it was made by one before, and is gone on with.
        fallback: why none is passed along although one was to be, or None.
    """

    record: Record | None = None
    fresh: bool = False
    fallback: str | None = None


def choose_way(
    request: Request,
    text: str,
    tokens: int,
    owner: Owner,
    ledger: Ledger,
    sources: Mapping[str, str | None],
    now: float,
) -> Way:
    """Decide from which kept cache a request goes on.

    Args:
        text, tokens: the prompt as `plain_text`, and how many tokens it has.
        sources: the models that it might come from, and why each is no use; None where it is.
    """
    mode, target = request.dial.mode, request.model
    if mode == "reprefill":
        return Way()
    own, handed = (ledger.find(owner, target, kind, text, now) for kind in ("own", "handed"))
    found = [ledger.find(owner, name, "kept", text, now) for name, why in sources.items() if why is None]
    best = max((each for each in found if each is not None), key=lambda each: each.covered, default=None)
    covered = max(own.covered if own else 0, handed.covered if handed else 0)
    spared = (best.covered - covered) * tokens // max(1, len(text)) if best else 0
    if best is not None and spared > (0 if mode == "translate" else REPREFILL_UP_TO):
        return Way(best.record, fresh=True)
    if handed is not None and handed.covered > (own.covered if own else 0):
        return Way(handed.record.of)
    if mode != "translate":
        return Way()
    refused = next((why for why in sources.values() if why is not None), None)
    return Way(fallback=refused or f"no model with a translator to {target} has read more of this conversation")


def salt_of(secret: bytes, tenant: str) -> str:
    """Return whose a request is, for a server: equal for equal tenants, and nothing that anybody could guess."""
    return hmac.new(secret, b"kvlingo tenant\0" + tenant.encode(), hashlib.sha256).hexdigest()


def body_of(model: str, ids: Sequence[int], sampling: Sampling, wish: Json, salt: str) -> Json:
    """Return a request to /v1/completions. All that a server might have other defaults for is said."""
    body: Json = {
        "model": model,
        "prompt": list(ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.top_logprobs is not None:
        body["logprobs"] = sampling.top_logprobs
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if wish:
        body["kv_transfer_params"] = {"kvlingo": wish}
    return body | form_of(sampling)


def form_of(sampling: Sampling) -> Json:
    """Return what a request says of the form of its answer."""
    if sampling.json_schema is None:
        return {}
    return {"structured_outputs": {"json": sampling.json_schema}}


# --- contents, where two models read other ids -----------------------------------------------------------------------


def are_alike(record: Record, ids: Sequence[int], text: str) -> bool:
    """Tell whether a target reads a conversation with the ids of a source, as far as both have the same of it."""
    shared, covered = common(record.ids, array("q", ids)), common(record.text, text)
    return shared >= ALIKE * len(record.ids) * covered / len(record.text)


async def contents_for(
    record: Record, source: Upstream, request: Request, ids: Sequence[int], target: Upstream
) -> Json:
    """Return where contents are in the readings of source and target, as a connector takes it.

    Nothing for plain text, whose content is all of it. Raises `BadInput` where they can't be found.
    """
    if isinstance(request.prompt, str) or isinstance(record.prompt, str):
        return {}
    prompt, said = record.ids[: record.prompt_tokens].tolist(), record.ids[record.prompt_tokens : -1].tolist()
    try:
        theirs, mine, read = await asyncio.gather(
            ranges_of(source, record.model, record.prompt, record.tools, prompt),
            ranges_of(target, request.model, request.prompt, request.tools, ids),
            source.text_of(record.model, said) if said else asyncio.sleep(0, ""),
        )
    except (Away, Broken, Busy, Unsupported) as error:
        raise BadInput(f"where the messages are in it can't be found: {error}") from error
    start = theirs[1]
    answer = (start, start + len(read.rstrip("\N{REPLACEMENT CHARACTER}").encode()))
    return {"source_contents": [*theirs[0], answer], "target_contents": mine[0]}


async def ranges_of(
    server: Upstream, model: str, prompt: Sequence[Message], tools: Sequence[Message], ids: Sequence[int]
) -> tuple[list[Span], int]:
    """Return each message's bytes in what ids spell, and how many bytes that is."""
    rendered = await server.text_of(model, ids)
    chat = [plain_message(message) for message in prompt]
    ranges: list[Span] = []
    for marks, marked in marked_chats(chat):
        text: str | None = None
        with suppress(BadInput):  # the template reads contents
            text = await server.text_of(model, (await server.chat_ids(model, marked, tools))[0])
        ranges, exact = ranges_by_marks(chat, rendered, marks, text)
        if exact:
            break
    sizes = [(len(rendered[:start].encode()), len(rendered[:stop].encode())) for start, stop in ranges]
    return sizes, len(rendered.encode())
