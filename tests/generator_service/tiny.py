"""Tiny random models of every supported architecture, and logits by plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from generator_service.engine.commands import GrowingCandidate

VOCABULARY = 97
END = 2
END_IDS = frozenset({END})

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}

# By name: the type of the model, and what differs from `_SIZES`.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {"num_key_value_heads": 1}),
}


def build(name: str = "llama", **sizes: Any) -> Any:
    """A random model of the configuration of that name, with other `sizes`."""
    kind, options = CONFIGS[name]
    return of_config(AutoConfig.for_model(kind, **_SIZES | options | sizes))


def of_config(config: Any) -> Any:
    """A model with reproducible random weights, wide enough apart that tokens differ."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


@torch.inference_mode()
def full_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits [len(token_ids), vocabulary] by plain transformers, everything recomputed."""
    output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def check_candidate(
    model: Any, prompt_ids: Sequence[int], prefix: GrowingCandidate, made: Tensor, tolerance: float
) -> None:
    """Compare a candidate's last logits [vocabulary] and log-probability with plain transformers.

    The last step read all tokens but the newest.
    """
    logits = full_logits(model, [*prompt_ids, *prefix.token_ids])
    torch.testing.assert_close(made, logits[-2], atol=tolerance, rtol=0)
    steps = torch.log_softmax(logits[len(prompt_ids) - 1 : -1], dim=-1)
    chosen = steps.gather(1, torch.tensor(prefix.token_ids)[:, None]).sum().item()
    assert prefix.logprob == pytest.approx(chosen, abs=1e-3)
