"""Relatives of a model that share its tokenizer: a smaller sibling, and one that was tuned on one kind of text.

    python -m bench.sibling shrink --out DIR --minutes 60 [--layers 15]
    python -m bench.sibling tune   --out DIR --minutes 15 [--kind perl-manual]

`shrink` drops layers of SmolLM2-135M-Instruct, evenly, and heals what is left by distillation from the whole model on the
training texts of `bench.corpora`. `tune` trains low-rank changes of its weights on one kind of these texts, and merges them. Both
are seeded, keep checkpoints and go on from them, and save an ordinary transformers folder with its tokenizer. A folder that is
there is kept. JSON on the last line of stdout: the curve.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bench.corpora import held_out_and_training
from kvlingo.assets import fetch_demo_models
from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel, decoder_layers
from kvlingo.metrics import kl_nats, nll_nats
from kvlingo.models import default_cache_dir, load_model, quiet_loading
from kvlingo.probing import decoder_of
from kvlingo.stats import load_tensors, save_tensors
from kvlingo.texts import Document

CHECKPOINT_EVERY_SECONDS = 120.0
CHECKPOINT = "training.safetensors"
Loss = Callable[[Any, Tensor], Tensor]
"""From a model and token ids [tokens]: nats by token [tokens - 1]."""


@dataclass(frozen=True)
class Training:
    """How long and how to train; stop at `steps` or `minutes`, whichever comes first."""

    minutes: float | None = 60.0
    steps: int | None = None
    batch: int = 8
    tokens: int = 256
    learning_rate: float = 5e-4
    warmup_share: float = 0.03
    clip: float = 1.0
    judge_every: int = 50
    judged: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise BadInput("training needs an end: give --minutes or --steps")


# --- fewer layers ----------------------------------------------------------------------------------------------------


def spread(layers: int, kept: int) -> tuple[int, ...]:
    """Return which of `layers` are kept: the first, the last, and evenly what lies between."""
    if not 2 <= kept <= layers:
        raise BadInput(f"{kept} layers of {layers} can't be kept; give a number from 2 to {layers}")
    return tuple(round(i * (layers - 1) / (kept - 1)) for i in range(kept))


def with_layers(model: Any, kept: Sequence[int]) -> Any:
    """Return a copy of a model that has only some of its layers, in their order; all weights are its own."""
    layers = decoder_layers(decoder_of(model))[1]
    (path,) = (name for name, module in model.named_modules() if module is layers)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    for name, value in list(vars(config).items()):  # what is said layer by layer
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, [value[i] for i in kept])
    new_place = {f"{path}.{old}.": f"{path}.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, value in model.state_dict().items():
        old = next((start for start in new_place if name.startswith(start)), None)
        if old is not None:
            weights[new_place[old] + name.removeprefix(old)] = value.clone()
        elif not name.startswith(f"{path}."):
            weights[name] = value.clone()
    small = type(model)(config).to(model.dtype)
    small.load_state_dict(weights)
    small.tie_weights()
    return small.eval()


# --- low-rank changes ------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A weight and a change of low rank: W + scale · B A; B starts at zero."""

    def __init__(self, weight: Tensor, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.a = nn.Parameter(first.to(weight))
        self.b = nn.Parameter(torch.zeros(rows, rank).to(weight))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """[rows, columns] -> [rows, columns]."""
        return weight + self.scale * (self.b @ self.a)


def add_low_rank(model: Any, rank: int, scale: float, seed: int) -> list[nn.Module]:
    """Give every linear map inside the model's layers a low-rank change to train; return those that have one."""
    changed: list[nn.Module] = []
    for module in decoder_layers(decoder_of(model))[1].modules():
        if isinstance(module, nn.Linear):
            change = LowRank(module.weight, rank, scale, seed + len(changed))
            parametrize.register_parametrization(module, "weight", change)
            changed.append(module)
    return changed


def merge(changed: Sequence[nn.Module]) -> None:
    """Put the changes into the weights."""
    for module in changed:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


# --- training --------------------------------------------------------------------------------------------------------


def pieces(documents: Sequence[Document], tokenizer: Any, tokens: int, count: int, seed: str) -> list[Tensor]:
    """Draw pieces of `tokens` tokens from random places, documents by their length; the same seed draws the same."""
    rng, weights = random.Random(seed), [len(d.text) for d in documents]
    found: list[Tensor] = []
    for _ in range(count * 50):
        if len(found) == count:
            return found
        text = rng.choices(documents, weights)[0].text
        start = rng.randrange(max(1, len(text) - 4 * tokens))
        ids = tokenizer(text[start : start + 12 * tokens])["input_ids"][:tokens]
        if len(ids) == tokens:
            found.append(torch.tensor(ids, dtype=torch.long))
    if len(found) < count:
        raise BadInput(f"the texts are too short: no piece of {tokens} tokens; give longer texts or fewer --tokens")
    return found


def all_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the predictions after each token: [tokens, vocabulary]."""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def from_teacher(teacher: Any) -> Loss:
    """Return KL(teacher ‖ model) by token."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = all_logits(teacher, ids)[:-1].float()
        return kl_nats(wanted, all_logits(model, ids)[:-1].float())

    return loss


def next_token(model: Any, ids: Tensor) -> Tensor:
    """Return how much each token surprised."""
    return nll_nats(all_logits(model, ids)[:-1].float(), ids[1:])


class Run:
    """One training: its state, its steps, its checkpoint."""

    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        tokenizer: Any,
        loss: Loss,
        texts: Sequence[Document],
        held_out: Sequence[Document],
        options: Training,
        file: Path,
    ) -> None:
        self.model, self.parameters, self.tokenizer, self.loss = model, list(parameters), tokenizer, loss
        self.texts, self.options, self.file = list(texts), options, file
        self.judged = pieces(list(held_out), tokenizer, options.tokens, options.judged, f"held-out-{options.seed}")
        self.optimizer = torch.optim.AdamW(self.parameters, lr=options.learning_rate, weight_decay=0.0)
        self.step, self.seconds = 0, 0.0
        self.curve: dict[str, list[Any]] = {"steps": [], "loss_nats": [], "judged_steps": [], "held_out_nats": []}

    def train(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Run to the end of the options' bounds; return the curve."""
        self.restore()
        started, saved = time.monotonic() - self.seconds, time.monotonic()
        if not self.curve["judged_steps"]:
            self.judge(tell)
        try:
            while self.progress() < 1:
                self.one_step()
                self.seconds = time.monotonic() - started
                if self.step % self.options.judge_every == 0:
                    self.judge(tell)
                if time.monotonic() - saved > CHECKPOINT_EVERY_SECONDS:
                    self.checkpoint()
                    saved = time.monotonic()
        except BaseException:
            self.checkpoint()
            raise
        if self.curve["judged_steps"][-1] != self.step:
            self.judge(tell)
        return {"steps": self.step, "seconds": round(self.seconds, 1), **self.curve}

    def progress(self) -> float:
        """Return how much of the run is done, from 0 on."""
        options = self.options
        by_time = self.seconds / (60 * options.minutes) if options.minutes else 0.0
        return max(self.step / options.steps if options.steps else 0.0, by_time)

    def rate(self) -> float:
        """Return the learning rate now: linear warm-up, then cosine to 0."""
        done, warm = min(self.progress(), 1.0), self.options.warmup_share
        share = done / warm + 1e-2 if done < warm else 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))
        return self.options.learning_rate * share

    def one_step(self) -> None:
        """Accumulate one batch and move once."""
        total, options = 0.0, self.options
        for ids in pieces(self.texts, self.tokenizer, options.tokens, options.batch, f"{options.seed}-{self.step}"):
            loss = self.loss(self.model, ids).mean()
            (loss / options.batch).backward()
            total += float(loss.detach()) / options.batch
        nn.utils.clip_grad_norm_(self.parameters, options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.curve["steps"].append(self.step)
        self.curve["loss_nats"].append(round(total, 5))

    @torch.no_grad()
    def judge(self, tell: Callable[[str], None]) -> None:
        """Measure the loss on held-out text."""
        nats = sum(float(self.loss(self.model, ids).mean()) for ids in self.judged) / len(self.judged)
        self.curve["judged_steps"].append(self.step)
        self.curve["held_out_nats"].append(round(nats, 5))
        tell(f"step {self.step}, {self.seconds:.0f} s: held-out loss {nats:.4f} nats")

    def checkpoint(self) -> None:
        """Write all state, whole or not at all."""
        tensors = {f"weight.{i}": p.detach() for i, p in enumerate(self.parameters)}
        for i, parameter in enumerate(self.parameters):
            tensors |= {f"{k}.{i}": v for k, v in self.optimizer.state.get(parameter, {}).items()}
        note = {"options": self._kept(), "step": self.step, "seconds": self.seconds, "curve": self.curve}
        save_tensors(self.file, {k: v.clone() for k, v in tensors.items()}, note)

    def restore(self) -> None:
        """Go on from a checkpoint of the same training; its bounds may differ."""
        loaded = load_tensors(self.file)
        if (
            loaded is None
            or loaded[1]["options"] != self._kept()
            or f"weight.{len(self.parameters) - 1}" not in loaded[0]
        ):
            return
        tensors, note = loaded
        for i, parameter in enumerate(self.parameters):
            parameter.data.copy_(tensors[f"weight.{i}"])
            names = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {k: tensors[f"{k}.{i}"] for k in names if f"{k}.{i}" in tensors}
        self.step, self.seconds, self.curve = note["step"], note["seconds"], note["curve"]

    def _kept(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self.options).items() if k not in ("minutes", "steps")}


# --- the two relatives -----------------------------------------------------------------------------------------------


def shrink(
    lm: LanguageModel,
    kept: int,
    training: Sequence[Document],
    held_out: Sequence[Document],
    options: Training,
    work: Path,
    tell: Callable[[str], None],
) -> tuple[Any, dict[str, Any]]:
    """Drop layers and heal what is left; return the small model and the record."""
    places = spread(len(decoder_layers(decoder_of(lm.model))[1]), kept)
    small = with_layers(lm.model, places).float()
    small.requires_grad_(False)
    parameters = list(decoder_layers(decoder_of(small))[1].parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    run = Run(small, parameters, lm.tokenizer, from_teacher(lm.model), training, held_out, options, work / CHECKPOINT)
    return small, {"kept_layers": list(places), **run.train(tell)}


def tune(
    lm: LanguageModel,
    rank: int,
    training: Sequence[Document],
    held_out: Sequence[Document],
    options: Training,
    work: Path,
    tell: Callable[[str], None],
) -> tuple[Any, dict[str, Any]]:
    """Train low-rank changes on some texts and merge them; return the tuned model and the record."""
    tuned = copy.deepcopy(lm.model).float()
    tuned.requires_grad_(False)
    changed = add_low_rank(tuned, rank, 2.0, options.seed)
    parameters = [p for module in changed for p in module.parametrizations.weight[0].parameters()]  # type: ignore[union-attr, index]
    run = Run(tuned, parameters, lm.tokenizer, next_token, training, held_out, options, work / CHECKPOINT)
    found = run.train(tell)
    merge(changed)
    return tuned, {"rank": rank, **found}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shrink", "tune"))
    parser.add_argument("--model", type=Path, help="a folder or .gguf; SmolLM2-135M-Instruct is fetched if not given")
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--out", type=Path, help="the cache's siblings/healed or siblings/tuned if not given")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--kind", default="perl-manual", help="of text, to tune on")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=Training.batch)
    parser.add_argument("--tokens", type=int, default=Training.tokens)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--judge-every", type=int, default=Training.judge_every)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16" if torch.cpu._is_amx_tile_supported() else "float32")
    parser.add_argument("--rebuild", action="store_true", help="make it anew where the folder is there")
    return parser.parse_args(arguments)


def make(arguments: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Make one relative and save it, unless it is there."""
    is_shrunk = arguments.what == "shrink"
    out = arguments.out or arguments.cache / "siblings" / ("healed" if is_shrunk else "tuned")
    if (out / "sibling.json").is_file() and not arguments.rebuild:
        found: dict[str, Any] = json.loads((out / "sibling.json").read_text(encoding="utf-8"))
        return found
    minutes = arguments.minutes or (None if arguments.steps else 60.0 if is_shrunk else 15.0)
    options = Training(
        minutes=minutes,
        steps=arguments.steps,
        batch=arguments.batch,
        tokens=arguments.tokens,
        learning_rate=arguments.rate or (Training.learning_rate if is_shrunk else 2e-4),
        judge_every=arguments.judge_every,
        seed=arguments.seed,
    )
    quiet_loading()
    path = arguments.model or fetch_demo_models(arguments.cache / "demo")["smollm2-135m-instruct"]
    lm = load_model(path, dtype=arguments.dtype if is_shrunk else "float32")
    split = held_out_and_training(arguments.cache / "corpora")
    work = out / "work"
    if is_shrunk:
        model, record = shrink(lm, arguments.layers, split.training, split.held_out, options, work, tell)
    else:
        texts, held_out = ([d for d in side if d.kind == arguments.kind] for side in (split.training, split.held_out))
        if not texts or not held_out:
            raise BadInput(f"there is no text of kind {arguments.kind!r}; `python -m bench.corpora` lists the kinds")
        model, record = tune(lm, arguments.rank, texts, held_out, options, work, tell)
        record["kind"] = arguments.kind
    record = {"what": arguments.what, "of": lm.name, "options": asdict(options), **record}
    save(model, lm.tokenizer, out, record)
    return record


def save(model: Any, tokenizer: Any, out: Path, record: dict[str, Any]) -> None:
    """Write an ordinary folder of transformers; the record is written last and says that it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sibling.json").unlink(missing_ok=True)
    model.to(torch.float32).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "work" / CHECKPOINT).unlink(missing_ok=True)
    (out / "sibling.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def main() -> None:
    """Make one relative."""
    print(json.dumps(make(parse(), lambda line: print(line, file=sys.stderr, flush=True))))


if __name__ == "__main__":
    main()
