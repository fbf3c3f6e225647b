"""A Bradley-Terry reward model: any local decoder-only sequence classifier with one label.

The conversation is rendered with the model's own chat template, the response as its assistant
turn; the score is the raw logit at the last token. Knows no wire and no threads; imports without
grpc. Code that comes with a model is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from reward_service.batching import TokenIds, distinct, in_micro_batches, pad
from specrej import fingerprint
from specrej.contracts import Message, Prompt, Scores
from specrej.errors import InvalidRequest, Violation


class ClassifierReward:
    """Scores are logits: unbounded, comparable for one prompt only.

    A raw text prompt is one user message. A prompt must fit the model's limit (the smaller of the
    tokenizer's and the position embeddings', `max_tokens`); where prompt and response together do
    not, the last `max_tokens` tokens count, because the responses are what differs.
    float32 on the CPU, where padding and batch size change no score by more than 1e-4; the
    checkpoint's own precision elsewhere. `threads` is the number of CPU threads torch uses; 0
    leaves it alone.

    Raises:
        ValueError: the directory holds no such model; says why.
    """

    description = "A Bradley-Terry reward model's logit for the response as the assistant's turn."

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        device: str = "cpu",
        threads: int = 0,
        token_budget: int = 8192,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.name = name
        dtype: Any = torch.float32 if device == "cpu" else "auto"
        settings = {"kind": "classifier", "dtype": str(dtype)}
        self.fingerprint = fingerprint.of_directory(directory, settings)
        self._device = device
        self._token_budget = token_budget
        self._tokenizer: Any = _load_tokenizer(directory)
        self._model: Any = _load_model(directory, dtype).to(device).eval()
        self.max_tokens: int = min(
            self._tokenizer.model_max_length,
            getattr(
                self._model.config, "max_position_embeddings", self._tokenizer.model_max_length
            ),
        )

    @torch.inference_mode()
    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        """One forward pass over prompt and response per different text."""
        messages = prompt.messages or (Message("user", prompt.text),)
        self._check_fits(self._render(messages, [""])[0])
        unique, where = distinct(texts)
        sequences = [ids[-self.max_tokens :] for ids in self._render(messages, unique)]
        logits = in_micro_batches(sequences, self._token_budget, self._logits)
        values = tuple(logits[index] for index in where)
        return Scores(values, sum(len(sequence) for sequence in sequences))

    def _render(self, messages: Sequence[Message], texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the conversation with each text as its last turn, not cut."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        conversations = [[*turns, {"role": "assistant", "content": text}] for text in texts]
        try:
            rendered = self._tokenizer.apply_chat_template(conversations, tokenize=False)
        except TemplateError as error:
            # Templates refuse what the model was not trained on, such as a system turn.
            reason = f"reward {self.name} does not take this conversation: {str(error)[:200]}"
            raise InvalidRequest([Violation("prompt.messages", reason)]) from error
        # The template has written the special tokens, the first one (BOS) included.
        encoded = self._tokenizer(rendered, add_special_tokens=False, padding=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _check_fits(self, without_response: TokenIds) -> None:
        if len(without_response) > self.max_tokens:
            reason = (
                f"has {len(without_response)} tokens, reward {self.name} takes {self.max_tokens}"
            )
            raise InvalidRequest([Violation("prompt", reason)])

    def _logits(self, rows: Sequence[TokenIds]) -> list[float]:
        """One logit per row, from the hidden state at its true last token.

        transformers' own head looks for the last token that is not the pad token, which fails
        where a model has none, and is off by one where the pad token is also the last real one.
        """
        ids = torch.tensor(pad(rows), device=self._device)  # [rows, width], padded on the right
        mask = torch.tensor(pad([[1] * len(row) for row in rows]), device=self._device)
        hidden = self._model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state  # [rows, width, hidden]
        last = mask.sum(dim=1) - 1
        pooled = hidden[torch.arange(len(rows), device=self._device), last]
        logits: list[float] = self._model.score(pooled).squeeze(-1).float().tolist()
        return logits


def _load_tokenizer(directory: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ValueError(f"{directory}: the tokenizer has no chat template")
    return tokenizer


def _load_model(directory: Path, dtype: Any) -> Any:
    model: Any
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        output_loading_info=True,
    )
    # transformers would fill what is missing, such as the head, with random numbers.
    if loading["missing_keys"] or loading["mismatched_keys"]:
        missing = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        raise ValueError(f"{directory}: not a trained classifier, lacks {', '.join(missing[:3])}")
    if model.config.num_labels != 1:
        raise ValueError(f"{directory}: must have one label, has {model.config.num_labels}")
    if not isinstance(getattr(model, "score", None), torch.nn.Module):
        raise ValueError(f"{directory}: must be decoder-only, with its head on the last token")
    return model
