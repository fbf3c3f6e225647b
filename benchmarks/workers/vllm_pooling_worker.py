"""vLLM's CPU build as a server of a sequence classifier, float32: imports nothing of ours.

The environment it needs is set by whoever starts it (see engines.py).
"""

from __future__ import annotations

import time

import torch
import vllm

# Far above float32's rounding, far below what tells two texts apart.
_TOLERANCE = 1e-3


class Worker:
    """One engine for all requests; no text is longer than `context_tokens`."""

    def __init__(self, model: str, threads: int, context_tokens: int) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._llm = vllm.LLM(
            model=model,
            runner="pooling",
            dtype="float32",
            max_model_len=context_tokens,
            max_num_seqs=256,
            block_size=32,  # as in vllm_worker: what texts share is shared in whole blocks
            enable_prefix_caching=True,
            seed=0,
        )
        assert torch.get_num_threads() == threads, torch.get_num_threads()

    def measure(self, token_ids: list[list[int]], scores: list[float]) -> float:
        """Seconds for the texts' scores, which must be `scores`."""
        prompts = [{"prompt_token_ids": ids} for ids in token_ids]
        raw = vllm.PoolingParams(use_activation=False)
        began = time.perf_counter()
        answers = self._llm.classify(prompts, pooling_params=raw, use_tqdm=False)
        seconds = time.perf_counter() - began
        found = [answer.outputs.probs[0] for answer in answers]
        worst = max(abs(a - b) for a, b in zip(found, scores, strict=True))
        assert worst < _TOLERANCE, f"scores differ by {worst}"
        self._llm.reset_prefix_cache()  # the next request is to be a new prompt's
        return seconds
