"""Passkeys: a code of six digits hidden in held-out text at several depths and lengths, asked for at the end, by every arm.

    python -m bench.passkey --direction smollm2-gemma --work DIR --smollm2 MODEL --gemma MODEL --cache DIR --out results/NAME.json

`--work` is what `bench.quality` made: ridge, distilled and the controls are arms of the same run. JSON on the last line of
stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.corpora import held_out_and_training
from bench.quality import DIRECTIONS, finish, made, models, tell
from kvlingo.drift import piece_words
from kvlingo.environment import environment_card
from kvlingo.evaluation import Arms, EvaluationOptions
from kvlingo.language_model import LanguageModel
from kvlingo.models import default_cache_dir
from kvlingo.questions import Question, ask, summarise, table
from kvlingo.texts import Document

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (192, 512, 1024)
ASKED = "\n\nThe secret code is"

Pair = tuple[LanguageModel, LanguageModel]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=DIRECTIONS, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma", type=Path)
    parser.add_argument("--sibling", type=Path)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--codes", type=int, default=6, help="in each cell of length and depth")
    parser.add_argument("--tail", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def hide_codes(
    documents: Sequence[Document], target: LanguageModel, lengths: Sequence[int], codes: int, seed: int
) -> list[Question]:
    """Hide codes at every depth of every length, each in a text of its own."""
    rng = random.Random(seed)
    usable = [d for d in documents if len(d.text) > 8 * max(lengths)]
    found: list[Question] = []
    for length in lengths:
        for depth in DEPTHS:
            for _ in range(codes):
                found.append(hide_code(rng.choice(usable), target, length, depth, rng))
    return found


def hide_code(document: Document, target: LanguageModel, length: int, depth: float, rng: random.Random) -> Question:
    """Hide one code at a depth (0: the beginning) of a piece of text, about `length` tokens of the target in all."""
    code = "".join(rng.choice("0123456789") for _ in range(6))
    hidden = f"The secret code is {code}. Remember it: the secret code is {code}."
    taken = len(target.tokenizer(hidden + ASKED, add_special_tokens=False)["input_ids"])
    words = document.text.split()
    begin = rng.randrange(max(1, len(words) - 2 * length))
    count = piece_words(words[begin:], target, max(8, length - taken)) or len(words) - begin
    piece = words[begin : begin + count]
    place = round(depth * len(piece))
    text = " ".join([*piece[:place], hidden, *piece[place:]])
    return Question(f"{length} tokens, depth {depth:g}", document.cluster, text + ASKED, (f" {code}",))


def ask_all(arguments: argparse.Namespace, questions: Sequence[Question], pair: Pair, what: str) -> dict[str, Any]:
    """Ask questions of all arms and show their table; return what every such record holds."""
    source, target = pair
    translator, controls = made(arguments.work)
    arms = Arms(source, target, translator, controls, EvaluationOptions(tail=arguments.tail, seed=arguments.seed))
    only = {*arms.translators, "tail_only", "no_context"}
    asked = []
    for number, question in enumerate(questions):
        each = ask(arms, question, only)
        asked += [each] if each is not None else []
        tell(what, number + 1, len(questions))
    summary = summarise(asked, seed=arguments.seed)
    for line in table(summary):
        print(line, file=sys.stderr)
    return {
        "pair": {"source": source.name, "target": target.name},
        "left_out": len(questions) - len(asked),
        **summary,
        "environment": environment_card(),
    }


def main() -> None:
    """Ask all codes of all arms."""
    arguments = parse()
    pair = models(arguments, "float32")
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    lengths = tuple(map(int, arguments.lengths.split(",")))
    questions = hide_codes(documents, pair[1], lengths, arguments.codes, arguments.seed)
    options = {"lengths": lengths, "depths": DEPTHS, "codes": arguments.codes, "tail": arguments.tail}
    record = {**ask_all(arguments, questions, pair, "asking for codes"), "options": options}
    finish(arguments, json.loads(json.dumps(record, allow_nan=False)))


if __name__ == "__main__":
    main()
