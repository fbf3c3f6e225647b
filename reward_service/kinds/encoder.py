"""Rewards on encoders, which read short texts whole: relevance, and cross-encoders.

Texts of any sessions share forward passes, padded within one power of two of length; equal texts of
a batch are computed once. A text has no closing tokens, finished or not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForSequenceClassification

from reward_service.checkpoint import check_labels, load_model
from reward_service.reward import Reward, Task, Text, text_task
from reward_service.specs import CrossEncoderSpec, LocalSpec, RelevanceSpec, Resources
from specrej.contracts import Candidate, Prompt
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import examine

# The relevance model's published limit (sentence_bert_config.json), so that scores are those of its
# card. Tokens after it do not count: a longer prefix has the same score.
MAX_TOKENS = 256
# More tokens than a cut can change where it makes the tokens of a text's end others.
_BORDER_TOKENS = 16


class _EncoderReward(Reward):
    """Prompts are read as their last user message, or their raw text."""

    def __init__(self, spec: LocalSpec, resources: Resources, auto_class: Any) -> None:
        model: Any = load_model(spec, resources, auto_class)
        pad_id = model.config.get_text_config().pad_token_id
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources, padding=str(pad_id))
        self.token_budget = resources.token_budget
        self._device = resources.device
        self._model = model.eval()
        examined = examine(spec.directory, ends=False, uses_template=False)
        self.probe = examined.probe
        self._tokenizer = examined.tokenizer
        self._control_tokens = ControlTokens(self._tokenizer, self.probe.vocabulary)
        # Decoder classifiers read the last token that is not padding: those without a padding token
        # take one text at a time.
        self._pad_id = pad_id or 0
        if pad_id is None:
            self.token_budget = 0

    @abstractmethod
    def _encode(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """A result per row, [rows, n], from padded inputs, each [rows, width]."""

    def open(self, prompt: Prompt, *, once: bool = False) -> str:
        """The question."""
        users = [message.text for message in prompt.messages if message.role == "user"]
        return users[-1] if users else prompt.text

    @torch.inference_mode()
    def compute(self, pieces: Sequence[Text]) -> None:
        """In micro-batches of at most `token_budget` tokens, padding included."""
        for indices in plan([len(piece.token_ids) for piece in pieces], self.token_budget):
            texts = [pieces[index] for index in indices]
            ids = _padded([text.token_ids for text in texts], self._device, self._pad_id)
            mask = _padded([[1] * len(text.token_ids) for text in texts], self._device)
            types = _padded([text.types for text in texts], self._device)
            for text, result in zip(texts, self._encode(ids, mask, types), strict=True):
                text.result = result
                text.num_computed = len(text.token_ids)

    def _tokenize(
        self, *texts: list[str], max_length: int, **options: Any
    ) -> tuple[list[Text], list[int]]:
        """Different texts, longest first as neighbours share a pass, and each one's index.

        Control tokens in texts are characters: each takes one token more of `max_length`.
        """
        as_text, cut_id = self._control_tokens.as_text, self._control_tokens.cut_id
        most = max_length * MAX_TOKEN_CHARACTERS  # the rest would be cut
        columns = [[as_text(text[:most]) for text in column] for column in texts]
        coded = self._tokenizer(*columns, max_length=max_length, padding=False, **options)
        rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for ids, types in zip(coded["input_ids"], coded["token_type_ids"], strict=True):
            kept = [place for place, token in enumerate(ids) if token != cut_id]
            rows.append((tuple(ids[i] for i in kept), tuple(types[i] for i in kept)))
        unique = sorted(dict.fromkeys(rows), key=lambda row: -len(row[0]))
        places = {row: place for place, row in enumerate(unique)}
        return [Text(*row) for row in unique], [places[row] for row in rows]


class RelevanceReward(_EncoderReward):
    """Cosine of mean-pooled embeddings of prompt and response, in [-1, 1].

    Texts longer than MAX_TOKENS tokens ([CLS] and [SEP] count) are cut at their end; an empty one
    is embedded as these two: a low, finite score.
    """

    description = (
        "Cosine of the prompt's and the response's all-MiniLM-L6-v2 sentence embeddings:"
        " relevance, not correctness."
    )

    def __init__(self, spec: RelevanceSpec, resources: Resources) -> None:
        super().__init__(spec, resources, AutoModel)

    def begin(self, session: str, candidates: Sequence[Candidate]) -> Task:
        """A task of the question and the batch's different texts."""
        texts = [session, *(candidate.text for candidate in candidates)]
        items, where = self._tokenize(texts, truncation=True, max_length=MAX_TOKENS)
        return text_task(items, where, _cosines)

    def _encode(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Unit vectors [rows, 384]."""
        hidden = self._model(
            input_ids=ids, attention_mask=mask, token_type_ids=types
        ).last_hidden_state
        weights = mask.unsqueeze(-1)  # [rows, width, 1]
        return F.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)


def _cosines(embeddings: list[Tensor]) -> list[float]:
    """Cosines of the first with each of the others."""
    values: list[float] = (torch.stack(embeddings[1:]) @ embeddings[0]).tolist()
    return values


class CrossEncoderReward(_EncoderReward):
    """An encoder's logit for prompt and response as a pair (DeBERTa rewards, rerankers).

    Of a pair that is too long, the longer text is cut at its end.

    Raises:
        ValueError: the directory does not hold such a model; the message says why.
    """

    description = "A cross-encoder's logit for prompt and response."

    def __init__(self, spec: CrossEncoderSpec, resources: Resources) -> None:
        super().__init__(spec, resources, AutoModelForSequenceClassification)
        model, self._label = self._model, spec.label or 0
        check_labels(spec.directory, spec.label, model.config.num_labels)
        limit = self._tokenizer.model_max_length
        positions = getattr(model.config, "max_position_embeddings", limit)
        if isinstance(getattr(model.base_model, "embeddings", None), torch.nn.Module):
            # Models of the RoBERTa kind count positions from the padding's on.
            padding = getattr(model.base_model.embeddings, "padding_idx", None)
            positions -= 0 if padding is None else padding + 1
        self._max_tokens: int = min(limit, positions)

    def begin(self, session: str, candidates: Sequence[Candidate]) -> Task:
        """A task of the batch's different pairs."""
        items, where = self._tokenize(
            [self._beginning(session)] * len(candidates),
            [candidate.text for candidate in candidates],
            truncation="longest_first",
            max_length=self._max_tokens,
            return_token_type_ids=True,
        )

        def to_scores(logits: list[Tensor]) -> list[float]:
            return [float(logit[self._label]) for logit in logits]

        return text_task(items, where, to_scores)

    def _beginning(self, question: str) -> str:
        """As much of the prompt as a pair may have: it is tokenized for every response."""
        question = question[: self._max_tokens * MAX_TOKEN_CHARACTERS]
        coded = self._tokenizer(
            question,
            add_special_tokens=False,
            truncation=True,
            max_length=self._max_tokens + _BORDER_TOKENS,
            return_offsets_mapping=True,
        )
        return question[: max((end for _, end in coded["offset_mapping"]), default=0)]

    def _encode(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask}
        if getattr(self._model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = types
        logits: Tensor = self._model(**inputs).logits.float()
        return logits


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
