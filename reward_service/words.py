"""A language model's word probabilities at the tokens that are read, for rewards made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from reward_service.causal import Read

# Rows whose logits over the vocabulary are there at once: bounds the memory for them.
_ROWS = 256


class Words:
    """The last layer of a language model; asked after the model was taken over by a scorer.

    Raises:
        ValueError: the model does more to its logits than we do.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        for scale in ("logit_scale", "logits_scaling"):
            if getattr(model.config, scale, 1) != 1:
                raise ValueError(f"models with {scale} are not supported")
        self._model: Any = model
        self._softcap = getattr(model.config, "final_logit_softcapping", None)

    def logits(self, states: Tensor, token_ids: list[int]) -> Tensor:
        """Of some tokens, [rows, tokens], from hidden states [rows, hidden]."""
        return torch.cat([self._logits(part)[:, token_ids] for part in torch.split(states, _ROWS)])

    def preferring(self, pair: list[int]) -> Read:
        """Reads how probable the first of two tokens is beside the second, [rows, 1]."""

        def read(states: Tensor, _: Tensor) -> Tensor:
            return F.softmax(self.logits(states, pair), dim=-1)[:, :1]

        return read

    def logprobs(self, states: Tensor, following: Tensor) -> Tensor:
        """Of one token per row, [rows, 1]; following [rows]."""
        parts = zip(torch.split(states, _ROWS), torch.split(following, _ROWS), strict=True)
        chosen = [
            F.log_softmax(self._logits(part), dim=-1).gather(1, token_ids[:, None])
            for part, token_ids in parts
        ]
        return torch.cat(chosen)

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(states).float()
        return logits if not self._softcap else self._softcap * torch.tanh(logits / self._softcap)


def single_token(tokenizer: Any, text: str, what: str) -> int:
    """The token that `text` is.

    Raises:
        ValueError: it is several.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ValueError(f"{what} {text!r} must be one token, is {len(token_ids)}")
    token: int = token_ids[0]
    return token
