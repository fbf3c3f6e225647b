"""Cross-encoders: an encoder reads question and answer as one pair (DeBERTa rewards, rerankers).

The score is the classifier's one logit, and what is declared to be done to it. A text has no
closing tokens, finished or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from reward_service import encoder
from reward_service.causal_reward import Options
from reward_service.checkpoint import load_whole
from reward_service.classifier import Transform
from reward_service.conversation import load_tokenizer
from reward_service.encoder import EncoderTask, Item
from reward_service.relevance import question
from specrej.contracts import Candidate, Prompt

Encoding = tuple[tuple[int, ...], tuple[int, ...]]


class CrossEncoderReward:
    """What is read of a prompt is its last user message, or its raw text.

    Of a pair that is too long, the longer text is cut at its end.

    Raises:
        ValueError: the directory holds no such model; says why.
    """

    description = "A cross-encoder's logit for prompt and response."

    def __init__(self, options: Options, *, transform: Transform | None = None) -> None:
        options.set_threads()
        self.name = options.name
        self.transform = transform or Transform()
        self.fingerprint = options.fingerprint(kind="cross-encoder", transform=self.transform)
        self.token_budget = options.token_budget
        self._device = options.device
        self._tokenizer = load_tokenizer(
            options.directory, trust_remote_code=options.trust_remote_code
        )
        model: Any = load_whole(
            AutoModelForSequenceClassification,
            options.directory,
            options.device,
            trust_remote_code=options.trust_remote_code,
        )
        if model.config.num_labels != 1:
            raise ValueError(
                f"{options.directory}: must have one label, has {model.config.num_labels}"
            )
        self._model = model.eval()
        limit = self._tokenizer.model_max_length
        positions = getattr(model.config, "max_position_embeddings", limit)
        if isinstance(getattr(model.base_model, "embeddings", None), torch.nn.Module):
            # Models of the RoBERTa kind begin to count behind the padding's position.
            padding = getattr(model.base_model.embeddings, "padding_idx", None)
            positions -= 0 if padding is None else padding + 1
        self.max_tokens: int = min(limit, positions)

    def open(self, prompt: Prompt, *, once: bool = False) -> _CrossEncoderSession:
        return _CrossEncoderSession(self, question(prompt))

    def compute(self, pieces: Sequence[Item]) -> None:
        encoder.compute(pieces, self.token_budget, self._device, self._logits)

    def tokenize(self, asked: str, texts: Sequence[str]) -> list[Encoding]:
        rows = self._tokenizer(
            [asked] * len(texts),
            list(texts),
            padding=False,
            truncation="longest_first",
            max_length=self.max_tokens,
            return_token_type_ids=True,
        )
        pairs = zip(rows["input_ids"], rows["token_type_ids"], strict=True)
        return [(tuple(ids), tuple(types)) for ids, types in pairs]

    def _logits(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        given = {"input_ids": ids, "attention_mask": mask}
        if getattr(self._model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = types
        logits: Tensor = self._model(**given).logits.float()
        return logits


class _CrossEncoderSession:
    def __init__(self, reward: CrossEncoderReward, asked: str) -> None:
        self._reward = reward
        self._asked = asked

    def begin(self, candidates: Sequence[Candidate]) -> EncoderTask:
        texts = [candidate.text for candidate in candidates]
        return encoder.make_task(self._reward.tokenize(self._asked, texts), self._judge)

    def close(self) -> None:
        """There is nothing to free."""

    def _judge(self, logits: list[Tensor]) -> list[float]:
        return [self._reward.transform(float(logit[0])) for logit in logits]
