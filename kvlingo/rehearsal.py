"""What a recipe is rehearsed with: tiny models of its families with random weights, a byte tokenizer, texts, a task of each kind.

Knows families by their `model_type` and nothing that needs a network. What comes out of a rehearsal means nothing: it shows that
every step of a recipe runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvlingo.errors import BadInput
from kvlingo.models import quiet_loading
from kvlingo.public_shapes import random_model

LAYERS = {"source": 3, "target": 4}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": None},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
    },
}
"""What a tiny config of each family needs beside `TINY`."""
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
DOCUMENTS, LEAST_CHARS = 24, 1000
ITEMS = 4


def check_family(name: str) -> str:
    """Return a family's name. Raises `BadInput` for one that nothing tiny is known of."""
    if name not in FAMILIES:
        raise BadInput(f"no tiny model of the family {name!r} is known; use one of {', '.join(FAMILIES)}")
    return name


def tiny_model(folder: Path, family: str, side: str) -> str:
    """Save a tiny model of a family with random weights and a byte tokenizer; return its folder's name."""
    quiet_loading()
    config = {"model_type": check_family(family), **TINY, "num_hidden_layers": LAYERS[side], **FAMILIES[family]}
    lm = random_model(f"tiny {family}", config, device=torch.device("cpu"), dtype=torch.float32, seed=len(side))
    lm.model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return str(folder)


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token a byte, BOS before a text, and a chat template."""
    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:2]])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def some_texts(folder: Path) -> Path:
    """Write a few pages of the manual that comes with Python, a file each; return the folder."""
    folder.mkdir(parents=True)
    pages = [text for text in topics.values() if len(text) >= LEAST_CHARS][:DOCUMENTS]
    for number, text in enumerate(pages):
        (folder / f"text-{number}.txt").write_text(text, encoding="utf-8")
    return folder


def local_tasks(folder: Path) -> tuple[str, ...]:
    """Write a task of each kind that lm-eval asks, with its data; return their names."""
    folder.mkdir(parents=True)
    rows = [
        {"question": f"{'one two three ' * 6}{number}?", "choices": ["four", "five"], "answer": number % 2}
        for number in range(ITEMS)
    ]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    kinds: dict[str, dict[str, Any]] = {
        "rehearsal_choose": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "metric": "acc"},
        "rehearsal_say": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric": "exact_match",
        },
    }
    for name, kind in kinds.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "doc_to_text": "{{question}}\nAnswer:",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": kind.pop("metric"), "aggregation": "mean", "higher_is_better": True}],
            **kind,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return tuple(kinds)
