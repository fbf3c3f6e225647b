"""Tiny random models with a byte tokeniser and a chat template, and plain transformers on them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from reward_service.causal_reward import Options
from specrej.contracts import Message, Prompt

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "gemma": GemmaConfig,
}
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
)
PROMPT = Prompt.from_user("How do I bake bread?")
TEXTS = [
    "Mix flour and water.",
    "",
    "no",
    "Mix flour and yeast, then wait.",
    "x" * 150,
    "né 面包 🍞",
]
CONTEXT = 256


def make_tokenizer(pad: str | None) -> Any:
    """Bytes as tokens; like Llama's, it puts BOS before whatever it encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=pad
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_config(family: str, pad_id: int | None, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        # Wide enough that scores of different texts differ by much more than the tolerance.
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": pad_id,
        "num_labels": 1,
    }
    if family == "gemma":
        options["head_dim"] = 8
    return CONFIGS[family](**(options | changes))


def save(directory: Path, config: Any, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def references(directory: Path, texts: list[str]) -> list[float]:
    """Logits by transformers' own classifier, one text at a time, nothing padded."""
    tokenizer, model = plain(directory)
    logits = []
    for text in texts:
        turns = [*PROMPT.messages, Message("assistant", text)]
        conversation = [{"role": turn.role, "content": turn.content} for turn in turns]
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = tokenizer.encode(rendered, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            logits.append(model(input_ids=ids).logits[0, 0].item())
    return logits


@cache
def plain(directory: Path) -> tuple[Any, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    model.config.pad_token_id = None  # the head then takes the last token there is
    return tokenizer, model


def save_language_model(directory: Path, config: Any, tokenizer: Any, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def rendered(tokenizer: Any, prompt: Prompt, text: str) -> str:
    """The conversation by the model's own template."""
    turns = [*prompt.messages, Message("assistant", text)]
    conversation = [{"role": turn.role, "content": turn.content} for turn in turns]
    whole: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    return whole


def options(directory: Path, **changes: Any) -> Options:
    """Of a reward on a tiny model."""
    return Options("bt", directory, **changes)
