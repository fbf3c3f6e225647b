"""The `relevance` reward: how close a response's embedding lies to the prompt's.

Cosine of mean-pooled, normalised all-MiniLM-L6-v2 embeddings: relevance, not correctness. Knows
no wire and no threads; imports without grpc.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from reward_service.batching import TokenIds, distinct, in_micro_batches, pad
from specrej import fingerprint
from specrej.contracts import Prompt, Scores

# The model's published limit (sentence_bert_config.json), so that scores are those of its card.
# Text past it does not count: a prefix's score stays what it is once the prefix is that long.
MAX_TOKENS = 256


class RelevanceReward:
    """Scores in [-1, 1].

    What is embedded of a prompt is its last user message, or its raw text. Texts longer than
    `max_tokens` tokens (at most 512; [CLS] and [SEP] count) are cut at their end. Always float32.
    `threads` is the number of CPU threads torch uses; 0 leaves it alone.
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
        token_budget: int = 8192,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.name = name
        settings = {"kind": "relevance", "max_tokens": max_tokens}
        self.fingerprint = fingerprint.of_directory(directory, settings)
        self._device = device
        self._token_budget = token_budget
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

    @torch.inference_mode()
    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        """An empty text is embedded as its two end tokens: a low, finite score."""
        unique, where = distinct([_question(prompt), *texts])
        sequences: list[list[int]] = self._tokenizer(
            unique, padding=False, truncation=True, max_length=self._max_tokens
        )["input_ids"]
        embeddings = torch.stack(in_micro_batches(sequences, self._token_budget, self._embed))
        cosines: list[float] = (embeddings @ embeddings[0]).tolist()  # [unique]
        values = tuple(cosines[index] for index in where[1:])
        return Scores(values, sum(len(sequence) for sequence in sequences))

    def _embed(self, rows: Sequence[TokenIds]) -> list[Tensor]:
        """Unit vectors [384], one per row."""
        ids = torch.tensor(pad(rows), device=self._device)  # [rows, width]
        mask = torch.tensor(pad([[1] * len(row) for row in rows]), device=self._device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1)  # [rows, width, 1]
        means = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return list(F.normalize(means, dim=-1))


def _question(prompt: Prompt) -> str:
    users = [message.content for message in prompt.messages if message.role == "user"]
    return users[-1] if users else prompt.text
