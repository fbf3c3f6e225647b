"""A Bradley-Terry reward model: any local decoder-only sequence classifier with one label.

The conversation is rendered with the model's own chat template, the response as its assistant
turn; the score is the raw logit at the last token. Knows no wire and no threads; imports without
grpc. Code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from reward_service.batching import distinct
from reward_service.causal import CausalScorer, KeptPrefixes, Tokens
from reward_service.prefixes import common
from specrej import fingerprint
from specrej.contracts import Candidate, Message, Prompt, Scores
from specrej.errors import InvalidRequest, Violation

# The tensor in a head's file, [hidden].
HEAD_TENSOR = "head"

# Stands for a response where only what is around it is looked for.
_ANY_RESPONSE = "Response"


class ClassifierReward:
    """Scores are logits: unbounded, comparable for one prompt only.

    A raw text prompt is one user message. A prompt must fit the model's limit (the smaller of the
    tokenizer's and the position embeddings', `max_tokens`); where prompt and response together do
    not, the last `max_tokens` tokens count, because the responses are what differs.
    float32 on the CPU, where batch size and what was scored before change no score by more than
    1e-4; the checkpoint's own precision elsewhere. `threads` is the number of CPU threads torch
    uses; 0 leaves it alone. Open sessions keep up to `kept_tokens` tokens' keys and values.
    `head`: a file that `training` has written, for a `directory` that holds the backbone only.

    Raises:
        ValueError: the directory holds no such model; says why.
    """

    description = "A Bradley-Terry reward model's logit for the response as the assistant's turn."

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        head: Path | None = None,
        device: str = "cpu",
        threads: int = 0,
        token_budget: int = 8192,
        kept_tokens: int = 65_536,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.name = name
        dtype: Any = torch.float32 if device == "cpu" else "auto"
        settings = {"kind": "classifier", "dtype": str(dtype)}
        if head:
            settings["head"] = hashlib.sha256(head.read_bytes()).hexdigest()
        self.fingerprint = fingerprint.of_directory(directory, settings)
        self.tokenizer: Any = _load_tokenizer(directory)
        model: Any = _load_model(directory, dtype, head).to(device)
        self.scorer = CausalScorer(model, token_budget, kept_tokens)
        self._head: Any = model.score
        limit: int = self.tokenizer.model_max_length
        self.max_tokens = min(limit, getattr(model.config, "max_position_embeddings", limit))

    def open(self, prompt: Prompt) -> ClassifierSession:
        """A session that keeps what it has computed.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        return ClassifierSession(self, prompt)

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        """Of whole answers; nothing is kept."""
        session = self.open(prompt)
        try:
            return session.score([Candidate(i, text, 0, 0.0) for i, text in enumerate(texts)])
        finally:
            session.close()

    @torch.inference_mode()
    def logits(self, kept: KeptPrefixes, sequences: Sequence[Tokens]) -> tuple[list[float], int]:
        """One per sequence, and the tokens computed for them.

        transformers' own head looks for the last token that is not the pad token, which fails
        where a model has none, and is off by one where the pad token is also the last real one.
        """
        states, num_computed = self.scorer.score(kept, sequences)
        logits: list[float] = self._head(torch.stack(states)).squeeze(-1).float().tolist()
        return logits, num_computed

    def features(self, prompt: Prompt, texts: Sequence[str]) -> Tensor:
        """What the head sees of each answer, float32 [texts, hidden]; nothing is kept."""
        session = self.open(prompt)
        try:
            states, _ = self.scorer.score(session.kept, session.sequences(texts, range(len(texts))))
            return torch.stack(states).float()
        finally:
            session.close()

    def render(self, prompt: Prompt, texts: Sequence[str]) -> list[str]:
        """The conversation with each text as its last turn.

        Raises:
            InvalidRequest: the model's template does not take it.
        """
        messages = prompt.messages or (Message("user", prompt.text),)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        conversations = [[*turns, {"role": "assistant", "content": text}] for text in texts]
        try:
            rendered: list[str] = self.tokenizer.apply_chat_template(conversations, tokenize=False)
        except TemplateError as error:
            # Templates refuse what the model was not trained on, such as a system turn.
            reason = f"reward {self.name} does not take this conversation: {str(error)[:200]}"
            raise InvalidRequest([Violation("prompt.messages", reason)]) from error
        return rendered

    def encode(self, rendered: Sequence[str]) -> list[list[int]]:
        """Token ids, not cut; the template has written the special tokens, BOS included."""
        encoded = self.tokenizer(
            list(rendered), add_special_tokens=False, padding=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


class ClassifierSession:
    """One prompt's growing texts: of each, only the tokens that are new are computed."""

    def __init__(self, reward: ClassifierReward, prompt: Prompt) -> None:
        self._reward = reward
        self._prompt = prompt
        empty, some = reward.render(prompt, ["", _ANY_RESPONSE])
        # What the template writes around a response: not kept, as a longer one takes its place.
        opening, self._closing = some.rsplit(_ANY_RESPONSE, 1)
        opening_ids, empty_ids = reward.encode([opening, empty])
        if len(empty_ids) > reward.max_tokens:
            reason = f"has {len(empty_ids)} tokens, reward {reward.name} takes {reward.max_tokens}"
            raise InvalidRequest([Violation("prompt", reason)])
        self.kept = KeptPrefixes(opening_ids)

    def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Candidates missing from the batch are forgotten; equal texts are computed once."""
        texts, where = distinct([candidate.text for candidate in candidates])
        keys: dict[int, int] = {}
        for candidate, place in zip(candidates, where, strict=True):
            keys.setdefault(place, candidate.id)
        sequences = self.sequences(texts, [keys[place] for place in range(len(texts))])
        logits, num_computed = self._reward.logits(self.kept, sequences)
        return Scores(tuple(logits[place] for place in where), num_computed)

    def close(self) -> None:
        """Free what is kept."""
        self._reward.scorer.close(self.kept)

    def sequences(self, texts: Sequence[str], keys: Sequence[int]) -> list[Tokens]:
        rendered = self._reward.render(self._prompt, texts)
        unclosed = [text.removesuffix(self._closing) for text in rendered]
        ids = self._reward.encode([*rendered, *unclosed])
        whole, begun = ids[: len(texts)], ids[len(texts) :]
        sequences = []
        for key, token_ids, first in zip(keys, whole, begun, strict=True):
            cut = max(0, len(token_ids) - self._reward.max_tokens)
            keep = 0 if cut else common(token_ids, first)
            sequences.append(Tokens(key, token_ids[cut:], keep))
        return sequences


def _load_tokenizer(directory: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ValueError(f"{directory}: the tokenizer has no chat template")
    return tokenizer


def _head_weights(path: Path, hidden: int) -> Tensor:
    """[1, hidden].

    Raises:
        ValueError: the file is no head, or one of another backbone.
    """
    try:
        weights = load_file(path)[HEAD_TENSOR]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not a reward's head: {error}") from None
    if weights.shape != (hidden,):
        raise ValueError(f"{path}: a head of {list(weights.shape)}, the backbone has {hidden}")
    return weights[None]


def _load_model(directory: Path, dtype: Any, head: Path | None) -> Any:
    model: Any
    options = {"num_labels": 1} if head else {}
    # What is missing is looked at here; transformers' own report tells users to train the model.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if head and isinstance(getattr(model, "score", None), torch.nn.Module):
        model.score.weight.data.copy_(_head_weights(head, model.score.weight.shape[1]))
        loading["missing_keys"] = set(loading["missing_keys"]) - {"score.weight"}
    # transformers would fill what is missing, such as the head, with random numbers.
    if loading["missing_keys"] or loading["mismatched_keys"]:
        missing = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        raise ValueError(f"{directory}: not a trained classifier, lacks {', '.join(missing[:3])}")
    if model.config.num_labels != 1:
        raise ValueError(f"{directory}: must have one label, has {model.config.num_labels}")
    if not isinstance(getattr(model, "score", None), torch.nn.Module):
        raise ValueError(f"{directory}: must be decoder-only, with its head on the last token")
    return model
