"""Our draws inside vLLM: runs in its worker, after the forward pass, before its own sampler.

vLLM seeds a request's generator once and steps it per token; what a candidate says would depend on
how its tokens were asked for. Here each token is drawn as the own engine draws it, keyed by (seed,
candidate, step), and handed to vLLM's sampler as the only possible one. Knows no session. An
interface of vLLM's first model runner; the second one has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from generator_service.sampling import sample
from specrej.contracts import Sampling

# What a request's extra arguments are found under.
KEY = "specrej"


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in the batch; `made` is vLLM's own list of what it has made so far, and grows."""

    sampling: Sampling
    candidate: int
    first_step: int
    forbidden: tuple[int, ...]
    made: Sequence[int]

    @property
    def step(self) -> int:
        return self.first_step + len(self.made)

    @property
    def taboo(self) -> tuple[int, ...]:
        return self.forbidden if self.step < self.sampling.min_tokens else ()


def arguments(
    sampling: Sampling, candidate: int, step: int, forbidden: Sequence[int]
) -> dict[str, Any]:
    """A request's extra arguments: whose tokens it makes from `step` on, and how.

    `forbidden` are not drawn before min_tokens.
    """
    told = {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_tokens": sampling.min_tokens,
        "candidate": candidate,
        "step": step,
        "forbidden": list(forbidden),
    }
    return {KEY: told}


class KeyedDraws(LogitsProcessor):  # type: ignore[misc]
    """Makes the token that is drawn infinitely likely, for vLLM's greedy sampler to find."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """logits: float32 [requests, vocabulary], changed in place."""
        groups: dict[tuple[Sampling, int, tuple[int, ...]], list[int]] = {}
        for index in range(len(logits)):
            if row := self._rows.get(index):
                groups.setdefault((row.sampling, row.step, row.taboo), []).append(index)
        for (sampling, step, taboo), indices in groups.items():
            part = logits if len(indices) == len(logits) else logits[indices]
            ids = [self._rows[index].candidate for index in indices]
            tokens, _ = sample(part, sampling, ids, step, taboo)
            logits[torch.tensor(indices, device=logits.device), tokens] = torch.inf
        return logits


def _row(params: SamplingParams, _prompt: list[int] | None, made: list[int]) -> _Row | None:
    told = (params.extra_args or {}).get(KEY)
    if told is None:
        return None
    sampling = Sampling(
        seed=told["seed"],
        temperature=told["temperature"],
        top_k=told["top_k"],
        top_p=told["top_p"],
        min_tokens=told["min_tokens"],
    )
    return _Row(sampling, told["candidate"], told["step"], tuple(told["forbidden"]), made)
