"""vLLM's CPU build, float32, in this process. Its environment variables are set by engines.py."""

from __future__ import annotations

import time

import torch
import vllm


class Worker:
    """One engine for all requests; no request is longer than `context_tokens`."""

    def __init__(self, model: str, threads: int, context_tokens: int) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._llm = vllm.LLM(
            model=model,
            dtype="float32",
            max_model_len=context_tokens,
            max_num_seqs=256,
            # Samples share whole blocks of their prompt, and each computes the rest of it. 32 is
            # the least; with the default of 128 nothing of a 40-token prompt is shared.
            block_size=32,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        assert torch.get_num_threads() == threads, torch.get_num_threads()

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
