"""Relevance: the cosine of two embeddings by an encoder, which reads short texts whole.

Texts of any sessions share forward passes, padded within one power of two of length; equal texts of
a batch are computed once. A text has no closing tokens, finished or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from reward_service.checkpoint import load_model
from reward_service.reward import Reward, Task, Text, text_task
from reward_service.specs import RelevanceSpec, Resources
from specrej.contracts import Candidate, Prompt
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import examine

# The model's published limit (sentence_bert_config.json), so that scores are those of its card.
# Tokens after it do not count: a longer prefix has the same score.
MAX_TOKENS = 256


class RelevanceReward(Reward):
    """Cosine of mean-pooled embeddings of prompt and response, in [-1, 1].

    Prompts are read as their last user message, or their raw text. Texts longer than MAX_TOKENS
    tokens ([CLS] and [SEP] count) are cut at their end; an empty one is embedded as these two: a
    low, finite score.
    """

    description = (
        "Cosine of the prompt's and the response's all-MiniLM-L6-v2 sentence embeddings:"
        " relevance, not correctness."
    )

    def __init__(self, spec: RelevanceSpec, resources: Resources) -> None:
        model: Any = load_model(spec, resources)
        self._pad_id: int = model.config.pad_token_id
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources, padding=str(self._pad_id))
        self.token_budget = resources.token_budget
        self._device = resources.device
        self._model = model.eval()
        examined = examine(spec.directory, ends=False)
        self._tokenizer = examined.tokenizer
        self._control_tokens = ControlTokens(self._tokenizer, examined.vocabulary)

    def open(self, prompt: Prompt, *, once: bool = False) -> str:
        """The question."""
        users = [message.text for message in prompt.messages if message.role == "user"]
        return users[-1] if users else prompt.text

    def begin(self, session: str, candidates: Sequence[Candidate]) -> Task:
        """A task of the question and the batch's different texts."""
        texts = [session, *(candidate.text for candidate in candidates)]
        # Cosines of the first with each of the others.
        tokenized = self._tokenize(texts)
        return text_task(*tokenized, lambda found: (torch.stack(found[1:]) @ found[0]).tolist())

    @torch.inference_mode()
    def compute(self, pieces: Sequence[Text]) -> None:
        """In micro-batches of at most `token_budget` tokens, padding included."""
        for indices in plan([len(piece.token_ids) for piece in pieces], self.token_budget):
            texts = [pieces[index] for index in indices]
            ids = _padded([text.token_ids for text in texts], self._device, self._pad_id)
            mask = _padded([[1] * len(text.token_ids) for text in texts], self._device)
            for text, result in zip(texts, self._embed(ids, mask), strict=True):
                text.result = result
                text.num_computed = len(text.token_ids)

    def _tokenize(self, texts: Sequence[str]) -> tuple[list[Text], list[int]]:
        """Different texts, longest first as neighbours share a pass, and each one's index.

        Control tokens in texts are characters: each takes one token more of MAX_TOKENS.
        """
        as_text, cut_id = self._control_tokens.as_text, self._control_tokens.cut_id
        most = MAX_TOKENS * MAX_TOKEN_CHARACTERS  # the rest would be cut
        cut = [as_text(text[:most]) for text in texts]
        coded = self._tokenizer(cut, max_length=MAX_TOKENS, padding=False, truncation=True)
        rows = [tuple(token for token in ids if token != cut_id) for ids in coded["input_ids"]]
        unique = sorted(dict.fromkeys(rows), key=lambda row: -len(row))
        places = {row: place for place, row in enumerate(unique)}
        return [Text(row) for row in unique], [places[row] for row in rows]

    def _embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [rows, 384] of padded texts, both [rows, width]."""
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1)  # [rows, width, 1]
        return F.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)


def plan(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of `lengths` in micro-batches, longest first.

    A micro-batch has at most `token_budget` tokens, padding included; a longer sequence is alone in
    one. Sequences share a micro-batch only within one power of two of length, so that less than
    half of it is padding.
    """
    batches: list[list[int]] = []
    width = 0  # tokens of the current micro-batch's first, longest sequence
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        same_bucket = width and (length - 1).bit_length() == (width - 1).bit_length()
        if same_bucket and (len(batches[-1]) + 1) * width <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = length
    return batches


def _padded(rows: Sequence[Sequence[int]], device: str, value: int = 0) -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value).to(device)
