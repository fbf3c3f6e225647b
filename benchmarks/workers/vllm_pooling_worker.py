"""vLLM as a server of a sequence classifier, float32. Environment variables: see engines.py."""

from __future__ import annotations

import time

import torch
import vllm

# Far above float32's rounding, far below the differences between texts.
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
            block_size=32,  # as in vllm_worker.py
            enable_prefix_caching=True,
            seed=0,
        )
        assert torch.get_num_threads() == threads, torch.get_num_threads()

    def measure(self, token_ids: list[list[int]], scores: list[float]) -> float:
        """Seconds for the scores of all texts, which must be `scores`."""
        prompts = [{"prompt_token_ids": ids} for ids in token_ids]
        raw = vllm.PoolingParams(use_activation=False)
        started = time.perf_counter()
        answers = self._llm.classify(prompts, pooling_params=raw, use_tqdm=False)
        seconds = time.perf_counter() - started
        pairs = zip((answer.outputs.probs[0] for answer in answers), scores, strict=True)
        difference = max(abs(a - b) for a, b in pairs)
        assert difference < _TOLERANCE, f"scores differ by {difference}"
        self._llm.reset_prefix_cache()  # the next request must not find this prompt
        return seconds
