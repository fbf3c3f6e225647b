"""Tiny random models with a byte tokenizer and a chat template, and plain transformers on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from reward_service.specs import Resources, RewardSpec
from reward_service.worker import Worker
from specrej.contracts import Candidate, FinishReason, Message, Prompt

FAMILIES = ("gemma", "llama", "qwen2")
MINILM = Path(".models/relevance")  # all-MiniLM-L6-v2
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
SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)


def load(kind: str, directory: Path | None = None, **options: Any) -> Any:
    """A reward by its spec's options; those of `Resources` are its resources."""
    resources = {key: options.pop(key) for key in Resources.__slots__ if key in options}
    if directory:
        options["directory"] = directory
    spec = SPECS.validate_python({"name": "r", "kind": kind, **options})
    return spec.load(Resources(**dict[str, Any](threads=1) | resources))


@asynccontextmanager
async def working(loads: Callable[[], Any], queue_limit: int = 64) -> AsyncIterator[Worker]:
    """A worker of the reward, which ends with the context."""
    worker = await Worker.start(loads, queue_limit)
    try:
        yield worker
    finally:
        worker.close()
        await worker.join(60)


def batch(texts: dict[int, str], finish: FinishReason | None = None) -> list[Candidate]:
    return [Candidate(key, text, 0, 0.0, finish) for key, text in texts.items()]


def make_tokenizer(pad: str | None, *, bos: bool = True) -> Any:
    """Bytes as tokens; as Llama's, it puts BOS before every text, or as Qwen's, it has none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    if not bos:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS if bos else None, eos_token=EOS, pad_token=pad
    )
    wrapped.chat_template = TEMPLATE if bos else TEMPLATE.removeprefix("{{ bos_token }}")
    return wrapped


SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    # Wide enough that scores of different texts differ by much more than the tolerance.
    "initializer_range": 0.3,
    "num_labels": 1,
}


def make_config(family: str, pad_id: int | None, **changes: Any) -> Any:
    options: dict[str, Any] = SIZES | {
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": pad_id,
    }
    if family == "gemma":
        options["head_dim"] = 8
    return AutoConfig.for_model(family, **(options | changes))


def save(
    directory: Path,
    config: Any = None,
    tokenizer: Any = None,
    auto_class: Any = AutoModelForSequenceClassification,
    seed: int = 0,
) -> Path:
    """A random model and its tokenizer; by default a Llama classifier without padding."""
    torch.manual_seed(seed)
    auto_class.from_config(config or make_config("llama", None)).save_pretrained(directory)
    (tokenizer or make_tokenizer(None)).save_pretrained(directory)
    return directory


save_language_model = partial(save, auto_class=AutoModelForCausalLM)


@cache
def plain(directory: Path, auto_class: Any = AutoModelForSequenceClassification) -> tuple[Any, Any]:
    """Tokenizer and model by transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = auto_class.from_pretrained(directory).eval()
    return tokenizer, model


def conversation(
    directory: Path, text: str, auto_class: Any = AutoModelForSequenceClassification
) -> str:
    """PROMPT and the response by the model's own template."""
    turns = [*PROMPT.messages, Message("assistant", text)]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    tokenizer, _ = plain(directory, auto_class)
    written: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return written


def computed(
    directory: Path, text: str, auto_class: Any = AutoModelForSequenceClassification
) -> tuple[list[int], Any]:
    """A conversation's token ids, and transformers' output for it alone, nothing padded."""
    tokenizer, model = plain(directory, auto_class)
    written = conversation(directory, text, auto_class)
    ids: list[int] = tokenizer.encode(written, add_special_tokens=False)
    with torch.inference_mode():
        return ids, model(input_ids=torch.tensor([ids]))


def references(directory: Path, texts: list[str]) -> list[float]:
    """Logits by transformers' own classifier, one text at a time."""
    return [computed(directory, text)[1].logits[0, 0].item() for text in texts]
