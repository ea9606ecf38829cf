"""lm-evaluation-harness's `kvlingo` model type: a context goes through source → translate → target, and the target answers.

The only module that is made of lm-eval's classes; `harness` registers it by name. Knows requests in and answers out; what a
string becomes is `prompts`' business, what is done with it `contexts`'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lm_eval.api.model import LM

from kvlingo.chat import PLAIN_TEMPLATE, Message
from kvlingo.contexts import Ending, Scored, go_on, score
from kvlingo.errors import BadInput
from kvlingo.harness_arms import TRANSLATED, Cast, Dial, check_arm, load_cast, make_holder
from kvlingo.jobs import Where
from kvlingo.prompts import Prompt, Prompts
from kvlingo.translator import Translator

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION_OPTIONS = {"until", "do_sample", "temperature", "top_p", *LENGTHS}


class KVLingoLM(LM):
    """`--model kvlingo --model_args source=…,target=…,translator=…,arm=…`.

    Args:
        source, target: hub ids, folders or .gguf files; those that the translator remembers if not given.
        translator: what `kvlingo fit` wrote.
        arm: one of `harness_arms.ARMS`.
        sink, tail, native_layers: the dial of every hand-over.
        batch_size: contexts that are read, and continuations that are scored, side by side.
        max_length: tokens of a context with its continuation; what the models can read if not given.
        rolling_stride: how many tokens of a text are predicted on each hand-over (loglikelihood_rolling).
        cast, by: models and a translator that are loaded already.
    """

    def __init__(
        self,
        source: str | None = None,
        target: str | None = None,
        translator: str | None = None,
        arm: str = TRANSLATED,
        *,
        sink: int = 1,
        tail: int = 1,
        native_layers: int = 0,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        rolling_stride: int = 256,
        device: str | None = None,
        dtype: str | None = None,
        seed: int = 0,
        cast: Cast | None = None,
        by: Translator | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise BadInput(f"model_args has no {sorted(unknown)[0]!r}; see kvlingo.harness_model.KVLingoLM")
        self.arm, self.dial = check_arm(arm), Dial(sink, tail, native_layers)
        self.batch_size, self.rolling_stride = read_batch_size(batch_size, max_batch_size), rolling_stride
        folder = None if translator is None else Path(translator)
        self.cast = cast or load_cast(self.arm, source, target, folder, Where(device, dtype))
        self.holder = make_holder(self.arm, self.cast, self.dial, by)
        self.answerer, self.max_length = self.holder.lm, max_length or self.cast.max_length
        self.tokenizer, self.max_gen_toks, self.seed = self.answerer.tokenizer, max_gen_toks, seed
        self.prompts, self.merged, self._progress = Prompts(self.tokenizer, self.max_length), 0, progress
        self._device = self.answerer.device

    # --- what the harness asks ---

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is what greedy decoding says."""
        prompts = [self.prompts.pair(*request.args) for request in requests]
        self.merged += sum(prompt.is_merged for prompt in prompts)
        answers = [(-one.nats, one.is_likeliest) for one in self._scored(prompts)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text: every `rolling_stride` tokens on a hand-over of what is before them."""
        found = []
        for request in requests:
            (text,) = request.args
            windows = list(self.prompts.windows(text, self.rolling_stride))
            found.append(-sum(one.nats for one in self._scored(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer each context up to where its task says that an answer ends."""
        found = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(place)
        done = 0
        for places in alike.values():
            ending = self._ending(requests[places[0]].args[1])
            room = self.max_length - ending.max_tokens
            for part in slices(places, self.batch_size):
                contexts = [self.prompts.context(requests[place].args[0], room=room) for place in part]
                said = go_on(self.answerer, self.holder.hold(contexts), ending)
                for place, text in zip(part, said, strict=True):
                    found[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
                done += len(part)
                self._tell("answering", done, len(requests))
        return found

    # --- chats ---

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat for the model that answers; another model will read the same messages in its own template."""
        messages: list[Message] = list(chat_history)
        return self.prompts.render(messages, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template that chats are rendered with, for the harness's record."""
        if isinstance(chat_template, str):
            raise BadInput(
                f"the chat template can't be chosen by name, got {chat_template!r}; the tokenizer's own is used"
            )
        return str(self.tokenizer.chat_template or PLAIN_TEMPLATE) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Return what the harness keys rendered requests by."""
        return f"kvlingo-{self.answerer.tokenizer_hash[:16]}"

    # --- what stands behind the figures ---

    def get_model_info(self) -> dict[str, Any]:
        """Return who took part and how contexts came to be held, for the harness's record."""
        cast = self.cast
        return {
            "kvlingo": {
                "arm": self.arm,
                "source": None if cast.source is None else cast.source.name,
                "target": None if cast.target is None else cast.target.name,
                "sink": self.dial.sink,
                "tail": self.dial.tail,
                "native_layers": self.dial.native_layers,
                "max_length": self.max_length,
                "moved_cuts": self.merged,
                **self.holder.tally.to_json(),
            }
        }

    # --- scoring ---

    def _scored(self, prompts: Sequence[Prompt]) -> list[Scored]:
        """Score all prompts; what is held of a context is made once for all that follows it."""
        of_context: dict[Any, list[int]] = {}
        for place, prompt in enumerate(prompts):
            of_context.setdefault(prompt.context.reading.ids, []).append(place)
        found: dict[int, Scored] = {}
        for group in slices(list(of_context.values()), self.batch_size):
            held = self.holder.hold([prompts[places[0]].context for places in group])
            asked = [(place, one) for places, one in zip(group, held, strict=True) for place in places]
            for part in slices(asked, self.batch_size):
                scored = score(self.answerer, [(one, prompts[place].follow) for place, one in part])
                found |= {place: each for (place, _), each in zip(part, scored, strict=True)}
            self._tell("scoring", len(found), len(prompts))
        return [found[place] for place in range(len(prompts))]

    def _ending(self, options: Mapping[str, Any]) -> Ending:
        """Read a task's generation options. Raises `BadInput` for one that is not known: it would be ignored."""
        unknown = sorted(set(options) - GENERATION_OPTIONS)
        if unknown:
            raise BadInput(
                f"the task asks to generate with {unknown[0]!r}, which kvlingo does not do; leave the task out"
            )
        until = options.get("until") or []
        tokens = next((options[name] for name in LENGTHS if options.get(name) is not None), self.max_gen_toks)
        is_drawn = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        return Ending(
            max_tokens=int(tokens),
            until=(until,) if isinstance(until, str) else tuple(until),
            temperature=float(options.get("temperature", 1.0)) if is_drawn else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            seed=self.seed,
        )

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(f"{self.arm}: {what}", done, total)


def read_batch_size(batch_size: int | str, largest: int | None) -> int:
    """Return a fixed batch size; the harness's `auto` is refused."""
    try:
        found = int(batch_size)
    except ValueError:
        found = 0
    if found < 1 or (largest is not None and found > int(largest)):
        raise BadInput(f"batch_size is {batch_size!r}; give a number from 1 on, no larger than max_batch_size")
    return found


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in parts of up to `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
