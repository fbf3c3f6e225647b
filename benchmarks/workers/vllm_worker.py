"""vLLM: its CPU build in float32, on CUDA bfloat16. Environment variables are set by engines.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import vllm


class Worker:
    """One engine for all requests; no request is longer than `context_tokens`.

    vllm_options: more engine arguments.
    """

    def __init__(
        self,
        model: str,
        threads: int,
        context_tokens: int,
        vllm_options: Mapping[str, Any],
    ) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        # Samples share whole blocks of their prompt, and each computes the rest of it. 32 is the
        # least on CPUs; with their default of 128 nothing of a 40-token prompt is shared.
        of_device = {"dtype": "float32", "block_size": 32}
        if on_cuda := torch.cuda.is_available():
            of_device = {"dtype": "bfloat16"}
        self._llm = vllm.LLM(
            model=model,
            max_model_len=context_tokens,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
            **{**of_device, **vllm_options},
        )
        assert on_cuda or torch.get_num_threads() == threads, torch.get_num_threads()

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt."""
        sampling = vllm.SamplingParams(
            n=n,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        started = time.perf_counter()
        (answer,) = self._llm.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = [len(sample.token_ids) for sample in answer.outputs]
        assert lengths == [new_tokens] * n, lengths
        return seconds
