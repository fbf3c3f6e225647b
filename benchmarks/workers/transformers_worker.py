"""transformers' `generate` with num_return_sequences, float32."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

if TYPE_CHECKING:
    from benchmarks.workers.serve import Score


class Worker:
    """One model for all requests."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def measure(self, n: int, prompt_ids: list[int], new_tokens: int) -> float:
        """Seconds for n samples of the prompt."""
        started = time.perf_counter()
        output = self._samples(n, prompt_ids, new_tokens, end=None)
        seconds = time.perf_counter() - started
        assert output.shape == (n, new_tokens), output.shape
        return seconds

    def answer(
        self, score: Score, turns: list[dict[str, str]], n: int, max_tokens: int, seed: int
    ) -> tuple[str, int]:
        """The best of n samples."""
        torch.manual_seed(seed)
        prompt = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        end = self._tokenizer.eos_token_id
        rows = self._samples(n, prompt["input_ids"], max_tokens, end).tolist()
        # After its end token, a row is filled up with more of them.
        lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        return max(zip(score(texts), texts, strict=True))[1], sum(lengths)

    @torch.inference_mode()
    def _samples(self, n: int, prompt_ids: list[int], new_tokens: int, end: int | None) -> Any:
        """Token ids, [n, at most new_tokens]."""
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=n,
            eos_token_id=end,
            pad_token_id=end or 0,
        )
        # generate() takes what its config leaves out, such as the end token, from the model's.
        self._model.generation_config = config
        input_ids = torch.tensor([prompt_ids])
        mask = torch.ones_like(input_ids)
        output = self._model.generate(input_ids, attention_mask=mask, generation_config=config)
        return output[:, len(prompt_ids) :]
