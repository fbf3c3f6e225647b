"""transformers' `generate` with num_return_sequences, float32."""

from __future__ import annotations

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


class Worker:
    """One model for all requests."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt."""
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=n,
            eos_token_id=None,
            pad_token_id=0,
        )
        # generate() takes what its config leaves out, such as the end token, from the model's.
        self._model.generation_config = config
        input_ids = torch.tensor([prompt_ids])
        mask = torch.ones_like(input_ids)
        started = time.perf_counter()
        output = self._model.generate(input_ids, attention_mask=mask, generation_config=config)
        seconds = time.perf_counter() - started
        assert output.shape == (n, len(prompt_ids) + new_tokens), output.shape
        return seconds
