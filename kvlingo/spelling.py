"""How a tokenizer's ids spell bytes.

Knows the decoders of byte-level and sentencepiece-like tokenizers, and verifies on probe texts that ids spell what was
read. Does not know chats, models or a second tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from kvlingo.correspondence import SPACE, canonical
from kvlingo.errors import BadInput, UnsupportedModel

Span = tuple[int, int]

PROBES = (
    "The quick brown fox jumps over 13 lazy dogs, isn't it? 1234567890",
    " leading, double  and trailing spaces  ",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}\n\n\n# done\r\n",
    "na\u00efve caf\u00e9 \u2013 \u201cquoted\u201d \u20ac",
    "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f469\u200d\U0001f467!",
)
"""Texts on which a tokenizer's bytes are verified and two tokenizers are compared."""


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of a text alone: no special tokens are added and nothing is cut."""
    if not isinstance(text, str):
        raise BadInput(f"expected text, got {type(text).__name__}; decode bytes first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"the text holds a lone surrogate at character {error.start}; decode it with errors='replace'"
        ) from error
    if not text:
        return ()
    whole = {"truncation": False, "padding": False, "verbose": False}
    return tuple(tokenizer(text, add_special_tokens=False, **whole)["input_ids"])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of the byte-level alphabet.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in
    order (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _spell_byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in piece)
    except KeyError:
        return piece.encode()


def _spell_sentencepiece(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()


def _spell_with_fallback(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else _spell_sentencepiece(piece)


class Spelling:
    """How one tokenizer's ids spell bytes. Spelled ids are kept: each is looked up once.

    Fields:
        dummy_space: whether the tokenizer puts a space before a text; found by `_verified`.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self._backend = backend_of(tokenizer)
        self._spell_piece = _piece_speller(json.loads(self._backend.to_str()))
        self._special = {i for i, token in added.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._spelled = {i: (token.content or "").encode() for i, token in added.items()}
        self._unknown: set[int] = set()
        self.dummy_space = False

    def spell(self, ids: Sequence[int]) -> tuple[bytes, tuple[Span, ...]]:
        """Return the bytes of all ids together, and each one's span in them."""
        for token in set(ids) - self._spelled.keys():
            piece = self._backend.id_to_token(token)
            if piece is None:
                self._unknown.add(token)
            self._spelled[token] = b"" if piece is None else self._spell_piece(piece)
        texts = [self._spelled[token] for token in ids]
        stops = list(accumulate(map(len, texts)))
        return b"".join(texts), tuple(zip([0, *stops], stops, strict=False))

    def is_special(self, token: int) -> bool:
        """Tell whether a spelled id is a special token, or none that the tokenizer knows."""
        return token in self._special or token in self._unknown


_spellings: WeakKeyDictionary[Any, tuple[int, Spelling]] = WeakKeyDictionary()


def spelling_of(tokenizer: Any) -> Spelling:
    """Return the tokenizer's spelling, verified once; anew when tokens have been added since."""
    backend_of(tokenizer)
    size, spelling = _spellings.get(tokenizer, (-1, None))
    if spelling is None or size != len(tokenizer):
        spelling = _verified(tokenizer, Spelling(tokenizer))
        _spellings[tokenizer] = (len(tokenizer), spelling)
    return spelling


def backend_of(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` behind a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(
            f"{type(tokenizer).__name__} has no tokenizer.json behind it, so its ids can't be "
            "spelled as bytes; convert it to a fast tokenizer"
        )
    return backend


def _parts(component: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Flatten nested sequences of decoders or pre-tokenizers."""
    if component is None:
        return
    nested = component.get("decoders") or component.get("pretokenizers")
    if nested is None:
        yield component
        return
    for part in nested:
        yield from _parts(part)


def _piece_speller(backend: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Choose how pieces spell bytes from the tokenizer's decoder, else its pre-tokenizer."""
    parts = list(_parts(backend.get("decoder") or backend.get("pre_tokenizer")))
    kinds = {part["type"] for part in parts}
    spaced = any(p["type"] == "Replace" and p["pattern"] == {"String": SPACE} for p in parts)
    if "ByteLevel" in kinds:
        return _spell_byte_level
    if "ByteFallback" in kinds:
        return _spell_with_fallback
    if "Metaspace" in kinds or spaced:
        return _spell_sentencepiece
    raise UnsupportedModel(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor "
        "sentencepiece-like, so its ids can't be spelled as bytes; use a model with another one"
    )


def _verified(tokenizer: Any, spelling: Spelling) -> Spelling:
    """Check on probe texts that ids spell the text they came from, and look for a dummy space.

    The tokenizer may normalise and change white space. Probes that need the unknown token say
    nothing, at least one must do without.
    """
    checked = 0
    for probe in PROBES:
        ids = encode(tokenizer, probe)
        if tokenizer.unk_token_id in ids:
            continue
        wanted, got = (canonical(text)[0] for text in (probe.encode(), spelling.spell(ids)[0]))
        spelling.dummy_space |= got[:1] == " " != wanted[:1]
        if got.split() != wanted.split():
            raise UnsupportedModel(
                f"the tokenizer's ids spell {got[:32]!r} where it read {wanted[:32]!r}, so they "
                "can't be aligned; use a model whose tokenizer keeps its text"
            )
        checked += 1
    if not checked:
        raise UnsupportedModel(
            "the tokenizer needs its unknown token for every probe text, so its ids can't be "
            "verified; use a model with another tokenizer"
        )
    return spelling
