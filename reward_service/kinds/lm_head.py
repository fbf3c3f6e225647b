"""Probabilities of tokens from hidden states, for rewards made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from reward_service.kinds.causal import Head

# Most rows of logits over the vocabulary at once: bounds the memory for them.
_ROWS = 256


class LMHead:
    """The output embeddings of a language model, as they are when they are used.

    Raises:
        ValueError: the model does more than that between its last hidden states and its logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        if not self._are_the_models():
            raise ValueError("layers, scales or bounds before the logits are not supported")

    def logits_of(self, token_ids: list[int]) -> Head:
        """The logits of these tokens, [rows, tokens]."""

        def head(states: Tensor, _: Tensor) -> Tensor:
            logits = [self._logits(part)[:, token_ids] for part in torch.split(states, _ROWS)]
            return torch.cat(logits)

        return head

    def preferring(self, pair: list[int]) -> Head:
        """The probability of the first of two tokens against the second, [rows, 1]."""
        logits = self.logits_of(pair)
        return lambda states, following: F.softmax(logits(states, following), dim=-1)[:, :1]

    def logprobs(self, states: Tensor, following: Tensor) -> Tensor:
        """The log-probability of one token per row, [rows, 1]; following [rows]."""
        parts = zip(torch.split(states, _ROWS), torch.split(following, _ROWS), strict=True)
        chosen = [
            F.log_softmax(self._logits(part), dim=-1).gather(1, token_ids[:, None])
            for part, token_ids in parts
        ]
        return torch.cat(chosen)

    @torch.inference_mode()
    def _are_the_models(self) -> bool:
        """Whether the logits of three tokens are those of the whole model, but for rounding."""
        ids = torch.tensor([[0, 1, 2]], device=self._model.device)
        expected = self._model(input_ids=ids, use_cache=False).logits[0].float()
        states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        try:
            actual = self._logits(states)
        except RuntimeError:  # of another width
            return False
        tolerance = 0.05 * float(expected.abs().max())
        return actual.shape == expected.shape and torch.allclose(actual, expected, atol=tolerance)

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(states).float()
        return logits
