"""The form that an answer must have: which tokens a JSON schema allows next.

The only module that knows llguidance, an extra. Knows one tokenizer's bytes. Does not know sampling or requests. What the library
does not force is refused: an answer that is said to keep to a schema keeps to all of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvlingo.generation import end_ids
from kvlingo.language_model import LanguageModel
from kvlingo.serve.protocol import Unsupported
from kvlingo.spelling import encode, spelling_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

FIELD = "response_format"
SPACES = r"[ \n\t]{0,12}"
"""White space between two parts of JSON: bounded, else a model could pad to the end of its answer."""
LEAST_INTEGER, LARGEST_INTEGER = -(2**62), 2**63 - 1
MOST_OPTIONAL = 400
OPTIONS: JsonCompileOptions = {"whitespace_pattern": SPACES, "lenient": False, "coerce_one_of": False}
"""Stronger than what a schema itself may ask of the library in `x-guidance`: nothing is let go unforced."""


class Form:
    """One answer's place in its form. Each row of a batch has its own."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """Return which tokens may come next: bool [vocabulary]; where the form is full, only those that end an answer."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (words[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[: self._vocabulary].bool()
        self._see()
        return allowed

    def take(self, token: int) -> None:
        """Take in the token that was chosen."""
        self._matcher.consume_token(token)
        self._see()

    def _see(self) -> None:
        if self._matcher.is_error():
            raise Unsupported(FIELD, f"the form can't be kept to: {_line(self._matcher.get_error())}")


def form_of(schema: str, lm: LanguageModel) -> Form:
    """Return the form of a JSON schema for one answer. Raises `Unsupported` for what can't be forced, or without the library.

    Takes up to a second for a large schema or a model's first: not where a model decodes.
    """
    if find_spec("llguidance") is None:
        raise Unsupported(FIELD, "it needs llguidance here (pip install 'kvlingo[json]')")
    from llguidance import LLMatcher

    if not any(i < len(lm.tokenizer) for i in end_ids(lm)):
        raise Unsupported(FIELD, "the model has no token that ends an answer")
    try:
        _refuse_unforcible(schema)
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unsupported(FIELD, f"the schema can't be read: {_line(error)}") from error
    tokenizer = _tokenizer_of(lm)
    failed, told = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if failed or told:
        raise Unsupported(FIELD, f"the schema can't be forced: {_line(told[0])}")
    return Form(LLMatcher(tokenizer, grammar, log_level=0), len(lm.tokenizer))


def _refuse_unforcible(schema: str) -> None:
    """Raise `Unsupported` for what the library takes and then breaks at.

    Wider integers are cut without a word, and those near the least of 64 bits end the whole process; an object of too many
    optional properties fails at its first one.
    """

    def seen(text: str) -> int:
        number = int(text)
        if not LEAST_INTEGER <= number <= LARGEST_INTEGER:
            raise Unsupported(FIELD, f"the schema has the integer {text[:40]}, which can't be forced")
        return number

    waiting: list[Any] = [json.loads(schema, parse_int=seen)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            optional = _optional(part)
            if optional > MOST_OPTIONAL:
                raise Unsupported(FIELD, f"an object has {optional} optional properties, {MOST_OPTIONAL} can be forced")
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _optional(schema: dict[str, Any]) -> int:
    """Return how many properties an object of this schema may lack."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    return len(set(properties) - set(required if isinstance(required, list) else ()))


_tokenizers: WeakKeyDictionary[Any, tuple[int, LLTokenizer]] = WeakKeyDictionary()


def _tokenizer_of(lm: LanguageModel) -> LLTokenizer:
    """Return the library's view of a tokenizer, made once; anew when tokens have been added since."""
    size, made = _tokenizers.get(lm.tokenizer, (-1, None))
    if made is None or size != len(lm.tokenizer):
        from llguidance import LLTokenizer, TokenizerWrapper

        spelled = _Spelled(lm)
        made = LLTokenizer(TokenizerWrapper(spelled), n_vocab=len(spelled.tokens), eos_token=spelled.ends)
        _tokenizers[lm.tokenizer] = (len(lm.tokenizer), made)
    return made


class _Spelled:
    """A tokenizer as the library takes it, spelled as everywhere here."""

    def __init__(self, lm: LanguageModel) -> None:
        tokenizer, spelling = lm.tokenizer, spelling_of(lm.tokenizer)
        ids = range(len(tokenizer))
        stream, spans = spelling.spell(ids)
        self.tokens = [stream[start:stop] for start, stop in spans]
        self.ends = sorted(i for i in end_ids(lm) if i < len(tokenizer))
        self.special_token_ids = [i for i in ids if spelling.is_special(i) or i in self.ends]
        self.eos_token_id, self.bos_token_id = self.ends[0] if self.ends else None, tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Tokenise."""
        return list(encode(self._tokenizer, text if isinstance(text, str) else text.decode(errors="replace")))


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
