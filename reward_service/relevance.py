"""The `relevance` reward: how close a response's embedding lies to the prompt's.

Cosine of mean-pooled, normalised all-MiniLM-L6-v2 embeddings: relevance, not correctness. Knows
no wire and no threads; imports without grpc. A text has no closing tokens, finished or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from reward_service import encoder
from reward_service.encoder import EncoderTask, Item
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt

# The model's published limit (sentence_bert_config.json), so that scores are those of its card.
# Text past it does not count: a prefix's score stays what it is once the prefix is that long.
MAX_TOKENS = 256


class RelevanceReward:
    """Scores in [-1, 1].

    What is embedded of a prompt is its last user message, or its raw text. Texts longer than
    `max_tokens` tokens (at most 512; [CLS] and [SEP] count) are cut at their end; an empty one is
    embedded as these two: a low, finite score. Always float32. `threads` is the number of CPU
    threads torch uses; 0 leaves it alone.
    """

    description = (
        "Cosine of the prompt's and the response's all-MiniLM-L6-v2 sentence embeddings:"
        " relevance, not correctness."
    )

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "relevance",
        device: str = "cpu",
        threads: int = 0,
        token_budget: int = 2048,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.name = name
        settings = {"kind": "relevance", "max_tokens": max_tokens}
        self.fingerprint = fingerprint.of_directory(directory, settings)
        self.token_budget = token_budget
        self._device = device
        self._max_tokens = max_tokens
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModel.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            add_pooling_layer=False,
        )
        self._model = model.to(device).eval()

    def open(self, prompt: Prompt, *, once: bool = False) -> _RelevanceSession:
        return _RelevanceSession(self, question(prompt))

    def compute(self, pieces: Sequence[Item]) -> None:
        encoder.compute(pieces, self.token_budget, self._device, self._embed)

    def tokenize(self, texts: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        rows = self._tokenizer(
            list(texts), padding=False, truncation=True, max_length=self._max_tokens
        )
        pairs = zip(rows["input_ids"], rows["token_type_ids"], strict=True)
        return [(tuple(ids), tuple(types)) for ids, types in pairs]

    def _embed(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Unit vectors [rows, 384]."""
        hidden = self._model(
            input_ids=ids, attention_mask=mask, token_type_ids=types
        ).last_hidden_state
        weights = mask.unsqueeze(-1)  # [rows, width, 1]
        return F.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)


class _RelevanceSession:
    def __init__(self, reward: RelevanceReward, question: str) -> None:
        self._reward = reward
        self._question = question

    def begin(self, candidates: Sequence[Candidate]) -> EncoderTask:
        texts = [self._question, *(candidate.text for candidate in candidates)]
        return encoder.make_task(self._reward.tokenize(texts), _cosines)

    def close(self) -> None:
        """There is nothing to free."""


def _cosines(embeddings: list[Tensor]) -> list[float]:
    """Of all but the first with the first."""
    values: list[float] = (torch.stack(embeddings[1:]) @ embeddings[0]).tolist()
    return values


def question(prompt: Prompt) -> str:
    """The last user message, or the raw text."""
    users = [message.content for message in prompt.messages if message.role == "user"]
    return users[-1] if users else prompt.text
