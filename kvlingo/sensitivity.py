"""How much the target minds an error in each direction of a layer's outputs.

Knows hand-overs and gradients. For one layer, with g the gradient of the log-probability of a continuation that the target itself
draws after a translated context, by one token's outputs,

    F = E[Σ_tokens g gᵀ]  (per predicted token)

is the Fisher information of these outputs: an error with covariance Σ, alike for all tokens and independent between them, adds
about ½ tr(F Σ) nats to the KL. Most directions of keys and values hardly matter, and which ones no statistics of the values tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvlingo.assembling import assemble, continuation_logits
from kvlingo.corpus import Example, random_examples
from kvlingo.judging import example_plan
from kvlingo.language_model import LanguageModel, read
from kvlingo.shapes import FitOptions
from kvlingo.texts import Document
from kvlingo.translator import LayerMap, Translator

Progress = Callable[[str, int, int], None]
LONGEST = 768


@dataclass(frozen=True)
class SensitivityOptions:
    """How much to look at.

    Fields:
        examples: hand-overs, of documents in turn; context_tokens: their lengths in turn.
        draws: continuations drawn at each.
    """

    examples: int = 24
    context_tokens: tuple[int, ...] = (192, 512, 768)
    continuation_tokens: int = 48
    draws: int = 2
    chat_share: float = 0.15
    seed: int = 0


def options_for(fitted: FitOptions) -> SensitivityOptions:
    """Return what to look at for a translator: contexts as long as it was fitted on, up to where gradients cost much."""
    contexts = tuple(min(tokens, LONGEST) for tokens in fitted.context_tokens)
    most = SensitivityOptions().continuation_tokens
    return SensitivityOptions(context_tokens=contexts, continuation_tokens=max(1, min(most, min(contexts) // 2)))


@torch.inference_mode(False)
@torch.enable_grad()
def measure_sensitivity(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    documents: Sequence[Document],
    options: SensitivityOptions | None = None,
    *,
    progress: Progress | None = None,
) -> dict[int, Tensor]:
    """Return F of each layer with a map: [outputs, outputs], float64, on the CPU. Raises `BadInput` for too little text."""
    options = options or SensitivityOptions()
    config = translator.config
    found = {
        int(name): torch.zeros(2 * [config.target.layers[int(name)].width], dtype=torch.float64)
        for name in translator.maps
    }
    learns = [p.requires_grad for p in translator.parameters()]
    translator.requires_grad_(False)
    generator = torch.Generator(target.device).manual_seed(options.seed)
    try:
        for number in range(options.examples):
            example = random_examples(
                documents,
                source.tokenizer,
                target.tokenizer,
                context_tokens=(options.context_tokens[number % len(options.context_tokens)],),
                continuation_tokens=options.continuation_tokens,
                chat_share=options.chat_share,
                seed=f"sensitivity-{options.seed}-{number}",
                count=1,
            )[0]
            for layer, one in of_example(translator, source, target, example, options.draws, generator).items():
                found[layer] += one / options.examples
            if progress is not None:
                progress("measuring what the target minds", number + 1, options.examples)
    finally:
        for parameter, learnt in zip(translator.parameters(), learns, strict=True):
            parameter.requires_grad_(learnt)
    return found


def of_example(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    example: Example,
    draws: int,
    generator: torch.Generator,
) -> dict[int, Tensor]:
    """Return F of each layer for one hand-over, the mean over drawn continuations."""
    plan, ids = example_plan(example, 1), target.ids(example.target.ids)
    with torch.no_grad():
        source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
        prefix = read(target, ids[: plan.translated[0]]) if plan.translated[0] else None
    with caught_outputs(translator) as outputs:
        kv = assemble(plan, target, translator, source_kv, example.alignment, ids, prefix=prefix)
    logits = continuation_logits(target, kv, ids[plan.translated[1] :], target.ids(example.continuation))
    log_p = logits.float().log_softmax(-1)
    found = {layer: torch.zeros(2 * [x.shape[1]], dtype=torch.float64) for layer, x in outputs.items()}
    for draw in range(draws):
        with torch.no_grad():
            drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        # The sum over positions, by the root of their number: its gradients' products are what one position gives on average.
        total = log_p.gather(-1, drawn).sum() / len(drawn) ** 0.5
        gradients = torch.autograd.grad(total, list(outputs.values()), retain_graph=draw + 1 < draws, allow_unused=True)
        for layer, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                g = gradient.double().cpu()
                found[layer] += g.T @ g / draws
    return found


@contextmanager
def caught_outputs(translator: Translator) -> Iterator[dict[int, Tensor]]:
    """Give what each map's products are while it runs, as leaves that gradients can be taken by: [tokens, outputs]."""
    caught: dict[int, Tensor] = {}

    def catch(layer: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            caught[layer] = output.detach().requires_grad_()
            return caught[layer]

        return hook

    handles = []
    for name, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        handles.append(layer_map.linear.register_forward_hook(catch(int(name))))
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()
